"""Explicit edges: validation, and sorting into CSR for kernels that process rows.

This file is separate from `Graph` because it does not depend on topologies, runs or attributes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mpnn.graph import capacity
from mpnn.graph.arguments import INTEGERS, check_form
from mpnn.graph.modes import outside_modes
from mpnn.kernels.edges import rows_of, sort_edges

T = TypeVar("T")


_MANY_EDGES = 1 << 16  # below, converting edges costs more than their memory is worth

DERIVATIONS = [0]
"""A counter that changes whenever a value is cached on a graph."""


def built(build: Callable[[], T]) -> T:
    """Returns `build()` for a cache: run outside the modes of torch, and counted in `DERIVATIONS`."""
    value = outside_modes(build)
    DERIVATIONS[0] += 1
    return value


class graph_property(Generic[T]):
    """A cached property that is computed outside the modes of torch. As `functools.cached_property`, without its lock,
    which takes longer than most of what a small graph derives: two threads may compute the same value twice, and both
    receive the first."""

    def __init__(self, build: Callable[[Any], T]) -> None:
        self.build = build
        self.__doc__ = build.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = built(lambda: self.build(instance))
        return instance.__dict__.setdefault(self.name, value)


@dataclass(frozen=True, eq=False)
class CSR:
    """Edges sorted by row: row r has the edges `ptr[r]:ptr[r+1]`, each with its `col`. All int64.

    `columns` is `col` as it is stored, int32 or int64; kernels read 32 bits. `edge_id` is the index of each edge in the
    caller's order; None if both orders are the same.
    """

    ptr: Tensor
    columns: Tensor
    edge_id: Tensor | None

    @graph_property
    def col(self) -> Tensor:
        """The column of each edge, [E]; computed when it is first read if `columns` is int32."""
        return self.columns.long()

    @graph_property
    def row(self) -> Tensor:
        """The row of each edge, [E]."""
        return rows_of(self.ptr, len(self.columns))

    @graph_property
    def position(self) -> Tensor | None:
        """The index in this order of each edge of the caller's order, [E]; None if both orders are the same."""
        return None if self.edge_id is None else inverse(self.edge_id)

    def from_caller(self, per_edge: Tensor, dim: int = 0) -> Tensor:
        """Permutes values from the caller's edge order to this order."""
        return per_edge if self.edge_id is None else per_edge.index_select(dim, self.edge_id)

    def to_caller(self, per_edge: Tensor, dim: int = 0) -> Tensor:
        """Permutes values from this edge order to the caller's order."""
        return per_edge if self.position is None else per_edge.index_select(dim, self.position)


def sorted_by(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> CSR:
    """Sorts the edges row[e], col[e] by row. The sort is stable. Raises MemoryError if this many rows do not fit."""
    capacity.require(16 * num_rows, f"the edges of {num_rows:,} nodes by node", "number the nodes from 0 without gaps")
    return CSR(*sort_edges(row, col, num_rows, num_cols))


def inverse(permutation: Tensor) -> Tensor:
    """The inverse permutation, int64 [N]."""
    numbers = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).index_copy_(0, permutation, numbers)


def narrow(edges: Tensor, num_dst: int, num_src: int) -> Tensor:
    """Edges as a graph stores them: int32 if they are many, and int64 if they are few or nodes need 64 bits."""
    fits = max(num_dst, num_src) < 2**31
    return edges.int() if fits and edges.shape[1] >= _MANY_EDGES else edges.long()


def check(edges: Tensor | None, num_dst: int, num_src: int, data: dict[str, Tensor | None]) -> None:
    """Validates edges, and `edge_attr` and `edge_type` in `data`, for a graph of this size. Messages name the first bad
    edge."""
    if num_dst < 0 or num_src < 0:
        raise ValueError(f"num_dst and num_src must be at least 0; got {num_dst} and {num_src}")
    if edges is None:
        return
    check_edge_index(edges)
    check_ends(edges, num_dst, num_src)
    for name, x in data.items():
        if x is not None and (x.dim() == 0 or len(x) != edges.shape[1]):
            raise ValueError(f"{name} must have one row for each of the {edges.shape[1]} edges; got {list(x.shape)}")
        if x is not None and x.device != edges.device:
            raise ValueError(f"{name} is on {x.device} and the edges on {edges.device}; move one")
    if (edge_type := data["edge_type"]) is not None:
        check_form("edge_type must be integers [E]", edge_type, INTEGERS, (None,), TypeError)
        if len(bad := (edge_type < 0).nonzero()):
            raise ValueError(f"edge {int(bad[0])} has edge_type {int(edge_type[bad[0]])}; edge types count from 0")


def check_edge_index(edges: Tensor) -> None:
    """Raises ValueError or TypeError unless the edges are integers [2, E]."""
    if edges.dim() != 2 or edges.shape[0] != 2:
        hint = "; pass edge_index.T" if edges.dim() == 2 and edges.shape[1] == 2 else ""
        raise ValueError(
            f"edge_index must have shape [2, E], sources above destinations; got {list(edges.shape)}{hint}"
        )
    if edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool:
        raise TypeError(f"edge_index must hold integers; got {edges.dtype}")


def check_ends(edges: Tensor, num_dst: int, num_src: int) -> None:
    """Raises IndexError if an edge refers to a node that does not exist. The message names the first such edge."""
    if edges.shape[1] == 0:
        return
    least, most = map(int, edges.aminmax())  # of both ends at once: faster, and enough for one set of nodes
    if least >= 0 and most < min(num_src, num_dst):
        return
    for role, ends, n in (("source", edges[0], num_src), ("destination", edges[1], num_dst)):
        bad = ((ends < 0) | (ends >= n)).nonzero()
        if len(bad):
            e = int(bad[0])
            raise IndexError(
                f"edge {e} ({int(edges[0, e])} -> {int(edges[1, e])}) has {role} {int(ends[e])}, "
                f"but there are {n} {role}s, counted from 0"
            )
