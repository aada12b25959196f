"""Edges sorted by row, on CPU: a counting sort in `mpnn/kernels/cpu/sort_edges.cpp`. A batch of molecules is sorted in
each step of training, and torch's sort takes several times as long."""

from ctypes import Structure, addressof, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import addresses

Sorted = tuple[Tensor, Tensor, Tensor | None]
"""`ptr` [rows + 1]: row r has the edges `ptr[r]:ptr[r+1]`; `col` [E] in this order; the number of each edge [E], None
if the edges were sorted already. All int64, but `col` is int32 if the edges were, or if the kernel wrote it."""


class _Parameters(Structure):
    """`struct SortEdges` of sort_edges.cpp."""

    _fields_ = (
        *library.fields(c_void_p, "row col"),
        *library.fields(c_int64, "num_edges num_rows"),
        *library.fields(c_void_p, "ptr edge sorted_col"),
        ("is_sorted", c_int64),
    )


def sort_edges(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> Sorted:
    """Sorts edges by row; edges of one row keep their order.

    Args:
        row, col: int32 or int64 [E], both alike, the two ends of each edge, on one device; 0 <= row < num_rows and
            0 <= col < num_cols are not checked.
    """
    if not row.is_cpu or num_cols >= 2**31 or library.why_missing() is not None:
        return by_torch(row, col, num_rows)
    row, col = row.contiguous(), col.contiguous()
    num_edges = row.numel()
    ptr = torch.empty(num_rows + 1, dtype=torch.int64, device="cpu")
    edge = torch.empty(num_edges, dtype=torch.int64, device="cpu")
    sorted_col = torch.empty(num_edges, dtype=torch.int32, device="cpu")
    ends, results = addresses(row, col), addresses(ptr, edge, sorted_col)
    p = _Parameters(*ends, num_edges, num_rows, *results)
    library.function("sort_edges_i32" if row.dtype == torch.int32 else "sort_edges")(addressof(p))
    return (ptr, col, None) if p.is_sorted else (ptr, sorted_col, edge)


def by_torch(row: Tensor, col: Tensor, num_rows: int) -> Sorted:
    """The same in torch: on other devices, and what the kernel is tested against."""
    ptr = torch.bincount(row + 1, minlength=num_rows + 1).cumsum(0)
    edge = torch.sort(row, stable=True).indices
    return ptr, col.index_select(0, edge), edge


def rows_of(ptr: Tensor, num_edges: int) -> Tensor:
    """The row of each edge, int64 [E], from `ptr`."""
    if not ptr.is_cpu:
        return torch.repeat_interleave(ptr.diff(), output_size=num_edges)
    # torch wakes all threads and waits for them, even for two edges
    numbers = ptr.numpy()
    return torch.from_numpy(np.repeat(np.arange(len(numbers) - 1), numbers[1:] - numbers[:-1]))
