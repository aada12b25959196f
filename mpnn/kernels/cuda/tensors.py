"""Tensors as arguments of kernels, and how kernels load and store tiles of them.

Indices are those of nodes or edges, [R, E], and of heads, [BH]; both int64, so that their products do not overflow.
Masked entries are loaded as zero. Arithmetic is in the type `REAL`: float64 for float64, else float32.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class View(NamedTuple):
    """x [B, N, heads, width] with a contiguous last dimension, or [B, N, heads]: its strides and its width.

    Strides may be 0. What follows from the shape of a model is a constant of the compiled kernel, which then knows how
    many numbers it can load at once. No field is None: Triton 3.6 cannot ask whether such a tuple is None.
    """

    data: Any
    batch: int
    row: int
    head: tl.constexpr
    width: tl.constexpr


def view(x: Tensor | None, vectors: bool = True) -> View | None:
    """x [B, N, heads, width], or with `vectors=False` [B, N, heads], as an argument of a kernel."""
    if x is None:
        return None
    batch, row, head = x.stride()[:3]
    return View(x, batch, row, tl.constexpr(head), tl.constexpr(x.shape[3] if vectors else 1))


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x [..., width], copied unless its last dimension is contiguous."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of x current, because Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def real(dtype: torch.dtype) -> tuple[torch.dtype, Any]:
    """The dtype of the arithmetic for features of a dtype: torch's and Triton's."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)


@triton.jit
def load_numbers(x, b, index, h, mask, REAL: tl.constexpr):
    """x[b, index, h]: [R, E, BH]."""
    at = b * x.batch + index[:, :, None] * x.row + h * x.head
    return tl.load(x.data + at, mask=mask, other=0.0).to(REAL)


@triton.jit
def load_vectors(x, b, index, h, mask, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """x[b, index, h, :]: [R, E, BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    at = b * x.batch + index[:, :, None] * x.row + h * x.head
    return tl.load(x.data + at[:, :, :, None] + d, mask=mask[:, :, :, None] & (d < x.width), other=0.0).to(REAL)


@triton.jit
def table_rows(types, edge_id):
    """The rows of a table that edges read, by `types` [E]; without types, each edge has a row of its own."""
    if types is None:
        return edge_id
    else:
        return tl.load(types + edge_id).to(tl.int64)


@triton.jit
def load_parameter(x, h, heads, width, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """x[h, :] of contiguous x [heads, width]: [BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    return tl.load(x + h[:, None] * width + d, mask=(h < heads)[:, None] & (d < width), other=0.0).to(REAL)


@triton.jit
def store_numbers(x, b, index, h, mask, tile):
    """x[b, index, h] = tile [R, E, BH]."""
    at = b * x.batch + index[:, :, None] * x.row + h * x.head
    tl.store(x.data + at, tile, mask=mask)


@triton.jit
def store_vectors(x, b, index, h, mask, tile, WIDTH: tl.constexpr):
    """x[b, index, h, :] = tile [R, E, BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    at = b * x.batch + index[:, :, None] * x.row + h * x.head
    tl.store(x.data + at[:, :, :, None] + d, tile, mask=mask[:, :, :, None] & (d < x.width))


@triton.jit
def store_rows(out, part, b, row, slot, h, mask, tile, WIDTH: tl.constexpr):
    """Stores tile [R, 1, BH, WIDTH]: whole rows to out[b, row, h, :], parts of divided rows to part[b, slot, h, :]."""
    store_vectors(out, b, row, h, (slot < 0)[:, :, None] & mask, tile, WIDTH)
    if part is not None:
        store_vectors(part, b, slot, h, (slot >= 0)[:, :, None] & mask, tile, WIDTH)


@triton.jit
def rows_of_program(units, blocks, heads, R: tl.constexpr, BH: tl.constexpr):
    """The share of a program in a grid of units, blocks of heads and batch entries: its rows [R, 1], their first and
    last edges and slots [R, 1], its heads [BH], the mask of existing (row, head) pairs [R, 1, BH], and the entry."""
    packs = tl.cdiv(units.count, R)
    pack, rest = tl.program_id(0) % packs, tl.program_id(0) // packs
    block, b = rest % blocks, (rest // blocks).to(tl.int64)
    unit = pack * R + tl.arange(0, R)
    exists = unit < units.count
    row = tl.load(units.row + unit, mask=exists, other=0).to(tl.int64)[:, None]
    first = tl.load(units.first + unit, mask=exists, other=0).to(tl.int64)[:, None]
    last = tl.load(units.last + unit, mask=exists, other=0).to(tl.int64)[:, None]
    slot = tl.load(units.slot + unit, mask=exists, other=-1).to(tl.int64)[:, None]
    h = (block * BH + tl.arange(0, BH)).to(tl.int64)
    return row, first, last, slot, h, exists[:, None, None] & (h < heads), b


@triton.jit
def other_ends(edges, first, last, exists, E: tl.constexpr):
    """The other ends of the edges from `first` to `last` [R, 1], at most E of each row: [R, E]; their numbers in the
    caller's order [R, E]; and the mask of existing edges of existing rows and heads [R, E, BH]. The others are those of
    the first edge."""
    e = first + tl.arange(0, E)[None, :]
    is_edge = e < last
    e = tl.where(is_edge, e, 0)
    col = tl.load(edges.col + e).to(tl.int64)
    edge_id = e if edges.edge is None else tl.load(edges.edge + e).to(tl.int64)
    return col, edge_id, is_edge[:, :, None] & exists
