"""Parameters of the kernels along the rows of a sparse graph, as in `mpnn/kernels/cpu/rows.h`."""

from ctypes import Structure, addressof, c_int64, c_void_p
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpnn.kernels.cpu.library import address, fields


class RowsStruct(Structure):
    _fields_ = (
        *fields(c_int64, "num_rows num_edges"),
        *fields(c_void_p, "ptr col edge slot node"),
        ("num_parts", c_int64),
        ("cuts", c_void_p),
    )


class NodeTensor(Structure):
    """[batch, nodes, heads, width]; the width is contiguous."""

    _fields_ = (("data", c_void_p), *fields(c_int64, "heads width batch_stride node_stride head_stride"))


class EdgeTensor(Structure):
    """[batch or 1, edges or edge types, heads or 1, width], contiguous."""

    _fields_ = (*fields(c_void_p, "data ids"), *fields(c_int64, "heads width batch_stride"))


class Rows:
    """Edges sorted by row: `ptr` [rows + 1] int64, `col` [E] int32.

    `edge` [E] int64 is the number of each edge in the caller's order, None if the orders are the same; `slot` [E] its
    position in the order by destination, None if this is that order; `node` [rows] the node of each row, None if row r
    is node r.
    """

    def __init__(
        self,
        ptr: Tensor,
        col: Tensor,
        edge: Tensor | None = None,
        slot: Tensor | None = None,
        node: Tensor | None = None,
    ) -> None:
        self.ptr, self.col, self.edge, self.slot, self.node = ptr, col, edge, slot, node
        self.num_rows, self.num_edges = len(ptr) - 1, len(col)
        self._structs: dict[int, tuple[RowsStruct, Any]] = {}
        self._unwritten: dict[int, Tensor] = {}

    def num_parts(self, width: int, most: int, least: int) -> int:
        """The number of parts: at most `most`, and so few that each has `least` components, `width` an edge. It does
        not depend on the number of threads, so results do not either."""
        return max(1, min(most, self.num_edges * width // least, self.num_edges))

    def struct(self, parts: int) -> RowsStruct:
        """The parameters of kernels that run so many parts. They point into the tensors of this object."""
        entry = self._structs.get(parts)
        if entry is None:
            tensors = (self.ptr, self.col, self.edge, self.slot, self.node)
            cuts = (c_int64 * (parts + 1))(*self._cuts(parts))
            struct = RowsStruct(self.num_rows, self.num_edges, *map(address, tensors), parts, addressof(cuts))
            # The struct does not keep `cuts`. If two threads build one, both use the first, which stays.
            entry = self._structs.setdefault(parts, (struct, cuts))
        return entry[0]

    def unwritten(self, parts: int) -> Tensor:
        """The rows that no single part writes in full: rows without edges, and rows that several parts may share."""
        if parts not in self._unwritten:
            cuts = torch.tensor(self._cuts(parts)[1:-1], dtype=torch.int64)
            shared = torch.searchsorted(self.ptr, cuts, right=True) - 1
            self._unwritten[parts] = torch.cat([(self.ptr.diff() == 0).nonzero()[:, 0], shared]).unique()
        return self._unwritten[parts]

    def _cuts(self, parts: int) -> list[int]:
        """The edges at which parts begin, and the last one's end."""
        return [k * self.num_edges // parts for k in range(parts + 1)]

    @cached_property
    def degree(self) -> Tensor:
        """The number of edges of each node, at least 1, [rows, 1]."""
        degree = self.ptr.diff().clamp(min=1)
        if self.node is not None:
            degree = torch.empty_like(degree).index_copy_(0, self.node, degree)
        return degree[:, None]


def node_tensor(x: Tensor | None, trailing: int) -> NodeTensor:
    """A tensor [..., N, heads, width], or with two `trailing` dimensions [..., N, heads] of width 1."""
    if x is None:
        return NodeTensor(None, 1, 0, 0, 0, 0)
    heads, width = (*x.shape[1 - trailing :], 1)[:2]
    strides = (*x.stride()[-trailing:], 1)[:2]
    between = x.stride(-1 - trailing) if x.dim() > trailing else 0
    return NodeTensor(address(x), heads, width, between, *strides)


def edge_tensor(x: Tensor | None, trailing: int, ids: Tensor | None = None) -> EdgeTensor:
    """A tensor [..., E, heads, width], or with two `trailing` dimensions [..., E, heads] of width 1. Entries of the
    batch share it if it has one for all of them."""
    if x is None:
        return EdgeTensor(None, None, 1, 0, 0)
    rows, heads, width = (*x.shape[-trailing:], 1)[:3]
    stride = rows * heads * width if x.shape[:-trailing].numel() > 1 else 0
    return EdgeTensor(address(x), address(ids), heads, width, stride)
