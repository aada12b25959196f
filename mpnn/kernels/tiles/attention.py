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


class Options(NamedTuple):
    """All arguments of `TileAttention` but its tensors. `reference`: an equal function of the tensors, see `Fused`."""

    prefilled: "Prefilled"
    scale: float
    softcap: float | None = None
    dropout: Dropout | None = None
    reference: Callable[..., tuple[Tensor, Tensor]] | None = None


class _Pass(NamedTuple):
    """A pass of the kernels over tensors of one form.

    Attributes:
        form: the sizes and strides of the tensors.
        parameters: all but addresses and numbers.
        shapes: those of the tensors that it writes, as the pass allocates them.
        dtype: that of the arithmetic.
        parts: the most that threads share; 0 if there is nothing to compute.
    """

    form: list[Any]
    parameters: bytes
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    parts: int


class Prefilled:
    """The passes of the kernels over a layout, with and without gradients.

    Their parameters are filled in once for features of one form, sizes and strides, and again for those of another.
    Each call compares the form, so it does not matter where tensors come from, and enters addresses and numbers.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._passes: dict[str, _Pass] = {}

    def forward(
        self, features: Sequence[Tensor], of_pairs: dict[str, Tensor], options: Options
    ) -> tuple[Tensor, Tensor]:
        """`TileAttention` without derivatives. `features`: query, key and value. `of_pairs`: `present` biases."""
        known, p, (query, key, value), _of_pairs = self._pass("forward", features, of_pairs, options)
        of_out, of_lse = known.shapes
        out = empty(query, *of_out)
        lse = query.new_empty(of_lse, dtype=known.dtype)
        if not known.parts:
            # Without features there is nothing to read, and an address of an empty tensor may be null.
            return out.zero_(), lse.fill_(torch.inf)
        _run("forward", p, known.parts, query, key, value, out, lse)
        return out, lse

    def backward(
        self, tensors: Sequence[Any], options: Options, d_out: Tensor | None, d_lse: Tensor | None
    ) -> list[Tensor | None]:
        """The gradient of each tensor of `TileAttention`. `tensors`: these, and its results out and lse."""
        out, lse = tensors[7:]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        features: Sequence[Tensor] = [*tensors[:3], out, d_out]
        # Those that hooks saved elsewhere and brought back may have other strides.
        known, p, features, of_pairs = self._pass("backward", features, present(*tensors[3:7]), options)
        query, key, value, out, d_out = features
        table, bias, dst_bias, src_bias = map(of_pairs.get, _OF_PAIRS)
        if not known.parts:
            return [None if x is None else torch.zeros_like(x) for x in tensors[:7]]
        of_query, of_key, of_value, of_table = known.shapes
        # Segments of keys side by side add to the same queries: each has a copy, and the sum of copies has a fixed
        # order.
        d_query = zeros(lse, *of_query)
        d_key = zeros(lse, *of_key)
        d_value = zeros(lse, *of_value)
        lse = plain(lse)
        of_features = addresses(d_out, d_query, d_key, d_value)
        p.d_out.data, p.d_query.data, p.d_key.data, p.d_value.data = of_features
        d_lse = None if d_lse is None else plain(d_lse)
        d_table = None if table is None else table.new_zeros(*of_table, *table.shape)
        d_bias, d_src_bias = (None if x is None else torch.zeros_like(x) for x in (bias, src_bias))
        p.d_lse, p.d_table, p.d_bias, p.d_src_bias = map(address, (d_lse, d_table, d_bias, d_src_bias))
        _run("backward", p, known.parts, query, key, value, out, lse)
        d_query = d_query[0] if len(d_query) == 1 else d_query.sum(0)
        if query.dtype != lse.dtype:
            d_query, d_key, d_value = (x.to(query.dtype) for x in (d_query, d_key, d_value))
        d_table = None if d_table is None else d_table.sum(0)
        # dst_bias moves all logits of a row, so that only lse depends on it
        d_dst_bias = None if dst_bias is None else torch.zeros_like(dst_bias) if d_lse is None else d_lse
        return [d_query, d_key, d_value, d_table, d_bias, d_dst_bias, d_src_bias]

    def tangents(self, tensors: Sequence[Any], moved: Sequence[Any], options: Options) -> tuple[Tensor, Tensor]:
        """The tangents of out and lse from those of the tensors, which are plain. `tensors`: as in `backward`."""
        out, lse = tensors[7:]
        features: Sequence[Tensor] = [*tensors[:3], out]
        known, p, features, _of_pairs = self._pass("tangent", features, present(*tensors[3:7]), options)
        query, key, value, out = features
        d_out = empty(out, *out.shape)
        d_lse = empty(lse, *lse.shape)
        if not known.parts:
            return d_out.zero_(), d_lse.zero_()
        lse = plain(lse)
        tangent = _Parameters.from_buffer_copy(p)
        tangent.query, tangent.key, tangent.value = (_Features() if x is None else _features(x) for x in moved[:3])
        tangent.query.data, tangent.key.data, tangent.value.data = map(address, moved[:3])
        tangent.out = _dense(d_out.shape)
        tangent.out.data = address(d_out)
        tangent.table, tangent.bias, tangent.dst_bias, tangent.src_bias = map(address, moved[3:])
        tangent.lse = address(d_lse)
        p.tangent = ctypes.addressof(tangent)
        _run("tangent", p, known.parts, query, key, value, out, lse)
        return d_out, d_lse

    def _pass(
        self,
        name: str,
        features: Sequence[Tensor],
        of_pairs: dict[str, Tensor],
        options: Options,
        is_readable: bool = False,
    ) -> tuple[_Pass, _Parameters, Sequence[Tensor], dict[str, Tensor]]:
        """A pass, its parameters but for the addresses of features and lse, and the tensors as it reads them:
        themselves where possible. Parameters hold addresses only: the caller keeps the tensors.

        `is_readable`: whether rows of features and all biases are contiguous, without a pending negation.
        """
        known = self._passes.get(name)
        tensors = *features, *of_pairs.values()
        form = [*of_pairs, *map(Tensor.size, tensors), *map(Tensor.stride, tensors), *map(Tensor.is_neg, tensors)]
        if known is None or known.form != form:
            if not is_readable:
                features = [x.resolve_neg() if x.stride(-1) == 1 else x.contiguous().resolve_neg() for x in features]
                of_pairs = {name: plain(x) for name, x in of_pairs.items()}
                return self._pass(name, features, of_pairs, options, True)
            known = self._passes[name] = self._fill(name, form, features, of_pairs.get("bias"))
        p = _Parameters.from_buffer_copy(known.parameters)
        p.scale = options.scale
        p.softcap = options.softcap or 0.0
        for field_name, x in of_pairs.items():
            setattr(p, field_name, address(x))
        dropout = options.dropout
        if dropout is not None:
            p.dropout_keys = address(dropout.keys)
            p.dropout_threshold = threshold(dropout.p)
            p.dropout_growth = 1 / (1 - dropout.p) if dropout.p < 1 else 0.0
            if dropout.ids is not None:
                p.dst_ids, p.src_ids = map(address, dropout.ids)
        return known, p, features, of_pairs

    def _fill(self, name: str, form: list[Any], features: Sequence[Tensor], bias: Tensor | None) -> _Pass:
        layout = self.layout
        query, key, value, *others = features
        p = _Parameters()
        p.batch, p.num_dst, p.heads, p.width = (1, *query.shape)[-4:]
        p.batch, p.num_src, p.key_heads, p.value_width = (1, *value.shape)[-4:]
        by_query, by_key, p.runs, p.queries, p.keys = layout.structs
        p.query, p.key, p.value = map(_features, (query, key, value))
        if bias is not None:
            p.edges = bias.shape[-1]
            p.bias_batch = bias.stride(0) if len(bias) > 1 else 0
        dtype = torch.promote_types(query.dtype, torch.float32)
        shapes: tuple[tuple[int, ...], ...]
        widths = p.width + p.value_width
        if name == "backward":
            p.out, p.d_out = map(_features, others)
            # Entries of a batch that share a bias add to the same gradient, so that one work item takes all of them.
            p.shared_batch = p.batch if bias is not None and len(bias) < p.batch else 1
            groups = p.batch // p.shared_batch * p.key_heads
            segments, p.copies = layout.segments(-(-_SEGMENTS // max(groups, 1)))
            p.num_segments = len(segments) - 1
            p.segments = segments.ctypes.data
            p.d_query, p.d_key, p.d_value = (_dense(x.shape) for x in (query, key, value))
            p.tiles = by_key
            p.slots = _slots(layout.reach[1], 2 * ROWS * (widths + 1) * dtype.itemsize)
            items = groups * p.num_segments
            of_table = p.batch // p.shared_batch * p.num_segments
            shapes = (p.copies, *query.shape), key.shape, value.shape, (of_table,)
        else:
            of_out = (*query.shape[:-1], p.value_width)
            p.out = _features(others[0]) if others else _dense(of_out)
            p.tiles = by_query
            p.slots = _slots(layout.reach[0], COLUMNS * widths * dtype.itemsize * (2 if name == "tangent" else 1))
            items = p.batch * p.heads * p.queries.tiles
            shapes = of_out, (p.batch, p.heads, p.num_dst)
        # Several ranges of items for each thread, each large enough for one.
        products = p.batch * p.heads * p.width * len(layout.by_query[1]) * ROWS * COLUMNS
        is_empty = not value.numel() or not p.batch * p.num_dst * p.heads
        parts = 0 if is_empty else max(1, min(items, products // _MIN_PRODUCTS))
        return _Pass(form, bytes(p), shapes, dtype, parts)


class TileAttention(Function, Fused):
    """`TileAttention.apply(query, key, value, table, bias, dst_bias, src_bias, options)`

    Returns out [..., N_dst, H, DV] and the log-sum-exp of the logits, lse [B, H, N_dst], +inf for a row without edges.

    query [B, N_dst, H, D], key [B, N_src, KV, D], value [B, N_src, KV, DV], or all of them without B, which is 1; all
    float32, float64, bfloat16 or float16, widths multiples of 8. table [H, N_dst + N_src - 1 + ROWS] by i - j + N_src -
    1 and bias [B or 1, H, E] are added to the logits after `softcap`, as are dst_bias [B, H, N_dst] and src_bias [B, H,
    N_src], both or neither. Each of these may be None. 16-bit features are summed in float32, which is the dtype of
    lse, table and biases.
    """

    TENSORS = slice(0, 7)

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        out_and_lse: tuple[Tensor, Tensor] = inputs[7].prefilled.forward(inputs[:3], present(*inputs[3:7]), inputs[7])
        return out_and_lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, options = inputs
        ctx.options = options
        ctx.kernel = TileAttention
        ctx.reference = options.reference
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def tangents(ctx: Any, saved: Sequence[Any], *tangents: Any) -> Any:
        return TileTangents.apply(*saved, *tangents[:7], ctx.options)

    @staticmethod
    def gradients(ctx, d_out: Tensor | None, d_lse: Tensor | None) -> Any:  # type: ignore[no-untyped-def]
        return ctx.options.prefilled.backward(ctx.saved_tensors, ctx.options, d_out, d_lse)


class TileTangents(Function):
    """`TileTangents.apply(*tensors, out, lse, *tangents, options)`: the tangents of out and lse of `TileAttention` from
    those of its seven tensors, None for one that is 0."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, tangents, options = inputs[:9], inputs[9:16], inputs[16]
        moved = [None if x is None or x._is_zerotensor() else plain(x) for x in tangents]
        dst_bias, src_bias = moved[5:]
        if dst_bias is not None or src_bias is not None:  # the kernel reads both or neither
            moved[5] = torch.zeros_like(tensors[5]) if dst_bias is None else dst_bias
            moved[6] = torch.zeros_like(tensors[6]) if src_bias is None else src_bias
        tangents_of: tuple[Tensor, Tensor] = options.prefilled.tangents(tensors, moved, options)
        return tangents_of

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # Not `out` and `lse`: what they depend on is among the tensors.
        ctx.save_for_backward(*inputs[:7], *inputs[9:16])
        ctx.save_for_forward(*inputs[:7], *inputs[9:16])
        ctx.reference = inputs[16].reference
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        function = partial(_tangents_again, ctx.reference)
        needs = (*ctx.needs_input_grad[:7], *ctx.needs_input_grad[9:16])
        found = gradients_again(function, ctx.saved_tensors, needs, upstream)
        return *found[:7], None, None, *found[7:], None

    @staticmethod
    def tangents(ctx: Any, saved: Sequence[Any], *tangents: Any) -> Any:
        function = partial(_tangents_again, ctx.reference)
        return tuple(tangents_again(function, saved, (*tangents[:7], *tangents[9:16])))


def _tangents_again(function: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """`TileTangents` by differentiable operations."""
    return tuple(tangents_again(function, inputs[:7], inputs[7:]))


_OF_PAIRS = "table", "bias", "dst_bias", "src_bias"


def present(*of_pairs: Tensor | None) -> dict[str, Tensor]:
    """Returns table, bias, dst_bias and src_bias by name, without those that are None."""
    return {name: x for name, x in zip(_OF_PAIRS, of_pairs, strict=True) if x is not None}


def _features(x: Tensor) -> _Features:
    """The strides of features."""
    *by_batch, by_node, by_head, _ = x.stride()
    return _Features(None, *(by_batch or (0,)), by_head, by_node)


def _dense(shape: Sequence[int]) -> _Features:
    """Returns the strides of contiguous features."""
    *_, nodes, heads, width = shape
    return _Features(None, nodes * heads * width, width, heads * width)


def _slots(reach: int, size: int) -> int:
    """The number of tiles of the other side to keep, of `size` bytes each: the range of one tile, within MAX_KEPT.
    Features without a width have a size of 0."""
    return min(reach, max(MAX_KEPT // max(size, 1), 1))


def _run(name: str, p: _Parameters, parts: int, query: Tensor, *others: Tensor) -> None:
    """Runs a pass. `others`: key, value, out and lse. Parameters hold addresses only: the caller keeps all tensors."""
    p.query.data, p.key.data, p.value.data, p.out.data, p.lse = addresses(query, *others)
    threads = torch.get_num_threads()
    parts = min(parts, 8 * threads) if threads > 1 else 1
    library.run(f"tile_attention_{name}", query.dtype, p, parts=parts)
