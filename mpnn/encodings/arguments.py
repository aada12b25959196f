"""Validation of arguments of encodings."""

from __future__ import annotations

from typing import Any

import numpy as np


def not_negative(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an integer, ValueError if it is negative."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative; got {value}")
