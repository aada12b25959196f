"""Explicit edges: what is asked of them, and the same edges sorted for kernels that walk rows.

Apart from `Graph` because none of it knows of topologies, runs or attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


_derivations = [0]


def derivations() -> int:
    """A number that changes whenever something is derived from a graph and kept."""
    return _derivations[0]


def trainable(build: Callable[[], T]) -> T:
    """`build()`, whose tensors can be trained with even when `torch.inference_mode` is on."""
    if torch.is_inference_mode_enabled():
        recording = torch.is_grad_enabled()  # plans depend on it, and leaving inference mode turns it on
        with torch.inference_mode(False), torch.set_grad_enabled(recording):
            value = build()
    else:
        value = build()
    _derivations[0] += 1
    return value


class built_once(cached_property[T]):
    """A cached property that is `trainable`."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        get = super().__get__
        return trainable(lambda: get(instance, owner))


@dataclass(frozen=True, eq=False)
class CSR:
    """Edges sorted by row: row r has the edges `ptr[r]:ptr[r+1]`, each with its `col`. All int64.

    `edge_id` says where each of them stands in the caller's order; None when that is the same order.
    """

    ptr: Tensor
    col: Tensor
    edge_id: Tensor | None

    @built_once
    def row(self) -> Tensor:
        """The row of each edge, [E]."""
        return torch.repeat_interleave(self.ptr.diff(), output_size=len(self.col))

    @built_once
    def position(self) -> Tensor | None:
        """Where each edge of the caller's order stands in this one, [E]; None when that is the same order."""
        return None if self.edge_id is None else self.edge_id.argsort()

    def from_caller(self, per_edge: Tensor, dim: int = 0) -> Tensor:
        """Values in the caller's edge order, put into this one."""
        return per_edge if self.edge_id is None else per_edge.index_select(dim, self.edge_id)

    def to_caller(self, per_edge: Tensor, dim: int = 0) -> Tensor:
        """Values in this edge order, put into the caller's."""
        return per_edge if self.position is None else per_edge.index_select(dim, self.position)


def sorted_by(row: Tensor, col: Tensor, num_rows: int) -> CSR:
    """Edges row[e], col[e] sorted by row; those of one row keep their order."""
    edge_id = torch.sort(row, stable=True).indices
    ptr = torch.bincount(row + 1, minlength=num_rows + 1).cumsum(0)
    return CSR(ptr, col.index_select(0, edge_id), edge_id)


def nodes_without_loop(edges: Tensor, num_nodes: int) -> Tensor:
    """The nodes that do not hear themselves, ascending."""
    src, dst = edges
    missing = torch.ones(num_nodes, dtype=torch.bool, device=edges.device)
    missing[dst[src == dst]] = False
    return missing.nonzero().squeeze(1)


def one_way(edges: Tensor, num_nodes: int) -> Tensor:
    """Which edges have none the other way, ascending."""
    src, dst = edges
    return (~torch.isin(src * num_nodes + dst, dst * num_nodes + src)).nonzero().squeeze(1)


def check(edges: Tensor | None, num_dst: int, num_src: int, data: dict[str, Tensor | None]) -> None:
    """Raises unless these are edges among so many nodes, and `edge_attr` and `edge_type` fit them."""
    for name, n in (("num_dst", num_dst), ("num_src", num_src)):
        if n < 0:
            raise ValueError(f"{name} must not be negative; got {n}")
    if edges is None:
        return
    check_form(edges)
    check_ends(edges, num_dst, num_src)
    for name, given in data.items():
        if given is not None:
            check_data(name, given, edges)
    classes = data["edge_type"]
    if classes is not None:
        check_classes(classes)


def check_form(edges: Tensor) -> None:
    """Raises unless these are integers [2, E]."""
    if edges.dim() != 2 or edges.shape[0] != 2:
        turned = "; give edge_index.T" if edges.dim() == 2 and edges.shape[1] == 2 else ""
        raise ValueError(
            f"edge_index must have shape [2, E], sources above destinations; got {list(edges.shape)}{turned}"
        )
    if edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool:
        raise TypeError(f"edge_index must hold integers; got {edges.dtype}")


def check_ends(edges: Tensor, num_dst: int, num_src: int) -> None:
    """Raises IndexError, naming the first edge that has an end which is no node."""
    if edges.shape[1] == 0:
        return
    least, most = (ends.tolist() for ends in edges.aminmax(dim=1))
    if min(least) >= 0 and most[0] < num_src and most[1] < num_dst:
        return
    for role, ends, n in (("source", edges[0], num_src), ("destination", edges[1], num_dst)):
        bad = ((ends < 0) | (ends >= n)).nonzero()
        if len(bad):
            e = int(bad[0])
            raise IndexError(
                f"edge {e} ({int(edges[0, e])} -> {int(edges[1, e])}) has {role} {int(ends[e])}, "
                f"but there are {n} {role}s, counted from 0"
            )


def check_data(name: str, data: Tensor, edges: Tensor) -> None:
    """Raises unless `data` has one row for each edge, on the device of the edges."""
    if data.dim() == 0 or len(data) != edges.shape[1]:
        raise ValueError(f"{name} must have one row for each of the {edges.shape[1]} edges; got {list(data.shape)}")
    if data.device != edges.device:
        raise ValueError(f"{name} is on {data.device} and the edges on {edges.device}; move one")


def check_classes(classes: Tensor) -> None:
    """Raises unless these are integers [E] from 0 upward; names the first edge that has another."""
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool or classes.dim() != 1:
        raise TypeError(f"edge_type must be integers [E]; got {classes.dtype} of shape {list(classes.shape)}")
    bad = (classes < 0).nonzero()
    if len(bad):
        raise ValueError(f"edge {int(bad[0])} has edge_type {int(classes[bad[0]])}; classes count from 0")
