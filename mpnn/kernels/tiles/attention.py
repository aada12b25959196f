"""Attention over the tiles of a structured graph, as a differentiable function of tensors; on CPU.

`mpnn/kernels/cpu/tile_attention.cpp` states the formulas and computes them.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address, addresses, fields
from mpnn.kernels.derivatives import Fused, gradients_again
from mpnn.kernels.dropout_threshold import threshold
from mpnn.kernels.function import Function, tangents_again
from mpnn.kernels.memory import empty, plain, zeros

Arrays = tuple[NDArray[Any], ...]

# queries and keys of a tile; those of tile_attention.cpp
ROWS = 32
COLUMNS = 96
_MIN_PRODUCTS = 1 << 20  # products per part: about 25 us
MAX_KEPT = 1 << 25  # bytes of cached tiles per part
_SEGMENTS = 6  # least number of work items of a backward pass, for any number of threads


class _Features(ctypes.Structure):
    _fields_ = [*fields(c_void_p, "data"), *fields(c_int64, "batch head node")]


class _Runs(ctypes.Structure):
    _fields_ = fields(c_void_p, "ptr start stop edge")


class _Tiles(ctypes.Structure):
    _fields_ = fields(c_void_p, "ptr other full low high")


class _Grid(ctypes.Structure):
    _fields_ = [*fields(c_void_p, "start"), *fields(c_int64, "tiles")]


class _Parameters(ctypes.Structure):
    """`struct TileAttention` of tile_attention.cpp, which describes the fields."""

    _fields_ = [
        *fields(c_int64, "batch heads key_heads num_dst num_src width value_width"),
        *fields(c_double, "scale softcap"),
        *fields(_Features, "query key value out"),
        *fields(c_void_p, "lse table bias"),
        *fields(c_int64, "edges bias_batch"),
        *fields(c_void_p, "dst_bias src_bias"),
        *fields(c_void_p, "dropout_keys dst_ids src_ids"),
        *fields(c_int64, "dropout_threshold"),
        *fields(c_double, "dropout_growth"),
        *fields(_Runs, "runs"),
        *fields(_Tiles, "tiles"),
        *fields(_Grid, "queries keys"),
        *fields(c_int64, "slots"),
        *fields(_Features, "d_out d_query d_key d_value"),
        *fields(c_void_p, "d_lse d_table d_bias d_src_bias segments"),
        *fields(c_int64, "num_segments copies shared_batch"),
        ("tangent", c_void_p),
    ]


@dataclass(frozen=True, eq=False)
class Layout:
    """The arrays of a graph that kernels read: its tiles by query tile and by key tile, each as (pointers, the other
    tile, full, low, high), its runs as (pointers, start, stop, number of the first edge), and the first node of each
    query tile and key tile, with the number of nodes at the end."""

    by_query: Arrays
    by_key: Arrays
    runs: Arrays
    starts: Arrays
    _segments: dict[int, tuple[NDArray[Any], int]] = field(default_factory=dict)

    def segments(self, count: int) -> tuple[NDArray[Any], int]:
        """The boundaries of `count` segments of key tiles with about the same number of tiles each, and the number of
        copies of the queries' gradients: segments so far apart, or farther, have no query tile in common."""
        if count not in self._segments:
            ptr, other = self.by_key[:2]
            cuts = np.searchsorted(ptr, np.linspace(0, ptr[-1], count + 1), side="left")
            cuts = np.unique(np.array([0, *cuts[1:-1], len(ptr) - 1], np.int64))
            parts = [other[ptr[a] : ptr[b]] for a, b in pairwise(cuts)]
            low = [x.min(initial=len(self.by_query[0])) for x in parts]
            high = [x.max(initial=-1) for x in parts]
            pairs = combinations(range(len(parts)), 2)
            common = [t - s for s, t in pairs if low[s] <= high[t] and low[t] <= high[s]]
            self._segments[count] = cuts, max(common, default=0) + 1
        return self._segments[count]

    @cached_property
    def structs(self) -> tuple[_Tiles, _Tiles, _Runs, _Grid, _Grid]:
        """The addresses of the arrays: tiles by query tile, tiles by key tile, runs, query tiles, key tiles."""
        by_query, by_key, runs = ([x.ctypes.data for x in arrays] for arrays in (self.by_query, self.by_key, self.runs))
        queries, keys = (_Grid(start.ctypes.data, len(start) - 1) for start in self.starts)
        return _Tiles(*by_query), _Tiles(*by_key), _Runs(*runs), queries, keys

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The most tiles from the first to the last tile of a query tile, and of a key tile."""
        return _reach(self.by_query), _reach(self.by_key)


def _reach(tiles: Arrays) -> int:
    ptr, other, *_ = tiles
    some = ptr[:-1] < ptr[1:]
    return int((other[ptr[1:][some] - 1] - other[ptr[:-1][some]]).max(initial=0)) + 1


class Dropout(NamedTuple):
    """`keys` int32 [2 + B * H] from `mpnn.graph.rng.keys`; `p` is the probability. `ids`: what is hashed in place of
    the numbers of destinations and sources, int32 [num_dst] and [num_src], or None."""

    keys: Tensor
    p: float
    ids: tuple[Tensor, Tensor] | None = None


class TileAttention(Function, Fused):
    """`TileAttention.apply(query, key, value, table, bias, dst_bias, src_bias, scale, softcap, dropout, layout,
    reference)`

    Returns out [B, N_dst, H, DV] and the log-sum-exp of the logits, lse [B, H, N_dst], +inf for a row without edges.

    query [B, N_dst, H, D], key [B, N_src, KV, D], value [B, N_src, KV, DV]; all float32, float64, bfloat16 or float16,
    widths multiples of 8. table [H, N_dst + N_src - 1 + ROWS] by i - j + N_src - 1 and bias [B or 1, H, E] are added to
    the logits after `softcap`, as are dst_bias [B, H, N_dst] and src_bias [B, H, N_src], both or neither. Each of these
    and `dropout` may be None. 16-bit features are summed in float32, which is the dtype of lse, table and biases.
    `reference`: an equal function of the tensors, see `Fused`.
    """

    TENSORS = slice(0, 7)

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        bias: Tensor | None,
        dst_bias: Tensor | None,
        src_bias: Tensor | None,
        scale: float,
        softcap: float | None,
        dropout: Dropout | None,
        layout: Layout,
        reference: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> tuple[Tensor, Tensor]:
        batch, num_dst, heads, _ = query.shape
        out, lse = empty(query, batch, num_dst, heads, value.shape[-1]), empty(_wide(query), batch, heads, num_dst)
        if not out.numel() or not value.numel():
            # Without features there is nothing to read, and an address of an empty tensor may be null.
            return out.zero_(), lse.fill_(torch.inf)
        query, key, value = map(_readable, (query, key, value))
        tensors = query, key, value, table, bias, dst_bias, src_bias, out, lse
        p = _parameters(tensors, scale, softcap, dropout, layout)
        p.tiles = layout.structs[0]
        p.slots = _slots(layout.reach[0], COLUMNS * (p.width + p.value_width) * lse.element_size())
        _run("forward", query.dtype, p, batch * heads * p.queries.tiles, layout)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[7:11]
        ctx.kernel = TileAttention
        ctx.reference = inputs[11]
        ctx.save_for_backward(*inputs[:7], *output)
        ctx.save_for_forward(*inputs[:7], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def tangents(ctx: Any, saved: Sequence[Any], *tangents: Any) -> Any:
        return TileTangents.apply(*saved, *tangents[:7], *ctx.options, ctx.reference)

    @staticmethod
    def gradients(ctx, d_out: Tensor | None, d_lse: Tensor | None) -> Any:  # type: ignore[no-untyped-def]
        query, key, value, table, bias, dst_bias, src_bias, out, lse = ctx.saved_tensors
        layout = ctx.options[-1]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lse = None if d_lse is None else d_lse.contiguous().resolve_neg()
        if not d_out.numel() or not value.numel():
            inputs = (query, key, value, table, bias, dst_bias, src_bias)
            return [None if x is None else torch.zeros_like(x) for x in inputs]
        query, key, value, d_out = map(_readable, (query, key, value, d_out))
        p = _parameters((query, key, value, table, bias, dst_bias, src_bias, out, lse), *ctx.options)
        # Entries of a batch that share a bias add to the same gradient, so that one work item takes all of them.
        p.shared_batch = p.batch if bias is not None and len(bias) < p.batch else 1
        groups = p.batch // p.shared_batch * p.key_heads
        segments, p.copies = layout.segments(-(-_SEGMENTS // groups))
        p.num_segments = len(segments) - 1
        p.segments = segments.ctypes.data
        # Segments of keys side by side add to the same queries: each has a copy, and the sum of copies has a fixed
        # order.
        d_query = zeros(lse, p.copies, *query.shape)
        d_key, d_value = (zeros(lse, *x.shape) for x in (key, value))
        d_bias, d_src_bias = (None if x is None else torch.zeros_like(x) for x in (bias, src_bias))
        # dst_bias moves all logits of a row, so that only lse depends on it
        d_dst_bias = None if dst_bias is None else torch.zeros_like(dst_bias) if d_lse is None else d_lse
        d_table = None
        if table is not None:
            d_table = table.new_zeros(p.batch // p.shared_batch * p.num_segments, *table.shape)
        p.d_out, p.d_query, p.d_key, p.d_value = map(_features, (d_out, d_query.flatten(0, 1), d_key, d_value))
        p.d_lse, p.d_table, p.d_bias, p.d_src_bias = map(address, (d_lse, d_table, d_bias, d_src_bias))
        p.tiles = layout.structs[1]
        p.slots = _slots(layout.reach[1], 2 * ROWS * (p.width + p.value_width + 1) * lse.element_size())
        _run("backward", query.dtype, p, groups * p.num_segments, layout)
        d_query = (d_query[0] if len(d_query) == 1 else d_query.sum(0)).to(query.dtype)
        d_key, d_value = d_key.to(key.dtype), d_value.to(value.dtype)
        d_table = None if d_table is None else d_table.sum(0)
        return d_query, d_key, d_value, d_table, d_bias, d_dst_bias, d_src_bias


class TileTangents(Function):
    """`TileTangents.apply(*tensors, out, lse, *tangents, scale, softcap, dropout, layout, reference)`: the tangents of
    out and lse of `TileAttention` from those of its seven tensors, None for one that is 0."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, (out, lse), tangents, options = inputs[:7], inputs[7:9], inputs[9:16], inputs[16:20]
        layout = options[-1]
        d_out, d_lse = empty(out, *out.shape), empty(lse, *lse.shape)
        if not out.numel() or not tensors[2].numel():
            return d_out.zero_(), d_lse.zero_()
        moved = [None if x is None or x._is_zerotensor() else plain(x) for x in tangents]
        dst_bias, src_bias = moved[5:]
        if dst_bias is not None or src_bias is not None:  # the kernel reads both or neither
            moved[5] = torch.zeros_like(tensors[5]) if dst_bias is None else dst_bias
            moved[6] = torch.zeros_like(tensors[6]) if src_bias is None else src_bias
        of_pairs = [None if x is None else plain(x) for x in tensors[3:]]
        read = *map(_readable, tensors[:3]), *of_pairs, _readable(out), plain(lse)  # kept until the kernel has run
        p = _parameters(read, *options)
        p.tiles = layout.structs[0]
        p.slots = _slots(layout.reach[0], 2 * COLUMNS * (p.width + p.value_width) * lse.element_size())
        tangent = _Parameters.from_buffer_copy(p)
        query, key, value = (_Features() if x is None else _features(x) for x in moved[:3])
        tangent.query, tangent.key, tangent.value, tangent.out = query, key, value, _features(d_out)
        tangent.table, tangent.bias, tangent.dst_bias, tangent.src_bias = map(address, moved[3:])
        tangent.lse = address(d_lse)
        p.tangent = ctypes.addressof(tangent)
        _run("tangent", out.dtype, p, p.batch * p.heads * p.queries.tiles, layout)
        return d_out, d_lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # Not `out` and `lse`: what they depend on is among the tensors.
        ctx.save_for_backward(*inputs[:7], *inputs[9:16])
        ctx.save_for_forward(*inputs[:7], *inputs[9:16])
        ctx.reference = inputs[20]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        function = partial(_tangents_again, ctx.reference)
        needs = (*ctx.needs_input_grad[:7], *ctx.needs_input_grad[9:16])
        found = gradients_again(function, ctx.saved_tensors, needs, upstream)
        return *found[:7], None, None, *found[7:], *[None] * 5

    @staticmethod
    def tangents(ctx: Any, saved: Sequence[Any], *tangents: Any) -> Any:
        function = partial(_tangents_again, ctx.reference)
        return tuple(tangents_again(function, saved, (*tangents[:7], *tangents[9:16])))


def _tangents_again(function: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """`TileTangents` by differentiable operations."""
    return tuple(tangents_again(function, inputs[:7], inputs[7:]))


class Repeated:
    """The forward pass without derivatives, biases and dropout, for tensors of the shapes and strides of these:
    everything but addresses and numbers is filled in."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> None:
        batch, num_dst, heads, _ = query.shape
        out = empty(query, batch, num_dst, heads, value.shape[-1])
        lse = empty(_wide(query), batch, heads, num_dst)
        p = _parameters((query, key, value, None, None, None, None, out, lse), 1.0, None, None, layout)
        p.tiles = layout.structs[0]
        p.slots = _slots(layout.reach[0], COLUMNS * (p.width + p.value_width) * lse.element_size())
        self._filled = bytes(p)
        self._layout = layout
        self._lse = lse.shape, lse.dtype
        self._items = batch * heads * p.queries.tiles

    @staticmethod
    def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether these tensors, and all others of their strides, are read where they lie."""
        tensors = query, key, value
        widths = all(x.shape[-1] % 8 == 0 and x.stride(-1) == 1 and x.numel() and not x.is_neg() for x in tensors)
        return widths and key.shape[-2] == value.shape[-2]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, shape: tuple[int, ...]
    ) -> Tensor:
        """Out, of this shape."""
        out = empty(query, *shape)
        of_lse, wide = self._lse
        lse = query.new_empty(of_lse, dtype=wide)
        p = _Parameters.from_buffer_copy(self._filled)
        p.scale = scale
        p.softcap = softcap or 0.0
        p.query.data, p.key.data, p.value.data, p.out.data, p.lse = addresses(query, key, value, out, lse)
        _run("forward", query.dtype, p, self._items, self._layout)
        return out


def _parameters(
    tensors: tuple[Any, ...], scale: float, softcap: float | None, dropout: Dropout | None, layout: Layout
) -> _Parameters:
    """Returns the parameters of both passes. They hold addresses only: the caller keeps the tensors."""
    p, (query, key, value, table, bias, dst_bias, src_bias, out, lse) = _Parameters(), tensors
    p.batch, p.num_dst, p.heads, p.width = query.shape
    _, p.num_src, p.key_heads, p.value_width = value.shape
    p.scale = scale
    p.softcap = softcap or 0.0
    p.query, p.key, p.value, p.out = map(_features, (query, key, value, out))
    p.lse, p.table, p.bias, p.dst_bias, p.src_bias = map(address, (lse, table, bias, dst_bias, src_bias))
    if bias is not None:
        p.edges = bias.shape[-1]
        p.bias_batch = bias.stride(0) if len(bias) > 1 else 0
    if dropout is not None:
        p.dropout_keys = address(dropout.keys)
        p.dropout_threshold = threshold(dropout.p)
        p.dropout_growth = 1 / (1 - dropout.p) if dropout.p < 1 else 0.0
        if dropout.ids is not None:
            p.dst_ids, p.src_ids = map(address, dropout.ids)
    _, _, p.runs, p.queries, p.keys = layout.structs
    return p


def _wide(x: Tensor) -> Tensor:
    """No numbers, of the dtype of the arithmetic."""
    return x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _readable(x: Tensor) -> Tensor:
    """x [B, N, H, D] with contiguous rows and without a pending negation; itself where possible."""
    return x.resolve_neg() if x.stride(-1) == 1 else x.contiguous().resolve_neg()


def _features(x: Tensor) -> _Features:
    by_batch, by_node, by_head, _ = x.stride()
    return _Features(address(x), by_batch, by_head, by_node)


def _slots(reach: int, size: int) -> int:
    """The number of tiles of the other side to keep, of `size` bytes each: the range of one tile, within MAX_KEPT."""
    return min(reach, max(MAX_KEPT // size, 1))


def _run(name: str, dtype: torch.dtype, p: _Parameters, items: int, layout: Layout) -> None:
    """Splits the items into several ranges per thread, each large enough for a thread."""
    products = p.batch * p.heads * p.width * len(layout.by_query[1]) * ROWS * COLUMNS
    threads = torch.get_num_threads()
    parts = max(1, min(items, products // _MIN_PRODUCTS, 8 * threads if threads > 1 else 1))
    library.run(f"tile_attention_{name}", dtype, p, parts=parts)
