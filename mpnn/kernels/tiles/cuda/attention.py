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

from mpnn.kernels import derivatives
from mpnn.kernels.cuda.dropout import fill_words
from mpnn.kernels.cuda.launch import Arguments, layout
from mpnn.kernels.cuda.schedule import power_of_two
from mpnn.kernels.cuda.tensors import on_device, with_contiguous_rows
from mpnn.kernels.derivatives import Kernel
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
    """`scale` is positive, `softcap` None for none."""

    scale: float
    softcap: float | None
    dropout: Dropout | None
    graphs: TileGraphs
    config: Config

    def graph(self, launch: Launch) -> TileGraph:
        """The graph with the tiles of a launch."""
        return self.graphs.of(launch.rows, launch.columns)


class _Inputs(NamedTuple):
    """The tensors of a call; see `attend`."""

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


def attend(
    options: Options, reference: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns out [B, N_dst, H, DV] and the log-sum-exp of the logits, lse [B, H, N_dst], +inf for a row without edges.

    Args:
        reference: an equal function of the tensors, see `Fused`.
        tensors: query [B, N_dst, H, D], key [B, N_src, H_kv, D], value [B, N_src, H_kv, DV]; all float32, bfloat16 or
            float16. Added to the logits after `softcap`, each float32 or None: table [H, N_dst + N_src - 1] by
            i - j + N_src - 1; bias [B or 1, H or 1, E] in the order of rows; dst_bias [B, H, N_dst] and src_bias [B, H,
            N_src], both or neither.
    """
    results: tuple[Tensor, Tensor] = derivatives.launch(_KERNEL, (options, _key(options, tensors)), reference, *tensors)
    return results


def _run(
    call: tuple[Options, Hashable], needs: Sequence[bool], *tensors: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, ...]]:
    options, key = call
    inputs = _readable(tensors)
    with on_device(inputs.query):
        words = _words(inputs, options, key)
        out, lse, norm = _forward(_Call(inputs, options, words, key, _features(options.graphs, inputs)))
    return (out, lse), (out, norm, *words)


def _gradients(
    call: tuple[Options, Hashable],
    needs: Sequence[bool],
    tensors: Sequence[Any],
    saved: Any,
    d_out: Tensor | None,
    d_lse: Tensor | None,
) -> list[Tensor | None]:
    options, key = call
    out, norm, *words = saved
    inputs = _readable(tensors)
    d_out = torch.zeros_like(out) if d_out is None else with_contiguous_rows(d_out)
    d_lse = _contiguous(d_lse)
    key = key, layout(d_out), d_lse if d_lse is None else layout(d_lse), tuple(needs)
    with on_device(out):
        features = _features(options.graphs, inputs, d_out)
        return _backward(_Call(inputs, options, _Words(*words), key, features), out, norm, d_out, d_lse, needs)


_KERNEL = Kernel(_run, _gradients)


def _readable(tensors: Sequence[Any]) -> _Inputs:
    return _Inputs(*map(with_contiguous_rows, tensors[:3]), *map(_contiguous, tensors[3:]))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _key(options: Options, tensors: Sequence[Tensor | None]) -> Hashable:
    """All that the kernels of a forward pass depend on, but addresses; see `mpnn.kernels.cuda.launch`."""
    dropout = options.dropout
    of_dropout = None
    if dropout is not None:
        of_dropout = dropout.p, *dropout[2:4], dropout.ids and tuple(map(layout, dropout.ids))
    return options.scale, options.softcap, of_dropout, options.config, *(x if x is None else layout(x) for x in tensors)


_Arguments = Callable[[], tuple[int, tuple[Any, ...], dict[str, Any]]]
"""Returns the number of programs, the numbers and the constants of a launch."""


def _start(
    graphs: TileGraphs, key: Hashable, kernel: Any, tensors: Sequence[Tensor | None], launch: Launch,
    arguments: _Arguments,
) -> None:  # fmt: skip
    """Starts a kernel."""

    def prepare() -> Arguments:
        programs, numbers, constants = arguments()
        return Arguments(programs, numbers, constants, launch.warps, launch.stages, launch.registers)

    graphs.launches.start(key, kernel, tensors, prepare)


def _words(inputs: _Inputs, options: Options, key: Hashable) -> _Words:
    dropout = options.dropout
    if dropout is None:
        return _Words()
    batch, num_dst, heads, _ = inputs.query.shape
    counts = num_dst, inputs.value.shape[1], batch * heads
    sizes = [triton.cdiv(count, 4) * 4 for count in counts]  # so that addresses are multiples of 16 bytes
    words = _Words(*inputs.query.new_empty(sum(sizes), dtype=torch.int32).split(sizes))
    tensors = dropout.seed, *(dropout.ids or (None, None)), *words
    _start(options.graphs, key, fill_words, tensors, _SMALL, lambda: (
        triton.cdiv(max(sizes), _WORDS), (*counts, heads, *dropout[2:4]), {"SIZE": _WORDS}
    ))  # fmt: skip
    return words


class _Features(NamedTuple):
    """Query, key, value and perhaps d_out as kernels read them, and for each the strides of batch, rows, heads and
    planes."""

    tensors: list[Tensor]
    strides: list[int]


class _Call(NamedTuple):
    """The operands of all kernels of a pass."""

    inputs: _Inputs
    options: Options
    words: _Words
    key: Hashable
    features: _Features

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads, destinations and sources."""
        _, num_dst, heads, _ = self.inputs.query.shape
        return heads, num_dst, self.inputs.value.shape[1]

    def start(self, kernel: Any, tensors: Sequence[Tensor | None], arguments: _Arguments, *more: Hashable) -> None:
        """Starts a kernel that reads each number once. `more`: what it depends on besides the key of the call."""
        _start(self.options.graphs, (self.key, *more), kernel, tensors, _SMALL, arguments)

    def visit(
        self, kernel: Any, launch: Launch, visits: Schedule, results: Sequence[Tensor | None], along: Sequence[Tensor],
        copies: int, programs: int, *more: int,
    ) -> None:  # fmt: skip
        """Starts a kernel that visits tiles, with this many programs for each unit. `along`: the places of tiles that
        it reads. `more`: its last numbers."""
        inputs = self.inputs
        graph = self.options.graph(launch)
        tensors = (
            *self.features.tensors, *results, visits.units, *along, visits.pattern, visits.number,
            *_read(inputs, self.words, graph),
        )  # fmt: skip
        _start(self.options.graphs, self.key, kernel, tensors, launch, lambda: (
            len(visits.units) * programs,
            (*_numbers(self.options), copies, *self.sizes, *self.features.strides, *_bias_strides(inputs.bias), *more),
            _constants(inputs, launch),
        ))  # fmt: skip


def _forward(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and norm."""
    query = call.inputs.query
    launch = call.options.config.forward
    graph = call.options.graph(launch)
    batch, num_dst, heads, _ = query.shape
    copies = batch * heads
    width = call.inputs.value.shape[-1]
    out = query.new_empty(batch, num_dst, heads, width)
    lse, norm = (query.new_empty(batch, heads, num_dst, dtype=torch.float32) for _ in range(2))
    if not copies * num_dst:
        return out, lse, norm
    visits = graph.by_row(copies)
    shape = visits.slots, copies, graph.rows
    part, part_norm = lse.new_empty(*shape, _room(width)), lse.new_empty(shape)
    results = out, lse, norm, part, part_norm
    call.visit(tile_forward.attend, launch, visits, results, (visits.column,), copies, copies)
    if visits.slots:
        call.start(tile_forward.join, (part, part_norm, out, lse, norm, visits.divided), lambda: (
            len(visits.divided) * copies * (graph.rows // _STEP),
            (copies, heads, num_dst),
            {"D": width, "WIDTH": _room(width), "ROWS": graph.rows, "STEP": _STEP},
        ))  # fmt: skip
    return out, lse, norm


def _backward(
    call: _Call, out: Tensor, norm: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the inputs, None where they are not needed."""
    inputs = call.inputs
    grads = _Inputs(
        *(x.new_empty(x.shape) if x is not None and need else None for x, need in zip(inputs, needs, strict=True))
    )
    # dst_bias moves all logits of a row, so that only lse depends on it.
    if grads.dst_bias is not None:
        grads = grads._replace(dst_bias=torch.zeros_like(grads.dst_bias) if d_lse is None else d_lse)
    if not inputs.query.numel() * inputs.value.numel():
        return [None if x is None else x.zero_() for x in grads]
    batch, num_dst, heads, _ = inputs.query.shape
    copies = batch * heads
    width = inputs.value.shape[-1]
    stats = norm.new_empty(*norm.shape, 2)
    call.start(tile_backward.deltas, (out, d_out, norm, d_lse, stats), lambda: (
        triton.cdiv(num_dst, _ROWS) * copies,
        (copies, heads, num_dst, *d_out.stride()[:3]),
        {"D": width, "WIDTH": _room(width), "ROWS": _ROWS},
    ))  # fmt: skip
    if grads.query is not None or grads.bias is not None:
        grads = grads._replace(bias=_by_query(call, stats, grads))
    if grads.key is not None or grads.value is not None or grads.src_bias is not None:
        _by_key(call, stats, grads)
    if grads.table is not None:
        _by_offset(call, stats, grads.table)
    return list(grads)


def _by_query(call: _Call, stats: Tensor, grads: _Inputs) -> Tensor | None:
    """Writes the gradient of queries; returns that of biases per edge."""
    query = call.inputs.query
    launch = call.options.config.by_query
    graph = call.options.graph(launch)
    batch, _, heads, width = query.shape
    copies = batch * heads
    visits = graph.by_row(copies)
    d_query = query.new_empty(query.shape) if grads.query is None else grads.query
    d_bias = None
    edges = 0
    if grads.bias is not None:
        edges = grads.bias.shape[-1]
        d_bias = grads.bias.new_empty(batch, heads, edges)
    part = stats.new_empty(visits.slots, copies, graph.rows, _room(width))
    results = stats, d_query, d_bias, part
    call.visit(tile_backward.by_query, launch, visits, results, (visits.column,), copies, copies, edges)
    _add_parts(call, part, d_query, visits, graph.rows)
    return None if d_bias is None or grads.bias is None else d_bias.sum_to_size(grads.bias.shape)


def _by_key(call: _Call, stats: Tensor, grads: _Inputs) -> None:
    """Writes the gradients of keys, values and src_bias."""
    key = call.inputs.key
    value = call.inputs.value
    launch = call.options.config.by_key
    graph = call.options.graph(launch)
    heads, _, num_src = call.sizes
    batch, _, key_heads, width = key.shape
    copies = batch * key_heads
    value_width = value.shape[-1]
    visits = graph.by_column(copies, heads // key_heads)
    d_key = key.new_empty(key.shape) if grads.key is None else grads.key
    d_value = value.new_empty(value.shape) if grads.value is None else grads.value
    shape = visits.slots, copies, graph.columns
    part, part_value = stats.new_empty(*shape, _room(width)), stats.new_empty(*shape, _room(value_width))
    part_src = None if grads.src_bias is None else stats.new_empty(visits.slots, batch * heads, graph.columns)
    results = stats, d_key, d_value, grads.src_bias, part, part_value, part_src
    call.visit(tile_backward.by_key, launch, visits, results, (visits.row,), copies, copies)
    _add_parts(call, part, d_key, visits, graph.columns)
    _add_parts(call, part_value, d_value, visits, graph.columns)
    if grads.src_bias is not None and part_src is not None:
        _add_parts(call, part_src, grads.src_bias.view(batch * heads, num_src, 1, 1), visits, graph.columns)


def _by_offset(call: _Call, stats: Tensor, d_table: Tensor) -> None:
    """Writes the gradient of the table."""
    launch = call.options.config.by_query
    graph = call.options.graph(launch)
    heads, num_dst, num_src = call.sizes
    copies = len(call.inputs.query) * heads
    diagonals = graph.by_diagonal(heads)
    visits = diagonals.schedule
    sums = stats.new_empty(visits.slots, heads, graph.rows, graph.columns)
    along = visits.row, visits.column
    programs = heads * (graph.columns // launch.step)
    call.visit(tile_backward.by_offset, launch, visits, (stats, sums), along, copies, programs)
    call.start(tile_backward.add_diagonals, (sums, diagonals.first, diagonals.ranges, d_table), lambda: (
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
    call.start(tile_backward.add_parts, (part, out, visits.divided), lambda: (
        len(visits.divided) * batch * heads * (rows // _STEP),
        (batch * heads, heads, nodes),
        {"D": width, "WIDTH": room, "ROWS": rows, "STEP": _STEP},
    ), out.dtype, out.shape, part.shape)  # fmt: skip


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
