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


def distinct_indices(name: str, values: Iterable[int] | Tensor, keep_order: bool = False) -> tuple[int, ...]:
    """Node numbers from 0 upward, none twice; sorted unless their order means something."""
    if isinstance(values, (str, bytes)) or not isinstance(values, (Iterable, Tensor)):
        raise TypeError(f"{name} must be an integer or a list of integers; got {values!r}")
    items = np.atleast_1d(values).tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    nodes = tuple(whole(f"{name}[{k}]", v) for k, v in enumerate(items))
    if nodes and min(nodes) < 0:
        raise ValueError(f"{name} must not hold negative nodes; got {min(nodes)}")
    if keep_order:
        return nodes
    return tuple(sorted(set(nodes)))
