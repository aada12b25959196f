"""Attention along the rows of a sparse graph as a differentiable function of tensors, by Triton kernels.

The counterpart of `mpnn.kernels.row_attention` for GPUs, with the same arithmetic. Features keep their width, strides
and dtype, and nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mpnn.kernels.cuda import backward, forward, row_reduce
from mpnn.kernels.cuda.backward import DESTINATIONS, SOURCES, TYPES
from mpnn.kernels.cuda.schedule import Divided, Sorted, Tile, power_of_two, tile
from mpnn.kernels.cuda.tensors import View, on_device, real, view, with_contiguous_rows
from mpnn.kernels.dropout_threshold import threshold
from mpnn.kernels.once_differentiable import once_differentiable
from mpnn.kernels.row_spec import NORMALIZERS


class Tensors(NamedTuple):
    """The tensors of a call; absent ones are None.

    value [B, N_src, H_kv, DV]. Unless the score is `CONSTANT`, query [B, N_dst, H, D] and key [B, N_src, H_kv, D]. In
    an `ADDITIVE` score D is 1, and H_kv is H as in an `ACTIVATED` score, which has a vector [H, D]. For each edge in
    the caller's order: edge_key [B, E, H, D], or [B, E, H] in an `ADDITIVE` score; edge_value [B, E, H, DV]; and bias
    [B, E, H]. Their strides may be 0. Vectors edge_key and edge_value may be tables [B, edge types, H, width] instead.
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


class Spec(NamedTuple):
    """All other arguments. `rows`: the edges by destination. `columns`: returns the edges by source. `kind` to `tanh`:
    the score, as in `mpnn.kernels.row_spec`; softcap 0 for none. `dropout_keys`: [B * H] int32, None without dropout.
    `key_types` and `value_types`: the edge types of edge_key and edge_value, None if each edge has a row of its own."""

    rows: Sorted
    columns: Callable[[], Sorted]
    heads: int
    kind: int
    normalize: int
    scale: float = 1.0
    softcap: float = 0.0
    slope: float = 1.0
    tanh: bool = False
    dropout_keys: Tensor | None = None
    dropout: float = 0.0
    return_weights: bool = False
    key_types: EdgeTypes | None = None
    value_types: EdgeTypes | None = None

    @property
    def softmax(self) -> bool:
        return self.normalize == NORMALIZERS["softmax"]


def attend(spec: Spec, inputs: Tensors) -> tuple[Tensor, Tensor | None]:
    """out [B, N_dst, H, DV], and weights before dropout [B, E, H] in the caller's order if they are asked for."""
    return _RowAttention.apply(spec, *inputs)


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: Spec, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        inputs = _contiguous(Tensors(*tensors))
        with on_device(inputs.value):
            out, lse, weights = _forward(spec, inputs)
        ctx.spec = spec
        ctx.save_for_backward(out, lse, weights, *inputs)
        ctx.set_materialize_grads(False)
        return out, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None) -> Any:
        out, lse, weights, *tensors = ctx.saved_tensors
        if d_out is None and d_weights is None:
            return (None,) * (1 + len(tensors))
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        with on_device(out):
            delta = _deltas(ctx.spec, out, d_out, weights, d_weights) if ctx.spec.softmax else None
            upstream = _Upstream(lse, delta, d_out, d_weights)
            return None, *_backward(ctx.spec, Tensors(*tensors), upstream, ctx.needs_input_grad[1:])


class _Upstream(NamedTuple):
    """The gradients that arrive, and what the forward pass left for them: lse and delta [B, N_dst, H], of softmax."""

    lse: Tensor
    delta: Tensor | None
    d_out: Tensor
    d_weights: Tensor | None


def _contiguous(inputs: Tensors) -> Tensors:
    """Features, of nodes or on edges, with a contiguous last dimension."""
    features = {name: with_contiguous_rows(x) for name, x in inputs._asdict().items() if x is not None and x.dim() == 4}
    return inputs._replace(**features, vector=None if inputs.vector is None else inputs.vector.contiguous())


def _forward(spec: Spec, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse [B, N_dst, H], and weights."""
    value, heads, rows = inputs.value, spec.heads, spec.rows
    batch, width = value.shape[0], value.shape[-1]
    kind, language = real(value.dtype)
    out = value.new_empty(batch, rows.num_rows, heads, width)
    lse = value.new_empty(*out.shape[:-1], dtype=kind) if spec.softmax else value.new_empty(0, 0, 0, dtype=kind)
    weights = value.new_empty(batch, rows.num_edges, heads, dtype=kind) if spec.return_weights else None
    if not batch * rows.num_rows * heads:
        return out, lse, weights
    slots = rows.divided.slots
    part, part_max, part_sum = (
        value.new_empty(batch, slots, heads, *of, dtype=kind) if slots else None for of in ((width,), (), ())
    )
    shared = _shared(spec, inputs)
    for b in rows.bins:
        shape = _tile(spec, inputs, heads, b.long)
        forward.attend[b.grid(shape, batch)](
            b.units, rows.edges, shape.blocks, heads, *shared, view(out), view(lse, False),
            view(weights, False), view(part), view(part_max, False), view(part_sum, False),
            **_options(spec, inputs, shape),
        )  # fmt: skip
    if slots:
        shape = tile(heads, width, False)
        forward.join[(rows.divided.count * shape.blocks * batch,)](
            rows.divided, shape.blocks, heads, view(part), view(part_max, False), view(part_sum, False),
            view(out), view(lse, False), NORMALIZE=spec.normalize, BH=shape.heads, WIDTH=shape.width, REAL=language,
        )  # fmt: skip
    if weights is not None and spec.softmax:
        weights.sub_(lse.index_select(1, rows.row_of_number)).exp_()
    return out, lse, weights


def _deltas(spec: Spec, out: Tensor, d_out: Tensor, weights: Tensor | None, d_weights: Tensor | None) -> Tensor:
    """The sum over each row of its weights times their gradients, [B, N_dst, H]: what softmax's backward pass needs."""
    kind, language = real(out.dtype)
    delta = out.new_empty(out.shape[:-1], dtype=kind)
    width = power_of_two(out.shape[-1])
    rows = max(1, 2048 // width)
    if delta.numel():
        backward.deltas[(triton.cdiv(delta.numel(), rows),)](
            out, d_out, delta, delta.numel(), out.shape[-1], ROWS=rows, WIDTH=width, REAL=language
        )
    if d_weights is None or weights is None:
        return delta
    per_edge = (weights * d_weights).unsqueeze(-2)  # as if edges were nodes, with heads for features
    return delta + row_reduce.segment_reduce(per_edge, None, spec.rows, spec.rows.numbered, "sum")[0].squeeze(-2)


def _backward(spec: Spec, inputs: Tensors, upstream: _Upstream, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of each tensor of `inputs`, None where it is not needed."""
    empty = not spec.rows.num_edges * upstream.d_out.shape[:-1].numel()
    new = torch.zeros_like if empty else _empty_like
    grads = Tensors(*(new(x) if x is not None and need else None for x, need in zip(inputs, needed, strict=True)))
    if empty:
        return list(grads)
    of_edges = grads
    for name, out, types in (("edge_key", "d_rows", spec.key_types), ("edge_value", "d_values", spec.value_types)):
        if types is not None and getattr(grads, name) is not None:
            table = {out: getattr(grads, name)}
            _along(spec, inputs, upstream, types.rows(), TYPES, ends=types.ends, **table)
            of_edges = of_edges._replace(**{name: None})
    if any(x is not None for x in (of_edges.query, *of_edges[3:])):
        d_vector = _along(spec, inputs, upstream, spec.rows, DESTINATIONS, grads.query, of_edges=of_edges)
        grads = grads._replace(vector=d_vector)
    if grads.value is not None or grads.key is not None:
        _along(spec, inputs, upstream, spec.columns(), SOURCES, grads.key, grads.value)
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
    d_rows: Tensor | None = None,
    d_values: Tensor | None = None,
    ends: Ends | None = None,
    of_edges: Tensors | None = None,
) -> Tensor | None:
    """Writes gradients along `rows`: DESTINATIONS, SOURCES or TYPES, see `backward.gradients`. With `of_edges`
    also those of the data of edges; returns that of the score's vector."""
    heads, batch = inputs.value.shape[2] if which == SOURCES else spec.heads, len(upstream.d_out)
    part, part_values = (_parts(rows.divided, x, upstream) for x in (d_rows, d_values))
    d_per_edge = (None, None, None) if of_edges is None else _per_edge(of_edges)
    wanted, vectors = None if of_edges is None else of_edges.vector, []
    for b in rows.bins:
        shape = _tile(spec, inputs, heads, b.long, 2 if b.long and which != TYPES else 4)
        (programs,), width = b.grid(shape, batch), _width(spec, inputs)
        d_vector = None
        if wanted is not None:
            d_vector = upstream.d_out.new_empty(programs, shape.heads, width, dtype=upstream.lse.dtype)
            vectors.append(d_vector.view(batch, shape.blocks, -1, shape.heads, width))
        backward.gradients[(programs,)](
            b.units, rows.edges, ends, shape.blocks, heads, *_shared(spec, inputs), *_views(upstream), view(d_rows),
            view(d_values), view(part), view(part_values), d_vector, *d_per_edge, ROWS=which,
            **_options(spec, inputs, shape),
        )  # fmt: skip
    row_reduce.join_parts(rows, part, d_rows)
    row_reduce.join_parts(rows, part_values, d_values)
    if wanted is None:
        return None
    whole = [x.sum((0, 2)).flatten(0, 1)[:heads, : wanted.shape[1]] for x in vectors]
    return sum(whole[1:], whole[0]).to(wanted.dtype)


def _parts(divided: Divided, out: Tensor | None, upstream: _Upstream) -> Tensor | None:
    """An empty tensor for the parts of divided rows of `out` [B, rows, heads, width]; None if no row is divided."""
    if out is None or not divided.slots:
        return None
    return out.new_empty(len(out), divided.slots, *out.shape[2:], dtype=upstream.lse.dtype)


def _shared(spec: Spec, inputs: Tensors) -> tuple[Any, ...]:
    """The arguments of all kernels from `query` to `slope`."""
    keep_scale, least = 1 / (1 - spec.dropout), threshold(spec.dropout)
    features = view(inputs.query), view(inputs.key), view(inputs.value), inputs.vector
    edge_key, edge_value, bias = _per_edge(inputs)
    key_types, value_types = (types and types.ids for types in (spec.key_types, spec.value_types))
    per_edge = edge_key, key_types, edge_value, value_types, bias
    return (*features, *per_edge, spec.dropout_keys, least, keep_scale, spec.scale, spec.softcap, spec.slope)


def _per_edge(x: Tensors) -> tuple[View | None, View | None, View | None]:
    """Views of edge_key, edge_value and bias."""
    return view(x.edge_key, x.edge_key is not None and x.edge_key.dim() == 4), view(x.edge_value), view(x.bias, False)


def _views(upstream: _Upstream) -> tuple[Any, ...]:
    lse, delta, d_out, d_weights = upstream
    return view(lse, False), view(delta, False), view(d_out), view(d_weights, False)


def _width(spec: Spec, inputs: Tensors) -> int:
    """The width of tiles of queries and keys."""
    return 1 if inputs.query is None else power_of_two(inputs.query.shape[-1])


def _tile(spec: Spec, inputs: Tensors, heads: int, long: bool, tensors: int = 2) -> Tile:
    return tile(heads, max(_width(spec, inputs), inputs.value.shape[-1]), long, tensors)


def _options(spec: Spec, inputs: Tensors, shape: Tile) -> dict[str, Any]:
    """The constants that kernels are compiled for."""
    return {
        "GROUP": spec.heads // inputs.value.shape[2],
        "KIND": spec.kind,
        "NORMALIZE": spec.normalize,
        "TANH": spec.tanh,
        "SOFTCAP": spec.softcap != 0.0,
        "DROPOUT": spec.dropout_keys is not None,
        "R": shape.rows,
        "E": shape.edges,
        "BH": shape.heads,
        "WIDTH": _width(spec, inputs),
        "VALUE_WIDTH": power_of_two(inputs.value.shape[-1]),
        "REAL": real(inputs.value.dtype)[1],
    }
