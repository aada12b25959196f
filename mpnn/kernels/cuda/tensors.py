"""Tensors as arguments of kernels, and how kernels load and store tiles of them.

Indices are those of nodes or edges, [R, E], and of heads, [BH]: int32 where all products with strides fit, else int64
(`index_type`).
Masked entries are loaded as zero. Arithmetic is in the type `REAL`: float64 for float64, else float32.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Strides(NamedTuple):
    """Where x [B, N, heads, width], with a contiguous last dimension, or [B, N, heads] holds its numbers: strides,
    which may be 0, and the width.

    What follows from the shape of a model is a constant of the compiled kernel, which then knows how many numbers it
    can load at once. No field is None: Triton 3.6 cannot ask whether such a tuple is None.
    """

    batch: int
    row: int
    head: tl.constexpr
    width: tl.constexpr


def strides(x: Tensor | None, vectors: bool = True) -> Strides | None:
    """Strides of x [B, N, heads, width], or with `vectors=False` [B, N, heads], as an argument of a kernel."""
    if x is None:
        return None
    batch, row, head = x.stride()[:3]
    return Strides(batch, row, tl.constexpr(head), tl.constexpr(x.shape[3] if vectors else 1))


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x [..., width], copied unless its last dimension is contiguous."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def index_type(tensors: Iterable[Tensor | None]) -> Any:
    """Triton's type of indices that reach every number of the tensors."""
    reach = max(sum((n - 1) * k for n, k in zip(x.shape, x.stride(), strict=True)) for x in tensors if x is not None)
    return tl.int32 if reach < 2**31 else tl.int64


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of x current, because Triton launches there."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def real(dtype: torch.dtype) -> tuple[torch.dtype, Any]:
    """The dtype of the arithmetic for features of a dtype: torch's and Triton's."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)


@triton.jit
def load_numbers(x, at, b, index, h, mask, REAL: tl.constexpr):
    """x[b, index, h]: [R, E, BH]."""
    place = b * at.batch + index[:, :, None] * at.row + h * at.head
    return tl.load(x + place, mask=mask, other=0.0).to(REAL)


@triton.jit
def load_vectors(x, at, b, index, h, mask, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """x[b, index, h, :]: [R, E, BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    place = b * at.batch + index[:, :, None] * at.row + h * at.head
    return tl.load(x + place[:, :, :, None] + d, mask=mask[:, :, :, None] & (d < at.width), other=0.0).to(REAL)


@triton.jit
def table_rows(types, edge_id):
    """The rows of a table that edges read, by `types` [E]; without types, each edge has a row of its own."""
    if types is None:
        return edge_id
    else:
        return tl.load(types + edge_id).to(edge_id.dtype)


@triton.jit
def load_parameter(x, h, heads, width, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """x[h, :] of contiguous x [heads, width]: [BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    return tl.load(x + h[:, None] * width + d, mask=(h < heads)[:, None] & (d < width), other=0.0).to(REAL)


@triton.jit
def store_numbers(x, at, b, index, h, mask, tile):
    """x[b, index, h] = tile [R, E, BH]."""
    place = b * at.batch + index[:, :, None] * at.row + h * at.head
    tl.store(x + place, tile, mask=mask)


@triton.jit
def store_vectors(x, at, b, index, h, mask, tile, WIDTH: tl.constexpr):
    """x[b, index, h, :] = tile [R, E, BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    place = b * at.batch + index[:, :, None] * at.row + h * at.head
    tl.store(x + place[:, :, :, None] + d, tile, mask=mask[:, :, :, None] & (d < at.width))


@triton.jit
def store_rows(out, out_at, part, part_at, b, row, slot, h, mask, tile, WIDTH: tl.constexpr):
    """Stores tile [R, 1, BH, WIDTH]: whole rows to out[b, row, h, :], parts of divided rows to part[b, slot, h, :]."""
    store_vectors(out, out_at, b, row, h, (slot < 0)[:, :, None] & mask, tile, WIDTH)
    if part is not None:
        store_vectors(part, part_at, b, slot, h, (slot >= 0)[:, :, None] & mask, tile, WIDTH)


@triton.jit
def rows_of_program(units, count, blocks, heads, R: tl.constexpr, BH: tl.constexpr, INDEX: tl.constexpr):
    """The share of a program in a grid of `count` units [count, 4], blocks of heads and batch entries: its rows [R, 1],
    their first and last edges and slots [R, 1], its heads [BH], the mask of existing (row, head) pairs [R, 1, BH], and
    the entry."""
    packs = tl.cdiv(count, R)
    pack = tl.program_id(0) % packs
    rest = tl.program_id(0) // packs
    block = rest % blocks
    b = (rest // blocks).to(INDEX)
    unit = pack * R + tl.arange(0, R)
    exists = unit < count
    unit = units + unit.to(INDEX) * 4
    row = tl.load(unit, mask=exists, other=0).to(INDEX)[:, None]
    first = tl.load(unit + 1, mask=exists, other=0).to(INDEX)[:, None]
    last = tl.load(unit + 2, mask=exists, other=0).to(INDEX)[:, None]
    slot = tl.load(unit + 3, mask=exists, other=-1).to(INDEX)[:, None]
    h = (block * BH + tl.arange(0, BH)).to(INDEX)
    return row, first, last, slot, h, exists[:, None, None] & (h < heads), b


@triton.jit
def other_ends(col, edge, first, last, exists, E: tl.constexpr):
    """The other ends `col` of the edges from `first` to `last` [R, 1], at most E of each row: [R, E]; their numbers in
    the caller's order [R, E]; and the mask of existing edges of existing rows and heads [R, E, BH]. Where there is no
    edge, both are 0. Loops ask for those of their next iteration first, so that no features wait for addresses."""
    e = first + tl.arange(0, E)[None, :]
    is_edge = e < last
    other = tl.load(col + e, mask=is_edge, other=0).to(first.dtype)
    edge_id = tl.where(is_edge, e, 0)
    if edge is not None:
        edge_id = tl.load(edge + e, mask=is_edge, other=0).to(first.dtype)
    return other, edge_id, is_edge[:, :, None] & exists
