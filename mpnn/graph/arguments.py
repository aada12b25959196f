"""Validation of numbers that callers pass. Each error names the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

_MAX_VALUE = 2**61  # node indices are int64, and rules add these values to them


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        shown = type(value).__name__ if isinstance(value, nn.Module) else repr(value)
        raise TypeError(f"{name} must be an integer; got {shown}")
    return int(value)


def as_integer(name: str, value: Any) -> int:
    if abs(integer(name, value)) > _MAX_VALUE:
        raise ValueError(f"{name} must not exceed 2**61; got {value}")
    return int(value)


def not_negative(name: str, value: Any) -> None:
    if integer(name, value) < 0:
        raise ValueError(f"{name} must not be negative; got {value}")


def at_least(name: str, value: Any, least: int) -> int:
    if as_integer(name, value) < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return int(value)
