"""Attention over the tiles of a graph as a differentiable function of tensors: launches the kernels of `forward`
and `backward`, which state the formulas. The counterpart of `mpnn.kernels.tiles.attention` for GPUs.

    forward:   for dropout: fill_words; float32 only: split query, key and value; attend; join the parts of divided rows
    backward:  deltas; float32 only: split; by_query, add_parts; by_key, add_parts; for a table by_offset, add_diagonals

Called by `mpnn/backends/tiles.py`. Nothing waits for the device or copies from it, so that calls can be captured
in CUDA graphs once the schedules of the graph exist. Offsets between heads and batch entries are 64-bit numbers, and
grids have one dimension, which a GPU limits to 2**31 programs.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mpnn.kernels.cuda.dropout import fill_words
from mpnn.kernels.cuda.launch import Arguments, layout
from mpnn.kernels.cuda.schedule import power_of_two
from mpnn.kernels.cuda.tensors import on_device, with_contiguous_rows
from mpnn.kernels.derivatives import Fused
from mpnn.kernels.dropout_threshold import threshold
from mpnn.kernels.tiles.cuda import backward as tile_backward, forward as tile_forward
from mpnn.kernels.tiles.cuda.config import Config, Launch
from mpnn.kernels.tiles.cuda.schedule import OFFSETS, Schedule, TileGraph, TileGraphs

_MIN_WIDTH = 16  # of a head, the smallest operand of a tensor core
_WORDS = 1024  # of each kind that one program computes
_ROWS = 32  # whose deltas one program computes
_STEP = 16  # rows of a divided row of tiles that one program joins
_SMALL = Launch(0, 0, _STEP, 4, 3)  # of kernels that read each number once


class Dropout(NamedTuple):
    """The seed, int64 on the device, and the probability `p`. Head h of batch entry b has stream
    `b * streams + first_stream + h`, see `mpnn.graph.rng`. `ids`: what is hashed in place of the numbers of
    destinations and sources, int32 [N_dst] and [N_src], or None."""

    seed: Tensor
    p: float
    first_stream: int
    streams: int
    ids: tuple[Tensor, Tensor] | None = None


class Options(NamedTuple):
    """`scale` is positive, `softcap` None for none. `reference`: an equal function of the tensors, see `Fused`."""

    scale: float
    softcap: float | None
    dropout: Dropout | None
    graphs: TileGraphs
    config: Config
    reference: Callable[..., tuple[Tensor, Tensor]] | None = None

    def graph(self, launch: Launch) -> TileGraph:
        """The graph with the tiles of a launch."""
        return self.graphs.of(launch.rows, launch.columns)


class _Inputs(NamedTuple):
    """The tensors of a call; see `TileAttention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor | None
    bias: Tensor | None
    dst_bias: Tensor | None
    src_bias: Tensor | None


class _Words(NamedTuple):
    """The words of nodes [N_dst] and [N_src] and of streams [B * H], int32; None without dropout."""

    dst: Tensor | None = None
    src: Tensor | None = None
    streams: Tensor | None = None


class TileAttention(Fused):
    """`TileAttention.apply(query, key, value, table, bias, dst_bias, src_bias, options)`

    Returns out [B, N_dst, H, DV] and the log-sum-exp of the logits, lse [B, H, N_dst], +inf for a row without edges.

    query [B, N_dst, H, D], key [B, N_src, H_kv, D], value [B, N_src, H_kv, DV]; all float32, bfloat16 or float16.
    Added to the logits after `softcap`, each float32 or None: table [H, N_dst + N_src - 1] by i - j + N_src - 1; bias
    [B or 1, H or 1, E] in the order of rows; dst_bias [B, H, N_dst] and src_bias [B, H, N_src], both or neither.
    """

    TENSORS = slice(0, 7)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, options = arguments
        inputs = _readable(tensors)
        key = _key(inputs, options)
        with on_device(inputs.query):
            words = _words(inputs, options.dropout, options.graphs, key)
            out, lse, norm = _forward(inputs, options, words, key)
        ctx.save_for_backward(*tensors, out, norm)
        ctx.options = options
        ctx.reference = options.reference
        ctx.words = words
        ctx.key = key
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        *tensors, out, norm = ctx.saved_tensors
        inputs = _readable(tensors)
        d_out = torch.zeros_like(out) if d_out is None else with_contiguous_rows(d_out)
        d_lse = _contiguous(d_lse)
        key = ctx.key, layout(d_out), d_lse if d_lse is None else layout(d_lse), ctx.needs_input_grad
        with on_device(out):
            return _backward(inputs, out, norm, d_out, d_lse, ctx.options, ctx.words, ctx.needs_input_grad, key)


def _readable(tensors: Sequence[Any]) -> _Inputs:
    return _Inputs(*map(with_contiguous_rows, tensors[:3]), *map(_contiguous, tensors[3:]))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _key(inputs: _Inputs, options: Options) -> Hashable:
    """All that the kernels of a forward pass depend on, but addresses; see `mpnn.kernels.cuda.launch`."""
    dropout = options.dropout
    of_dropout = None
    if dropout is not None:
        of_dropout = dropout.p, *dropout[2:4], dropout.ids and tuple(map(layout, dropout.ids))
    return options.scale, options.softcap, of_dropout, options.config, *(x if x is None else layout(x) for x in inputs)


def _start(
    graphs: TileGraphs, key: Hashable, kernel: Any, tensors: Sequence[Tensor | None], launch: Launch,
    arguments: Callable[[], tuple[int, tuple[Any, ...], dict[str, Any]]],
) -> None:  # fmt: skip
    """Starts a kernel; `arguments` returns the number of programs, the numbers and the constants."""

    def prepare() -> Arguments:
        programs, numbers, constants = arguments()
        return Arguments(programs, numbers, constants, launch.warps, launch.stages, launch.registers)

    graphs.launches.start(key, kernel, tensors, prepare)


def _words(inputs: _Inputs, dropout: Dropout | None, graphs: TileGraphs, key: Hashable) -> _Words:
    if dropout is None:
        return _Words()
    batch, num_dst, heads, _ = inputs.query.shape
    counts = num_dst, inputs.value.shape[1], batch * heads
    sizes = [triton.cdiv(count, 4) * 4 for count in counts]  # so that addresses are multiples of 16 bytes
    words = _Words(*inputs.query.new_empty(sum(sizes), dtype=torch.int32).split(sizes))
    tensors = dropout.seed, *(dropout.ids or (None, None)), *words
    _start(graphs, key, fill_words, tensors, _SMALL, lambda: (
        triton.cdiv(max(sizes), _WORDS), (*counts, heads, *dropout[2:4]), {"SIZE": _WORDS}
    ))  # fmt: skip
    return words


def _forward(inputs: _Inputs, options: Options, words: _Words, key: Hashable) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and norm."""
    query = inputs.query
    value = inputs.value
    launch = options.config.forward
    graph = options.graph(launch)
    batch, num_dst, heads, _ = query.shape
    copies = batch * heads
    width = value.shape[-1]
    out = query.new_empty(batch, num_dst, heads, width)
    lse, norm = (query.new_empty(batch, heads, num_dst, dtype=torch.float32) for _ in range(2))
    if not copies * num_dst:
        return out, lse, norm
    visits = graph.by_row(copies)
    shape = visits.slots, copies, graph.rows
    part, part_norm = lse.new_empty(*shape, _room(width)), lse.new_empty(shape)
    features = _features(options.graphs, inputs)
    tensors = (
        *features.tensors, out, lse, norm, part, part_norm,
        visits.units, visits.column, visits.pattern, visits.number, *_read(inputs, words, graph),
    )  # fmt: skip
    _start(options.graphs, key, tile_forward.attend, tensors, launch, lambda: (
        len(visits.units) * copies,
        (*_numbers(options), copies, heads, num_dst, value.shape[1], *features.strides, *_bias_strides(inputs.bias)),
        _constants(inputs, launch),
    ))  # fmt: skip
    if visits.slots:
        joined = part, part_norm, out, lse, norm, visits.divided
        _start(options.graphs, key, tile_forward.join, joined, _SMALL, lambda: (
            len(visits.divided) * copies * (graph.rows // _STEP),
            (copies, heads, num_dst),
            {"D": width, "WIDTH": _room(width), "ROWS": graph.rows, "STEP": _STEP},
        ))  # fmt: skip
    return out, lse, norm


def _backward(
    inputs: _Inputs, out: Tensor, norm: Tensor, d_out: Tensor, d_lse: Tensor | None, options: Options, words: _Words,
    needed: Any, key: Hashable,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the inputs, None where they are not needed."""
    query = inputs.query
    value = inputs.value
    grads = _Inputs(
        *(x.new_empty(x.shape) if x is not None and need else None for x, need in zip(inputs, needed, strict=False))
    )
    # dst_bias moves all logits of a row, so that only lse depends on it.
    if grads.dst_bias is not None:
        grads = grads._replace(dst_bias=torch.zeros_like(grads.dst_bias) if d_lse is None else d_lse)
    if not query.numel() * value.numel():
        return [None if x is None else x.zero_() for x in grads]
    batch, num_dst, heads, _ = query.shape
    copies = batch * heads
    width = value.shape[-1]
    stats = norm.new_empty(*norm.shape, 2)
    _start(options.graphs, key, tile_backward.deltas, (out, d_out, norm, d_lse, stats), _SMALL, lambda: (
        triton.cdiv(num_dst, _ROWS) * copies,
        (copies, heads, num_dst, *d_out.stride()[:3]),
        {"D": width, "WIDTH": _room(width), "ROWS": _ROWS},
    ))  # fmt: skip
    features = _features(options.graphs, inputs, d_out)
    call = _Call(inputs, options, features, stats, words, key)
    if grads.query is not None or grads.bias is not None:
        d_bias = _by_query(call, grads)
        grads = grads._replace(bias=d_bias)
    if grads.key is not None or grads.value is not None or grads.src_bias is not None:
        _by_key(call, grads)
    if grads.table is not None:
        _by_offset(call, grads.table)
    return list(grads)


class _Features(NamedTuple):
    """Query, key, value and perhaps d_out as kernels read them, and for each the strides of batch, rows, heads and
    planes."""

    tensors: list[Tensor]
    strides: list[int]


class _Call(NamedTuple):
    """The operands of all kernels of a backward pass."""

    inputs: _Inputs
    options: Options
    features: _Features
    stats: Tensor
    words: _Words
    key: Hashable

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads, destinations and sources."""
        _, num_dst, heads, _ = self.inputs.query.shape
        return heads, num_dst, self.inputs.value.shape[1]

    def numbers(self, copies: int) -> tuple[Any, ...]:
        """The numbers of all kernels from `threshold` to `bias_h`."""
        return *_numbers(self.options), copies, *self.sizes, *self.features.strides, *_bias_strides(self.inputs.bias)


def _by_query(call: _Call, grads: _Inputs) -> Tensor | None:
    """Writes the gradient of queries; returns that of biases per edge."""
    inputs = call.inputs
    launch = call.options.config.by_query
    graph = call.options.graph(launch)
    batch, _, heads, width = inputs.query.shape
    copies = batch * heads
    visits = graph.by_row(copies)
    d_query = inputs.query.new_empty(inputs.query.shape) if grads.query is None else grads.query
    d_bias = None
    edges = 0
    if grads.bias is not None:
        edges = grads.bias.shape[-1]
        d_bias = grads.bias.new_empty(batch, heads, edges)
    part = call.stats.new_empty(visits.slots, copies, graph.rows, _room(width))
    tensors = (
        *call.features.tensors, call.stats, d_query, d_bias, part,
        visits.units, visits.column, visits.pattern, visits.number, *_read(inputs, call.words, graph),
    )  # fmt: skip
    _start(call.options.graphs, call.key, tile_backward.by_query, tensors, launch, lambda: (
        len(visits.units) * copies, (*call.numbers(copies), edges), _constants(inputs, launch)
    ))  # fmt: skip
    _add_parts(call, part, d_query, visits, graph.rows)
    if d_bias is None or grads.bias is None:
        return None
    return d_bias.sum_to_size(grads.bias.shape)


def _by_key(call: _Call, grads: _Inputs) -> None:
    """Writes the gradients of keys, values and src_bias."""
    inputs = call.inputs
    launch = call.options.config.by_key
    graph = call.options.graph(launch)
    heads, _, num_src = call.sizes
    batch, _, key_heads, width = inputs.key.shape
    copies = batch * key_heads
    value_width = inputs.value.shape[-1]
    visits = graph.by_column(copies, heads // key_heads)
    d_key, d_value = (
        x.new_empty(x.shape) if grad is None else grad
        for x, grad in ((inputs.key, grads.key), (inputs.value, grads.value))
    )
    shape = visits.slots, copies, graph.columns
    part, part_value = call.stats.new_empty(*shape, _room(width)), call.stats.new_empty(*shape, _room(value_width))
    part_src = None if grads.src_bias is None else call.stats.new_empty(visits.slots, batch * heads, graph.columns)
    tensors = (
        *call.features.tensors, call.stats, d_key, d_value, grads.src_bias, part, part_value, part_src,
        visits.units, visits.row, visits.pattern, visits.number, *_read(inputs, call.words, graph),
    )  # fmt: skip
    _start(call.options.graphs, call.key, tile_backward.by_key, tensors, launch, lambda: (
        len(visits.units) * copies, call.numbers(copies), _constants(inputs, launch)
    ))  # fmt: skip
    _add_parts(call, part, d_key, visits, graph.columns)
    _add_parts(call, part_value, d_value, visits, graph.columns)
    if grads.src_bias is not None and part_src is not None:
        _add_parts(call, part_src, grads.src_bias.view(batch * heads, num_src, 1, 1), visits, graph.columns)


def _by_offset(call: _Call, d_table: Tensor) -> None:
    """Writes the gradient of the table."""
    inputs = call.inputs
    launch = call.options.config.by_query
    graph = call.options.graph(launch)
    heads, num_dst, num_src = call.sizes
    copies = len(inputs.query) * heads
    steps = graph.columns // launch.step
    diagonals = graph.by_diagonal(heads)
    visits = diagonals.schedule
    sums = call.stats.new_empty(visits.slots, heads, graph.rows, graph.columns)
    tensors = (
        *call.features.tensors, call.stats, sums,
        visits.units, visits.row, visits.column, visits.pattern, visits.number, *_read(inputs, call.words, graph),
    )  # fmt: skip
    _start(call.options.graphs, call.key, tile_backward.by_offset, tensors, launch, lambda: (
        len(visits.units) * heads * steps, call.numbers(copies), _constants(inputs, launch)
    ))  # fmt: skip
    added = sums, diagonals.first, diagonals.ranges, d_table
    _start(call.options.graphs, call.key, tile_backward.add_diagonals, added, _SMALL, lambda: (
        len(diagonals.ranges) * heads,
        (heads, num_dst, num_src),
        {"ROWS": graph.rows, "COLUMNS": graph.columns, "OFFSETS": OFFSETS},
    ))  # fmt: skip


def _add_parts(call: _Call, part: Tensor, out: Tensor, visits: Schedule, rows: int) -> None:
    """Adds up the parts [slots, B * heads, rows, width] of divided rows into out [B, N, heads, D]."""
    if not visits.slots:
        return
    batch, nodes, heads, width = out.shape
    room = part.shape[-1] if part.dim() == 4 else 1
    key = call.key, out.dtype, out.shape, part.shape
    _start(call.options.graphs, key, tile_backward.add_parts, (part, out, visits.divided), _SMALL, lambda: (
        len(visits.divided) * batch * heads * (rows // _STEP),
        (batch * heads, heads, nodes),
        {"D": width, "WIDTH": room, "ROWS": rows, "STEP": _STEP},
    ))  # fmt: skip


def _read(inputs: _Inputs, words: _Words, graph: TileGraph) -> tuple[Tensor | None, ...]:
    """The tensors that all kernels read, from `words` to `stream_words`."""
    edges_before = None if inputs.bias is None else graph.edges_before
    return graph.words, edges_before, *inputs[3:], *words


def _numbers(options: Options) -> tuple[Any, ...]:
    """The numbers that all kernels read, from `threshold` to `softcap`."""
    p = 0.0 if options.dropout is None else options.dropout.p
    return threshold(p), 1 / (1 - p), options.scale, options.softcap


def _features(graphs: TileGraphs, inputs: _Inputs, *more: Tensor) -> _Features:
    tensors = []
    strides = []
    for x in (*inputs[:3], *more):
        if x.dtype == torch.float32:
            planes = _split(graphs, x)
            tensors.append(planes)
            strides += [*planes.stride()[1:4], planes.stride(0)]
        else:
            tensors.append(x)
            strides += [*x.stride()[:3], 0]
    return _Features(tensors, strides)


def _split(graphs: TileGraphs, x: Tensor) -> Tensor:
    """The three bfloat16 planes of float32 x [B, N, H, D]."""
    batch, nodes, heads, width = x.shape
    planes = x.new_empty(3, *x.shape, dtype=torch.bfloat16)
    items = batch * nodes * heads
    room = power_of_two(width)
    rows = max(1, 1024 // room)
    if planes.numel():
        _start(graphs, layout(x), tile_forward.split, (x, planes), _SMALL, lambda: (
            triton.cdiv(items, rows),
            (items, nodes, heads, *x.stride()[:3]),
            {"D": width, "WIDTH": room, "ROWS": rows},
        ))  # fmt: skip
    return planes


def _bias_strides(bias: Tensor | None) -> tuple[int, int]:
    """The strides of batch and heads, 0 where one is shared."""
    if bias is None:
        return 0, 0
    batch, heads = (0 if n == 1 else step for n, step in zip(bias.shape, bias.stride()[:2], strict=False))
    return batch, heads


def _constants(inputs: _Inputs, launch: Launch) -> dict[str, Any]:
    """The constants that kernels are compiled for."""
    width = inputs.query.shape[-1]
    value_width = inputs.value.shape[-1]
    return {
        "GROUP": inputs.query.shape[2] // inputs.key.shape[2],
        "D": width,
        "DV": value_width,
        "WIDTH": _room(width),
        "WIDTH_V": _room(value_width),
        "PLANES": 3 if inputs.query.dtype == torch.float32 else 1,
        "ROWS": launch.rows,
        "COLUMNS": launch.columns,
        "STEP": launch.step,
    }


def _room(width: int) -> int:
    """The width of tiles of features."""
    return max(_MIN_WIDTH, power_of_two(width))
