"""What builders ask of their arguments, so that a wrong one is named when it is given, not when the graph is bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

_MOST = 2**61  # node numbers are int64, and rules add such values to them


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if abs(int(value)) > _MOST:
        raise ValueError(f"{name} must not be beyond 2**61; got {value}")
    return int(value)


def at_least(name: str, value: Any, least: int) -> None:
    if whole(name, value) < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def integers(name: str, values: Iterable[int] | Tensor, wanted: str = "a list of integers") -> tuple[int, ...]:
    """A list of integers, whatever holds them."""
    scalar = isinstance(values, (Tensor, np.ndarray)) and values.ndim == 0
    if scalar or isinstance(values, (str, bytes)) or not isinstance(values, (Iterable, Tensor)):
        raise TypeError(f"{name} must be {wanted}; got {values!r}")
    items = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    return tuple(whole(f"{name}[{k}]", v) for k, v in enumerate(items))


def distinct_indices(name: str, values: Iterable[int] | Tensor) -> tuple[int, ...]:
    """Node numbers from 0 upward, none twice, ascending."""
    nodes = integers(name, values, "an integer or a list of integers")
    if nodes and min(nodes) < 0:
        raise ValueError(f"{name} must not hold negative nodes; got {min(nodes)}")
    return tuple(sorted(set(nodes)))
