"""Validation of numbers that callers pass, where they pass them. Each error names the argument."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

MAX_VALUE = 2**61  # node indices are int64, and rules add these values to them


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        shown = type(value).__name__ if isinstance(value, nn.Module) else repr(value)
        raise TypeError(f"{name} must be an integer; got {shown}")
    return int(value)


def as_integer(name: str, value: Any) -> int:
    if abs(integer(name, value)) > MAX_VALUE:
        raise ValueError(f"{name} must not exceed 2**61; got {value}")
    return int(value)


def at_least(name: str, value: Any, least: int) -> int:
    if as_integer(name, value) < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return int(value)


def integers(name: str, values: Iterable[int] | Tensor, expected: str = "a list of integers") -> tuple[int, ...]:
    """Converts an iterable, array or tensor of integers to a tuple."""
    is_scalar = isinstance(values, (Tensor, np.ndarray)) and values.ndim == 0
    if is_scalar or isinstance(values, (str, bytes)) or not isinstance(values, (Iterable, Tensor)):
        raise TypeError(f"{name} must be {expected}; got {values!r}")
    items = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    return tuple(as_integer(f"{name}[{k}]", v) for k, v in enumerate(items))


def distinct_indices(name: str, values: Iterable[int] | Tensor) -> tuple[int, ...]:
    """Converts node indices to an ascending tuple without repeats; they must not be negative."""
    nodes = integers(name, values, "an integer or a list of integers")
    if nodes and min(nodes) < 0:
        raise ValueError(f"{name} must not hold negative nodes; got {min(nodes)}")
    return tuple(sorted(set(nodes)))


INTEGERS = ("int", "uint")
FLOATS = ("float", "bfloat")
REAL = ("int", "uint", "float", "bfloat", "bool")


def check_form(
    expected: str,
    x: Any,
    numbers: str | tuple[str, ...],
    shape: Sequence[int | None],
    error: type[Exception] = ValueError,
) -> None:
    """Raises an error that says what is `expected` and what was passed, unless x is a tensor or an array of this shape,
    in which None is any size, and the name of its type begins with one of `numbers`."""
    sizes = tuple(getattr(x, "shape", ()))
    dtype = getattr(x, "dtype", f"a {type(x).__name__}")
    is_form = len(sizes) == len(shape) and all(n in (None, size) for n, size in zip(shape, sizes, strict=True))
    if not is_form or not str(dtype).removeprefix("torch.").startswith(numbers):
        raise error(f"{expected}; got {dtype} of shape {list(sizes)}")


def one_set(what: str, graph: Any) -> None:
    """Raises ValueError if the destinations and the sources of a graph are two sets of nodes."""
    if graph.num_dst != graph.num_src:
        raise ValueError(f"{what} needs one set of nodes; the graph is {graph.num_dst} x {graph.num_src}")


def are_one_set(graph: Any, given: bool | None) -> bool:
    """Whether the destinations and the sources of a graph are the same nodes: as `given`, or if there are equally many.

    Raises:
        ValueError: the same nodes cannot be destinations and sources of different numbers.
    """
    if given:
        one_set("one_set=True", graph)
    return graph.num_dst == graph.num_src if given is None else given
