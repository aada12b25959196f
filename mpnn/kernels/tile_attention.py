"""Attention over the tiles of a structured graph, as a differentiable function of tensors; on CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.kernels.memory import empty, zeros
from mpnn.kernels.once_differentiable import once_differentiable

Arrays = tuple[NDArray[Any], ...]

ROWS, COLUMNS = 32, 96  # of a tile; those of mpnn.kernels.cpu.tiles
_LEAST = 1 << 23  # products per part: about 0.2 ms
MOST_KEPT = 1 << 25  # bytes of cached tiles per part
_SEGMENTS = 6  # least number of work items of a backward pass, for any number of threads


@dataclass(frozen=True, eq=False)
class Layout:
    """The arrays of a graph that kernels read: its tiles by query tile and by key tile, each as (pointers, the other
    tile, full, low, high), and its runs as (pointers, start, stop, number of the first edge)."""

    by_query: Arrays
    by_key: Arrays
    runs: Arrays
    _segments: dict[int, NDArray[Any]] = field(default_factory=dict)

    def segments(self, count: int) -> NDArray[Any]:
        """The boundaries of `count` segments of key tiles with about the same number of tiles each."""
        if count not in self._segments:
            ptr = self.by_key[0]
            cuts = np.searchsorted(ptr, np.linspace(0, ptr[-1], count + 1), side="left")
            cuts[0], cuts[-1] = 0, len(ptr) - 1
            self._segments[count] = np.unique(cuts)
        return self._segments[count]


@dataclass(frozen=True, eq=False)
class Dropout:
    """`keys` [B * H] uint32 from `mpnn.request.rng.keys`, empty without dropout; `p` is the probability."""

    keys: NDArray[np.uint32]
    p: float

    def of(self, real: Callable[[float], Any]) -> tuple[Any, Any, Any]:
        return self.keys, np.uint32(round(self.p * (1 << 24))), real(1 / (1 - self.p) if self.p < 1 else 0.0)


class TileAttention(torch.autograd.Function):
    """`TileAttention.apply(query, key, value, table, bias, scale, softcap, dropout, layout)` -> out [B, N_dst, H, DV].

    query [B, N_dst, H, D], key [B, N_src, KV, D], value [B, N_src, KV, DV]; float32 or float64, widths multiples of 8.
    table [H, N_dst + N_src - 1 + ROWS] by i - j + N_src - 1 and bias [B or 1, H, E] are added to the logits after
    `softcap`; each may be None.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        dropout: Dropout,
        layout: Layout,
    ) -> Tensor:
        from mpnn.kernels.cpu import threads, tiles

        batch, num_dst, heads, _ = query.shape
        shape = _shape(query, value, bias)
        out, lse = empty(query, batch, num_dst, heads, value.shape[-1]), empty(query, batch, heads, num_dst)
        ctx.save_for_backward(query, key, value, table, bias, out, lse)
        ctx.scale, ctx.softcap, ctx.dropout, ctx.layout, ctx.shape = scale, softcap, dropout, layout, shape
        if not out.numel() or not value.numel():
            return out.zero_()
        features, strides = zip(*map(_strided, (query, key, value)), strict=True)
        q, real = features[0], features[0].dtype.type
        room = _room(layout.by_query, COLUMNS * (shape[-3] + shape[-2]) * q.itemsize)
        shared = (
            *(features, strides, real(scale), real(softcap or 0), _optional(table, q), _optional(bias, q)),
            *(dropout.of(real), layout.by_query, layout.runs, room, _flat(out), _flat(lse), shape),
        )
        parts = _parts(batch * heads * -(-num_dst // ROWS), _products(shape, layout))
        threads.each(parts, lambda part: tiles.forward(*part, *shared))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        from mpnn.kernels.cpu import threads, tiles

        query, key, value, table, bias, out, lse = ctx.saved_tensors
        batch, _, key_heads, *_ = ctx.shape
        if not d_out.numel() or not value.numel():
            inputs = (query, key, value, table, bias)
            return *(None if x is None else torch.zeros_like(x) for x in inputs), *[None] * 4
        inner = batch if bias is not None and len(bias) < batch else 1
        segments = ctx.layout.segments(-(-_SEGMENTS // (batch // inner * key_heads)))
        items = batch // inner * key_heads * (len(segments) - 1)
        d_query = zeros(query, len(segments) - 1, *query.shape)
        d_key, d_value = (zeros(x, *x.shape) for x in (key, value))
        d_table = query.new_zeros(0) if table is None else table.new_zeros(items // key_heads, *table.shape)
        d_bias = query.new_zeros(0) if bias is None else torch.zeros_like(bias)

        features, strides = zip(*map(_strided, (query, key, value, d_out)), strict=True)
        q, real = features[0], features[0].dtype.type
        shared = (
            *(features, strides, real(ctx.scale), real(ctx.softcap or 0), (_flat(out), _flat(lse))),
            *(_optional(table, q), _optional(bias, q)),
            *(ctx.dropout.of(real), ctx.layout.by_key, ctx.layout.runs),
            _room(ctx.layout.by_key, 2 * ROWS * (ctx.shape[-3] + ctx.shape[-2] + 1) * q.itemsize),
            *(tuple(_flat(x) for x in (d_query, d_key, d_value, d_table, d_bias)), ctx.shape, segments, inner),
        )
        threads.each(_parts(items, _products(ctx.shape, ctx.layout)), lambda part: tiles.backward(*part, *shared))
        d_query = d_query[0] if len(d_query) == 1 else d_query.sum(0)
        return (
            *(d_query, d_key, d_value),
            *(None if table is None else d_table.sum(0), None if bias is None else d_bias),
            *[None] * 4,
        )


def _shape(query: Tensor, value: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    batch, num_dst, heads, width = query.shape
    _, num_src, key_heads, wide = value.shape
    return batch, heads, key_heads, num_dst, num_src, width, wide, 0 if bias is None else bias.shape[-1]


def _flat(x: Tensor) -> NDArray[Any]:
    return x.detach().resolve_neg().numpy().reshape(-1)  # a view, as x is contiguous


def _strided(x: Tensor) -> tuple[NDArray[Any], tuple[int, int, int]]:
    """The memory of x [B, N, H, D] as a flat array, and its strides for (batch, head, node)."""
    x = x.resolve_neg()
    if x.is_contiguous() or x.stride(-1) != 1:
        _, nodes, heads, width = x.shape
        return x.detach().contiguous().numpy().reshape(-1), (nodes * heads * width, width, heads * width)
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    by_batch, by_node, by_head, _ = x.stride()
    return x.detach().as_strided((span,), (1,)).numpy(), (by_batch, by_head, by_node)


def _room(tiles: Arrays, size: int) -> int:
    """The number of tiles of the other side to cache, of `size` bytes each: the range of one tile, within MOST_KEPT."""
    ptr, other, *_ = tiles
    some = ptr[:-1] < ptr[1:]
    reach = other[ptr[1:][some] - 1] - other[ptr[:-1][some]]
    return int(min(reach.max(initial=0) + 1, max(MOST_KEPT // size, 1)))


def _optional(x: Tensor | None, like: NDArray[Any]) -> NDArray[Any]:
    return np.zeros(0, like.dtype) if x is None else _flat(x)


def _products(shape: tuple[int, ...], layout: Layout) -> int:
    return shape[0] * shape[1] * shape[5] * len(layout.by_query[1]) * ROWS * COLUMNS


def _parts(items: int, work: int) -> list[tuple[int, int]]:
    """Splits the items into ranges, several per thread, each large enough for a thread."""
    threads = torch.get_num_threads()
    count = max(1, min(items, work // _LEAST, 8 * threads if threads > 1 else 1))
    if count == 1:
        return [(0, items)]
    return list(pairwise(items * p // count for p in range(count + 1)))
