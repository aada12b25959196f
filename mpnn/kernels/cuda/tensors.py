"""Tensors as kernels take them, and how tiles of them are read and written.

Places are nodes or edges, [R, E], and heads are [BH]; both int64, so that no product of theirs overflows. What is
masked out is read as zero. Anything is computed in the type `REAL`: float32, or float64 for float64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class View(NamedTuple):
    """x [B, places, heads, width] with a contiguous last dimension, or [B, places, heads]: its strides and its width.

    With `ids` [E], edges find their places there. Strides may be 0 where entries repeat. What follows from the shape of
    a model is a constant of the compiled kernel, which then knows how many numbers it can load at once.
    """

    data: Any
    batch: int
    place: int
    head: tl.constexpr
    width: tl.constexpr
    ids: Any


def view(x: Tensor | None, vectors: bool = True, ids: Tensor | None = None) -> View | None:
    """x [B, places, heads, width], or with `vectors=False` [B, places, heads], as kernels take it."""
    if x is None:
        return None
    batch, place, head = x.stride()[:3]
    return View(x, batch, place, tl.constexpr(head), tl.constexpr(x.shape[3] if vectors else 1), ids)


def stepped(x: Tensor) -> Tensor:
    """x [..., width], copied unless its last dimension is contiguous."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def real(dtype: torch.dtype) -> tuple[torch.dtype, Any]:
    """The type in which features of a type are computed, torch's and Triton's."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)


@triton.jit
def numbers(x, b, place, h, on, REAL: tl.constexpr):
    """x[b, place, h]: [R, E, BH]."""
    at = b * x.batch + place[:, :, None] * x.place + h * x.head
    return tl.load(x.data + at, mask=on, other=0.0).to(REAL)


@triton.jit
def vectors(x, b, place, h, on, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """x[b, place, h, :]: [R, E, BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    if x.ids is not None:
        place = tl.load(x.ids + place).to(tl.int64)
    at = b * x.batch + place[:, :, None] * x.place + h * x.head
    mask = on[:, :, :, None] & (d < x.width)
    return tl.load(x.data + at[:, :, :, None] + d, mask=mask, other=0.0).to(REAL)


@triton.jit
def put_numbers(x, b, place, h, on, tile):
    """x[b, place, h] = tile [R, E, BH]."""
    at = b * x.batch + place[:, :, None] * x.place + h * x.head
    tl.store(x.data + at, tile, mask=on)


@triton.jit
def put_vectors(x, b, place, h, on, tile, WIDTH: tl.constexpr):
    """x[b, place, h, :] = tile [R, E, BH, WIDTH]."""
    d = tl.arange(0, WIDTH)
    at = b * x.batch + place[:, :, None] * x.place + h * x.head
    tl.store(x.data + at[:, :, :, None] + d, tile, mask=on[:, :, :, None] & (d < x.width))


@triton.jit
def assigned(units, blocks, heads, R: tl.constexpr, BH: tl.constexpr):
    """What a program is to do, of a grid of units, blocks of heads, and entries of the batch: its rows [R, 1], their
    first and last edges, their slots, its heads [BH], which of these there are [R, 1, BH], and the entry."""
    packs = tl.cdiv(units.count, R)
    pack, rest = tl.program_id(0) % packs, tl.program_id(0) // packs
    block, b = rest % blocks, (rest // blocks).to(tl.int64)
    unit = pack * R + tl.arange(0, R)
    there = unit < units.count
    row = tl.load(units.row + unit, mask=there, other=0).to(tl.int64)[:, None]
    first = tl.load(units.first + unit, mask=there, other=0).to(tl.int64)[:, None]
    last = tl.load(units.last + unit, mask=there, other=0).to(tl.int64)[:, None]
    slot = tl.load(units.slot + unit, mask=there, other=-1).to(tl.int64)[:, None]
    h = (block * BH + tl.arange(0, BH)).to(tl.int64)
    return row, first, last, slot, h, there[:, None, None] & (h < heads), b


@triton.jit
def ends(edges, e, on):
    """The other ends of edges e [R, E], and their numbers in the caller's order; what is off becomes the first edge."""
    e = tl.where(on, e, 0)
    other = tl.load(edges.col + e).to(tl.int64)
    number = e if edges.edge is None else tl.load(edges.edge + e).to(tl.int64)
    return other, number
