"""Checks of the state of a graph, so that kernels can trust it.

Kernels do not check indices, and a pickle may come from anyone. So the state has exactly these fields, and each is
checked: its type, its shape, its device and its range. `Graph.validate` checks the ends of the edges and their data.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpnn.graph.relations import Relation
from mpnn.graph.runs import Runs

FORMS = ("_given_runs", "_labels", "_edges")
FIELDS = {"num_dst", "num_src", "device", "name", "shift", "relation", "positions", "order", "node_ids", "degrees"} | {
    *FORMS,
    *("edge_attr", "_edge_type", "edge_ids", "batch_sizes", "periodic"),
}
MAX_POSITION = 2**61  # so that differences of positions, and a shift, stay within int64


def check(state: Any, what: str) -> None:
    """Raises ValueError, with `what` is wrong first, unless `state` can be that of a graph."""
    if damage := _damage(state):
        raise ValueError(f"{what}: {damage}")


def _damage(state: Any) -> str | None:
    if isinstance(state, dict) and "exchange" in state:
        return (
            f"it has an exchange, and a part that one process computes stays in its process; got {state['exchange']!r}"
        )
    if not isinstance(state, dict) or state.keys() != FIELDS:
        names = sorted(map(str, FIELDS.symmetric_difference(state)))
        return f"these fields are missing, or unknown to this version: {', '.join(names)}"
    num_dst, num_src = state["num_dst"], state["num_src"]
    if any(type(n) is not int or n < 0 for n in (num_dst, num_src)):
        return f"its sizes are {num_dst!r} and {num_src!r}"
    if [state[form] is None for form in FORMS].count(False) != 1:
        return "it needs one of runs, labels and edges"
    if not isinstance(state["device"], Tensor):
        return f"its device is {state['device']!r}"
    for name, expected, fits in _tests(state, num_dst, num_src, state["device"].device):
        value = state[name]
        if not fits(value) and not (value is None and name not in ("name", "shift", "periodic")):
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            return f"{name.strip('_')} must be {expected}; got {got}"
    return None


def _tests(
    state: dict[str, Any], num_dst: int, num_src: int, device: torch.device
) -> Iterator[tuple[str, str, Callable[[Any], bool]]]:
    """The name of each field, what it must be, and a function that says whether a value is that."""
    sizes = (num_dst, num_src)
    edges = state["_edges"]

    def is_pair(x: Any, fits: Callable[[Any, int], bool]) -> bool:
        return type(x) is tuple and len(x) == 2 and all(map(fits, x, sizes))

    def is_per_edge(x: Any) -> bool:
        return isinstance(x, Tensor) and x.device == device and edges is not None

    yield "name", "a string", lambda x: type(x) is str
    yield "periodic", "True or False", lambda x: type(x) is bool
    yield "shift", "an integer within 2**61", lambda x: type(x) is int and abs(x) <= MAX_POSITION
    yield "relation", "a Relation", lambda x: isinstance(x, Relation)
    yield "_given_runs", "Runs of its size", lambda x: type(x) is Runs and (x.num_dst, x.num_src) == sizes
    yield "_labels", f"int64 [{num_dst}]", lambda x: num_dst == num_src and _is_integers(x, (num_dst,))
    yield "_edges", f"a tensor on {device}", is_per_edge
    yield "edge_attr", f"a tensor on {device}, of explicit edges", is_per_edge
    yield "_edge_type", f"a tensor on {device}, of explicit edges", is_per_edge
    yield "edge_ids", "int64, one for each edge", lambda x: is_per_edge(x) and _is_integers(x, edges.shape[1:], device)
    yield "batch_sizes", f"numbers of nodes, {num_dst} in all", lambda x: num_dst == num_src and _are_sizes(x, num_dst)
    yield (
        *("order", f"a permutation of {num_dst} rows, int64"),
        lambda x: _is_integers(x, (num_dst,)) and torch.equal(x.cpu().sort().values, torch.arange(num_dst)),
    )
    yield (
        *("positions", f"int64 [{num_dst}] and [{num_src}] on {device}, within 2**61"),
        lambda x: is_pair(x, lambda at, n: _is_integers(at, (n,), device) and _is_in_range(at)),
    )
    yield (
        *("degrees", f"numbers [{num_dst}] and [{num_src}] on {device}"),
        lambda x: is_pair(x, lambda of, n: isinstance(of, Tensor) and of.shape == (n,) and of.device == device),
    )
    yield (
        *("node_ids", f"int32 [{num_dst}] and [{num_src}] on {device}"),
        lambda x: is_pair(x, lambda ids, n: _is_integers(ids, (n,), device, torch.int32)),
    )


def _is_integers(
    x: Any, shape: tuple[int, ...], device: torch.device | None = None, dtype: torch.dtype = torch.int64
) -> bool:
    """Whether the memory of x holds exactly these integers, one after the other; on any device by default."""
    is_plain = isinstance(x, Tensor) and x.layout == torch.strided and x.is_contiguous()
    return is_plain and x.shape == shape and x.dtype == dtype and device in (None, x.device)


def _are_sizes(x: Any, total: int) -> bool:
    return type(x) is tuple and all(type(n) is int and n >= 0 for n in x) and sum(x) == total


def _is_in_range(x: Tensor) -> bool:
    return x.is_meta or not len(x) or max(abs(int(end)) for end in x.aminmax()) <= MAX_POSITION
