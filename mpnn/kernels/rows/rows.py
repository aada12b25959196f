"""Parameters of the kernels along the rows of a sparse graph, as in `mpnn/kernels/cpu/rows.h`."""

from collections.abc import Hashable
from ctypes import Structure, c_int64, c_void_p
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.kernels.cpu.library import address, addresses, fields


class RowsStruct(Structure):
    _fields_ = (
        *fields(c_int64, "num_rows num_edges"),
        *fields(c_void_p, "ptr col edge slot node"),
        ("num_chunks", c_int64),
        ("cuts", c_void_p),
    )


class NodeTensor(Structure):
    """[batch, nodes, heads, width]; the width is contiguous."""

    _fields_ = (("data", c_void_p), *fields(c_int64, "heads width batch_stride node_stride head_stride"))


class EdgeTensor(Structure):
    """[batch or 1, edges or edge types, heads or 1, width], contiguous."""

    _fields_ = (*fields(c_void_p, "data ids"), *fields(c_int64, "heads width batch_stride"))


MIN_PIECE = 512  # edges: a row that chunks share is divided into pieces of this size or larger


class Chunks:
    """Consecutive ranges of edges, which kernels run side by side. `cuts` are the edges at which chunks begin, and the
    last one's end. `struct`: the parameters of the kernels, which point into the tensors of the rows."""

    def __init__(self, rows: "Rows", cuts: NDArray[np.int64]) -> None:
        self.rows = rows
        self.cuts = np.ascontiguousarray(cuts, np.int64)
        self.count = len(cuts) - 1
        of_rows = addresses(rows.ptr, rows.col, rows.edge, rows.slot, rows.node)
        self.struct = RowsStruct(rows.num_rows, rows.num_edges, *of_rows, self.count, self.cuts.ctypes.data)

    def __len__(self) -> int:
        return self.count

    @cached_property
    def unwritten(self) -> Tensor:
        """The rows that no single part writes in full: rows without edges, and rows that several chunks may share."""
        ptr = self.rows.ptr
        shared = torch.searchsorted(ptr, torch.from_numpy(self.cuts[1:-1]), right=True) - 1
        return torch.cat([(ptr.diff() == 0).nonzero()[:, 0], shared]).unique()


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
        self.ptr = ptr
        self.col = col
        self.edge = edge
        self.slot = slot
        self.node = node
        self.num_rows = ptr.numel() - 1
        self.num_edges = col.numel()
        self._chunks: dict[tuple[int, int, int], Chunks] = {}
        self._shares: dict[torch.dtype, Tensor] = {}
        self.repeated: dict[Hashable, bytes] = {}  # parameters of calls, by their form

    def chunks(self, width: int, most: int, least: int, *, equal: bool = False) -> Chunks:
        """The chunks of rows whose edges have `width` components. About `most` chunks have equally many edges, and each
        has `least` components or more.

        Chunks begin where rows begin, and where a piece of a long row begins. Pieces are counted from the beginning of
        their row, and their length follows from `width` alone. So the sum of a row is computed in an order that does
        not depend on the other rows, nor on the number of threads.

        Args:
            equal: there are at most `most` chunks, which begin at any edge, for sums whose order may depend on other
                rows.
        """
        piece = max(-(-2 * least // max(width, 1)), MIN_PIECE)
        count = max(1, min(most, self.num_edges * width // least, self.num_edges))
        key = count, piece, int(equal)
        chunks = self._chunks.get(key)
        if chunks is None:
            cuts = self.num_edges * np.arange(count + 1) // count if equal else self._cuts(count, piece)
            # If two threads build them, both use the first, which stay.
            chunks = self._chunks.setdefault(key, Chunks(self, cuts))
        return chunks

    def _cuts(self, count: int, piece: int) -> NDArray[np.int64]:
        """The edges at which chunks begin, and the last one's end."""
        if count == 1 and self.num_edges <= piece:
            return np.array([0, self.num_edges])
        ptr = self.ptr.numpy()
        degree = np.diff(ptr)
        if count == 1 and degree.max() <= piece:
            return np.array([0, self.num_edges])
        even = self.num_edges * np.arange(1, count) // count
        at_rows = ptr[np.searchsorted(ptr, even, side="right") - 1]
        long = np.flatnonzero(degree > piece)
        steps = -(-degree[long] // piece)
        first = np.repeat(ptr[long], steps)
        step = np.arange(len(first)) - np.repeat(np.cumsum(steps) - steps, steps)
        of_pieces = first + step * piece
        inside = np.unique(np.concatenate([at_rows, of_pieces, ptr[long + 1]]))
        inside = inside[(inside > 0) & (inside < self.num_edges)]
        return np.concatenate([[0], inside, [self.num_edges]])

    @cached_property
    def degree(self) -> Tensor:
        """The number of edges of each node, at least 1, [rows, 1]."""
        degree = self.ptr.diff().clamp(min=1)
        if self.node is not None:
            degree = torch.empty_like(degree).index_copy_(0, self.node, degree)
        return degree[:, None]

    @property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """The row and the column of each edge, and its number in the caller's order, int64 [E]."""
        row = torch.arange(self.num_rows) if self.node is None else self.node
        edge = torch.arange(self.num_edges) if self.edge is None else self.edge
        return row.repeat_interleave(self.ptr.diff()), self.col.long(), edge

    def to_edges(self, x: Tensor) -> Tensor:
        """Numbers [..., E, H] of the edges, in the caller's order, from those of their rows [..., N, H]."""
        row, _, edge = self.ends
        of_edges = x.index_select(-2, row)
        return of_edges if self.edge is None else torch.empty_like(of_edges).index_copy_(-2, edge, of_edges)

    def share(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight of each edge in the mean of its destination, [rows, 1]."""
        share = self._shares.get(dtype)
        if share is None:
            share = self._shares[dtype] = self.degree.to(dtype).reciprocal()
        return share


def node_tensor(x: Tensor | None, trailing: int) -> NodeTensor:
    """A tensor [..., N, heads, width], or with two `trailing` dimensions [..., N, heads] of width 1."""
    if x is None:
        return NodeTensor(None, 1, 0, 0, 0, 0)
    shape = x.shape
    strides = x.stride()
    between = strides[-1 - trailing] if len(shape) > trailing else 0
    if trailing == 2:
        return NodeTensor(address(x), shape[-1], 1, between, *strides[-2:])
    return NodeTensor(address(x), shape[-2], shape[-1], between, *strides[-3:-1])


def edge_tensor(x: Tensor | None, trailing: int, ids: Tensor | None = None) -> EdgeTensor:
    """A tensor [..., E, heads, width], or with two `trailing` dimensions [..., E, heads] of width 1. Entries of the
    batch share it if it has one for all of them."""
    if x is None:
        return EdgeTensor(None, None, 1, 0, 0)
    rows, heads, width = (*x.shape[-trailing:], 1)[:3]
    stride = rows * heads * width if x.shape[:-trailing].numel() > 1 else 0
    return EdgeTensor(address(x), address(ids), heads, width, stride)
