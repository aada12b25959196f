"""Validation of builder arguments, so that an invalid one raises in the builder and not when the graph is bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_MOST = 2**61  # node indices are int64, and rules add these values to them


def as_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if abs(int(value)) > _MOST:
        raise ValueError(f"{name} must not exceed 2**61; got {value}")
    return int(value)


def at_least(name: str, value: Any, least: int) -> None:
    if as_integer(name, value) < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def integers(name: str, values: Iterable[int] | Tensor, expected: str = "a list of integers") -> tuple[int, ...]:
    """Converts an iterable, array or tensor of integers to a tuple."""
    is_scalar = isinstance(values, (Tensor, np.ndarray)) and values.ndim == 0
    if is_scalar or isinstance(values, (str, bytes)) or not isinstance(values, (Iterable, Tensor)):
        raise TypeError(f"{name} must be {expected}; got {values!r}")
    items = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    return tuple(as_integer(f"{name}[{k}]", v) for k, v in enumerate(items))


def num_rows(i: NDArray[np.int64]) -> int:
    """The number of destinations of a graph, from the ascending rows `i` that a rule receives: the last is among
    them."""
    return int(i[-1]) + 1 if len(i) else 0


def distinct_indices(name: str, values: Iterable[int] | Tensor) -> tuple[int, ...]:
    """Converts node indices to an ascending tuple without repeats; they must not be negative."""
    nodes = integers(name, values, "an integer or a list of integers")
    if nodes and min(nodes) < 0:
        raise ValueError(f"{name} must not hold negative nodes; got {min(nodes)}")
    return tuple(sorted(set(nodes)))
