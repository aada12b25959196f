"""Validation of builder arguments, so that an invalid one raises in the builder and not when the graph is bound."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph.arguments import as_integer


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
