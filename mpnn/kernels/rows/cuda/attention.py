"""Attention along the rows of a sparse graph as a differentiable function of tensors, by Triton kernels.

The counterpart of `mpnn.kernels.rows.attention` for GPUs, with the same arithmetic. Features keep their width, strides
and dtype, and nothing waits for the device.
"""

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mpnn.kernels.cuda.launch import Arguments, layout
from mpnn.kernels.cuda.schedule import TUNING, Sorted, Tile, power_of_two, tile
from mpnn.kernels.cuda.tensors import Strides, index_type, on_device, real, strides, with_contiguous_rows
from mpnn.kernels.derivatives import Kernel, launch
from mpnn.kernels.dropout_threshold import threshold
from mpnn.kernels.rows import spec as row_spec
from mpnn.kernels.rows.cuda import backward, forward, reduce as row_reduce
from mpnn.kernels.rows.cuda.backward import DESTINATIONS, SOURCES, TYPES
from mpnn.kernels.rows.spec import ACTIVATED, ADDITIVE, CONSTANT, DOT

_NAMES = {CONSTANT: "additive", DOT: "dot", ADDITIVE: "additive", ACTIVATED: "activated"}  # in TUNING


class Tensors(NamedTuple):
    """The tensors of a call; absent ones are None.

    value [..., N_src, H_kv, DV]. Unless the score is `CONSTANT`, query [..., N_dst, H, D] and key [..., N_src, H_kv,
    D]. In an `ADDITIVE` score they are [..., N, H], and H_kv is H as in an `ACTIVATED` score, which has a vector
    [H, D]. For each edge in the caller's order, with all entries of the batch in one dimension B: edge_key [B, E, H,
    D], or [B, E, H] in an `ADDITIVE` score; edge_value [B, E, H, DV]; and bias [B, E, H]. Their strides may be 0.
    Vectors edge_key and edge_value may be tables [B, edge types, H, width] instead.
    """

    value: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    vector: Tensor | None = None
    edge_key: Tensor | None = None
    edge_value: Tensor | None = None
    bias: Tensor | None = None


class Ends(NamedTuple):
    """The nodes that edges connect, [E] each in the caller's order."""

    dst: Tensor
    src: Tensor


class EdgeTypes(NamedTuple):
    """How edges read a table: the type of each edge, [E] in the caller's order; a function that returns the edges
    sorted by type, whose columns are numbers of edges; and the ends of edges."""

    ids: Tensor
    rows: Callable[[], Sorted]
    ends: Ends


class Score(NamedTuple):
    """The plain numbers of a call. `kind` to `tanh`: the score, as in `mpnn.kernels.rows.spec`; softcap 0 for none.
    Head h of batch entry b has stream `b * streams + first_stream + h` of dropout, see `mpnn.graph.rng`."""

    heads: int
    kind: int
    normalize: int
    scale: float = 1.0
    softcap: float = 0.0
    slope: float = 1.0
    tanh: bool = False
    dropout: float = 0.0
    first_stream: int = 0
    streams: int = 0

    @property
    def softmax(self) -> bool:
        return self.normalize == row_spec.NORMALIZERS["softmax"]


class Spec(NamedTuple):
    """All other arguments. `rows`: the edges by destination. `columns`: returns the edges by source. `dtype`: of the
    result. `seed`: of dropout, int64, None without. `key_types` and `value_types`: the edge types of
    edge_key and edge_value, None if each edge has a row of its own."""

    rows: Sorted
    columns: Callable[[], Sorted]
    score: Score
    dtype: torch.dtype
    seed: Tensor | None = None
    return_weights: bool = False
    key_types: EdgeTypes | None = None
    value_types: EdgeTypes | None = None


def attend(
    spec: Spec, inputs: Tensors, reference: Callable[..., tuple[Tensor | None, ...]] | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out [..., N_dst, H, DV]; weights before dropout [..., E, H] in the caller's order if they are asked for; and of a
    softmax the log-sum-exp of logits [..., N_dst, H], float32 or float64, inf for rows without edges. `reference`:
    an equal function of the tensors, see `Fused`.
    """
    layouts = [None if x is None else layout(x) for x in (*inputs, *_ids(spec), spec.seed)]
    key = spec.score, spec.dtype, spec.return_weights, *layouts
    results: tuple[Tensor, Tensor | None, Tensor | None] = launch(_KERNEL, (spec, key), reference, *inputs)
    return results


_Options = tuple[Spec, Hashable]
"""The second is all that kernels of the forward pass depend on, but addresses; see `mpnn.kernels.cuda.launch`."""


def _run(options: _Options, needs: Sequence[bool], *tensors: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
    value = tensors[0]
    batch = value.shape[:-3]
    with on_device(value):
        saved = _forward(options[0], _readable(tensors), options[1])
    return tuple(None if x is None else x.view(*batch, *x.shape[1:]) for x in saved), saved


def _gradients(
    options: _Options,
    needs: Sequence[bool],
    tensors: Sequence[Any],
    saved: Any,
    d_out: Tensor | None,
    d_weights: Tensor | None,
    d_lse: Tensor | None,
) -> list[Tensor | None]:
    spec, key = options
    out, weights, lse = saved
    d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous().view(out.shape)
    d_weights = None if d_weights is None else d_weights.reshape(weights.shape)
    d_lse = None if d_lse is None else d_lse.reshape(lse.shape)
    with on_device(out):
        delta = None
        if d_weights is not None or d_lse is not None:
            delta = _deltas(spec, out, d_out, weights, d_weights, d_lse)
        found = _backward(spec, _readable(tensors), _Upstream(out, lse, delta, d_out, d_weights), needs, key)
    return [None if x is None else x.reshape(of.shape) for x, of in zip(found, tensors, strict=True)]


_KERNEL = Kernel(_run, _gradients)


class _Upstream(NamedTuple):
    """The results of the forward pass, and the incoming gradients. lse and delta [B, N_dst, H] are of softmax; delta is
    None until a kernel computes it."""

    out: Tensor
    lse: Tensor | None
    delta: Tensor | None
    d_out: Tensor
    d_weights: Tensor | None


def _readable(tensors: Sequence[Any]) -> Tensors:
    """The tensors as kernels read them: features of nodes as [B, N, H, D], those of an `ADDITIVE` score with D = 1, all
    with a contiguous last dimension, and a contiguous vector."""
    value, query, key, vector, edge_key, edge_value, bias = tensors
    batch = prod(value.shape[:-3])
    dims = value.dim()
    value, query, key = (
        x if x is None else x.reshape(batch, *x.shape[dims - 3 : dims - 1], x.shape[-1] if x.dim() == dims else 1)
        for x in (value, query, key)
    )
    value, query, key, edge_value = (
        x if x is None else with_contiguous_rows(x) for x in (value, query, key, edge_value)
    )
    if edge_key is not None and edge_key.dim() == 4:
        edge_key = with_contiguous_rows(edge_key)
    return Tensors(value, query, key, None if vector is None else vector.contiguous(), edge_key, edge_value, bias)


def _forward(spec: Spec, inputs: Tensors, key: Hashable) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, weights, and lse [B, N_dst, H]."""
    value = inputs.value
    rows = spec.rows
    score = spec.score
    batch = value.shape[0]
    width = value.shape[-1]
    heads = score.heads
    kept = real(value.dtype)[0]
    out = value.new_empty(batch, rows.num_rows, heads, width, dtype=spec.dtype)
    lse = value.new_empty(batch, rows.num_rows, heads, dtype=kept) if score.softmax else None
    weights = value.new_empty(batch, rows.num_edges, heads, dtype=kept) if spec.return_weights else None
    if not batch * rows.num_rows * heads:
        return out, weights, lse
    slots = rows.divided.slots
    part = part_max = part_sum = None
    if slots:
        part = value.new_empty(batch, slots, heads, width, dtype=kept)
        part_max = value.new_empty(batch, slots, heads, dtype=kept)
        part_sum = torch.empty_like(part_max)

    def arguments() -> Arguments:
        shape = _tile(score, inputs, heads, "")
        at = (
            *_strides_of_inputs(inputs), strides(out), strides(lse, False), strides(weights, False), strides(part),
            strides(part_max, False),
        )  # fmt: skip
        numbers = len(rows.units), shape.blocks, heads, *_numbers(score)
        constants = {**_constants(score, inputs, shape), "INDEX": index_type(tensors)}
        return Arguments(rows.programs(shape, batch), (*at, *numbers), constants, shape.warps)

    tensors = (
        *_tensors(spec, rows, inputs), out, lse, weights, part, part_max, part_sum
    )  # fmt: skip
    rows.launches.start(key, forward.attend, tensors, arguments)
    if slots:
        _join(spec, (part, part_max, part_sum), out, lse, key)
    if weights is not None and lse is not None:
        weights.sub_(lse.index_select(1, rows.row_of_number)).exp_()
    return out, weights, lse


def _join(spec: Spec, parts: Sequence[Tensor | None], out: Tensor, lse: Tensor | None, key: Hashable) -> None:
    """Joins the parts of divided rows."""
    divided = spec.rows.divided

    def arguments() -> Arguments:
        batch, _, heads, width = out.shape
        shape = tile(heads, width, TUNING["join"])
        at = strides(parts[0]), strides(parts[1], False), strides(out), strides(lse, False)
        constants = {
            "NORMALIZE": spec.score.normalize, "BH": shape.heads, "WIDTH": shape.width, "REAL": real(out.dtype)[1]
        }  # fmt: skip
        programs = divided.count * shape.blocks * batch
        return Arguments(programs, (*at, divided.count, shape.blocks, heads), constants, shape.warps)

    tensors = divided.row, divided.ptr, *parts, out, lse
    spec.rows.launches.start(key, forward.join, tensors, arguments)


def _deltas(
    spec: Spec,
    out: Tensor,
    d_out: Tensor,
    weights: Tensor | None,
    d_weights: Tensor | None,
    d_lse: Tensor | None,
) -> Tensor | None:
    """The sum over each row of its weights times their gradients, less the gradient of lse, [B, N_dst, H]: what
    softmax's backward pass needs. None for other normalizers."""
    if not spec.score.softmax:
        return None
    kind, language = real(out.dtype)
    delta = out.new_empty(out.shape[:-1], dtype=kind)
    width = out.shape[-1]
    room = power_of_two(width)
    rows = max(1, 512 // room)
    count = delta.numel()
    if count:
        constants = {"ROWS": rows, "WIDTH": room, "REAL": language}
        spec.rows.launches.start((count, width), backward.deltas, (out, d_out, delta), lambda: (
            Arguments(triton.cdiv(count, rows), (count, width), constants, warps=1)
        ))  # fmt: skip
    if d_weights is not None and weights is not None:
        per_edge = (weights * d_weights).unsqueeze(-2)  # as if edges were nodes, with heads for features
        delta += row_reduce.segment_reduce(per_edge, None, spec.rows, spec.rows.numbered, "sum")[0].squeeze(-2)
    return delta if d_lse is None else delta - d_lse


def _backward(
    spec: Spec, inputs: Tensors, upstream: _Upstream, needed: Sequence[bool], key: Hashable
) -> list[Tensor | None]:
    """The gradient of each tensor of `inputs`, None where it is not needed."""
    empty = not spec.rows.num_edges * upstream.d_out.shape[:-1].numel()
    new = torch.zeros_like if empty else _empty_like
    grads = Tensors(*(new(x) if x is not None and need else None for x, need in zip(inputs, needed, strict=True)))
    if empty:
        return list(grads)
    tables = {"edge_key": spec.key_types, "edge_value": spec.value_types}
    tables = {name: types for name, types in tables.items() if types is not None and getattr(grads, name) is not None}
    of_edges = grads._replace(**dict.fromkeys(tables))
    by_destination = any(x is not None for x in (of_edges.query, *of_edges[3:]))
    if spec.score.softmax and upstream.delta is None and (tables or not by_destination):
        upstream = upstream._replace(delta=_deltas(spec, upstream.out, upstream.d_out, None, None, None))
    for name, types in tables.items():
        table = {"d_rows" if name == "edge_key" else "d_values": getattr(grads, name)}
        _along(spec, inputs, upstream, types.rows(), TYPES, key, ends=types.ends, **table)
    if by_destination:
        computes = spec.score.softmax and upstream.delta is None
        if computes:
            upstream = upstream._replace(delta=torch.empty_like(upstream.lse))
        d_vector = _along(
            spec, inputs, upstream, spec.rows, DESTINATIONS, key, grads.query, of_edges=of_edges, computes=computes
        )
        grads = grads._replace(vector=d_vector)
    if grads.value is not None or grads.key is not None:
        _along(spec, inputs, upstream, spec.columns(), SOURCES, key, grads.key, grads.value)
    return list(grads)


def _empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor for the gradient of x, whose strides may be 0."""
    return x.new_empty(x.shape)


def _along(
    spec: Spec,
    inputs: Tensors,
    upstream: _Upstream,
    rows: Sorted,
    which: Any,
    key: Hashable,
    d_rows: Tensor | None = None,
    d_values: Tensor | None = None,
    ends: Ends | None = None,
    of_edges: Tensors | None = None,
    computes: bool = False,
) -> Tensor | None:
    """Writes gradients along `rows`: DESTINATIONS, SOURCES or TYPES, see `backward.gradients`. With `of_edges`
    also those of the data of edges; returns that of the score's vector. `computes`: delta too."""
    score, (out, lse, delta, d_out, d_weights) = spec.score, upstream
    heads = inputs.value.shape[2] if which == SOURCES else score.heads
    batch = len(d_out)
    kept = real(d_out.dtype)[0]
    part, part_values = (
        None if x is None or not rows.divided.slots
        else x.new_empty(batch, rows.divided.slots, *x.shape[2:], dtype=kept)
        for x in (d_rows, d_values)
    )  # fmt: skip
    d_edge_key, d_edge_value, d_bias = (None, None, None) if of_edges is None else of_edges[4:]
    wanted = None if of_edges is None else of_edges.vector
    d_vector = None
    if wanted is not None:
        shape = _tile(score, inputs, heads, ", back")
        d_vector = d_out.new_empty(rows.programs(shape, batch), shape.heads, _width(inputs), dtype=kept)

    def arguments() -> Arguments:
        shape = _tile(score, inputs, heads, ", back")
        at = (
            *_strides_of_inputs(inputs), strides(d_out), strides(lse, False), strides(d_weights, False),
            strides(d_rows), strides(d_values), strides(part), strides(part_values), _of_edge_keys(d_edge_key),
            strides(d_edge_value), strides(d_bias, False),
        )  # fmt: skip
        numbers = len(rows.units), shape.blocks, heads, *_numbers(score)
        constants = {"ROWS": which.value, **_constants(score, inputs, shape), "INDEX": index_type(tensors)}
        return Arguments(rows.programs(shape, batch), (*at, *numbers), constants, shape.warps)

    units, col, edge, *tensors = _tensors(spec, rows, inputs)
    tensors = (
        units, col, edge, *(ends or (None, None)), *tensors, out if computes else None, lse, delta, d_out, d_weights,
        d_rows, d_values, part, part_values, d_vector, d_edge_key, d_edge_value, d_bias,
    )  # fmt: skip
    name = which.value, None if d_weights is None else layout(d_weights)
    rows.launches.start((name, key), backward.gradients, tensors, arguments)
    row_reduce.join_parts(rows, part, d_rows)
    row_reduce.join_parts(rows, part_values, d_values)
    if d_vector is None:
        return None
    whole = d_vector.view(batch, shape.blocks, -1, shape.heads, d_vector.shape[-1]).sum((0, 2))
    return whole.flatten(0, 1)[:heads, : wanted.shape[1]].to(wanted.dtype)


def _tensors(spec: Spec, rows: Sorted, inputs: Tensors) -> tuple[Tensor | None, ...]:
    """The arguments of all kernels from `units` to `seed`."""
    value, query, key, vector, edge_key, edge_value, bias = inputs
    key_types, value_types = _ids(spec)
    return (
        rows.units, rows.edges.col, rows.edges.edge, query, key, value, vector, edge_key, key_types, edge_value,
        value_types, bias, spec.seed,
    )  # fmt: skip


def _ids(spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """The edge types of edge_key and edge_value."""
    key_types = spec.key_types
    value_types = spec.value_types
    return None if key_types is None else key_types.ids, None if value_types is None else value_types.ids


def _strides_of_inputs(x: Tensors) -> tuple[Strides | None, ...]:
    """The arguments of all kernels from `query_at` to `bias_at`."""
    nodes = strides(x.query), strides(x.key), strides(x.value)
    return *nodes, _of_edge_keys(x.edge_key), strides(x.edge_value), strides(x.bias, False)


def _of_edge_keys(x: Tensor | None) -> Strides | None:
    """Strides of vectors, or of the numbers of an `ADDITIVE` score."""
    return None if x is None else strides(x, x.dim() == 4)


def _numbers(score: Score) -> tuple[int | float, ...]:
    """The arguments of all kernels from `first_stream` to `slope`."""
    dropout = score.first_stream, score.streams, threshold(score.dropout), 1 / (1 - score.dropout)
    return *dropout, score.scale, score.softcap, score.slope


def _width(inputs: Tensors) -> int:
    """The width of tiles of queries and keys."""
    return 1 if inputs.query is None else power_of_two(inputs.query.shape[-1])


def _tile(score: Score, inputs: Tensors, heads: int, way: str) -> Tile:
    return tile(heads, max(_width(inputs), inputs.value.shape[-1]), TUNING[_NAMES[score.kind] + way])


def _constants(score: Score, inputs: Tensors, shape: Tile) -> dict[str, Any]:
    """The constants that kernels are compiled for, in the order of their parameters."""
    return {
        "GROUP": score.heads // inputs.value.shape[2],
        "KIND": score.kind,
        "NORMALIZE": score.normalize,
        "TANH": score.tanh,
        "SOFTCAP": score.softcap != 0.0,
        "DROPOUT": score.dropout > 0.0,
        "R": shape.rows,
        "E": shape.edges,
        "BH": shape.heads,
        "WIDTH": _width(inputs),
        "VALUE_WIDTH": power_of_two(inputs.value.shape[-1]),
        "REAL": real(inputs.value.dtype)[1],
    }
