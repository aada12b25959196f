"""Attention along the rows of a sparse graph as a differentiable function of tensors, by Triton's kernels.

The counterpart of `mpnn.kernels.row_attention`, with its arithmetic, but made for GPUs: features stay as narrow and as
strided as they are, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mpnn.kernels.cuda import backward, forward, row_reduce
from mpnn.kernels.cuda.schedule import Bin, Divided, Sorted
from mpnn.kernels.cuda.scores import PerEdge
from mpnn.kernels.cuda.shapes import Tile, power_of_two, tile
from mpnn.kernels.cuda.tensors import on_device, real, stepped, view
from mpnn.kernels.once_differentiable import once_differentiable
from mpnn.kernels.row_spec import CONSTANT, NORMALIZERS

_BITS = 24  # of the hash that decides, as in `mpnn.request.rng`


class Given(NamedTuple):
    """The tensors of a call; None where there is none.

    value [B, N_src, H_kv, DV]. Unless scores are constant, dst [B, N_dst, H, D] and src [B, N_src, H_kv, D]: queries
    and keys, or the two terms of an additive score, there with H_kv = H, and D = 1 unless it is `ACTIVATED` by a vector
    [H, D]. For each edge in the caller's order edge [B, E, H, D] and edge_value [B, E, H, DV], before and bias
    [B, E, H], whose dimensions may have strides of 0. Of edge and edge_value there may be one for each class instead.
    """

    value: Tensor
    dst: Tensor | None = None
    src: Tensor | None = None
    vector: Tensor | None = None
    edge: Tensor | None = None
    edge_value: Tensor | None = None
    before: Tensor | None = None
    bias: Tensor | None = None


class Ends(NamedTuple):
    """The nodes that edges connect, [E] each in the caller's order."""

    dst: Tensor
    src: Tensor


class Classes(NamedTuple):
    """Classes of edges whose vectors stand in a table: of each edge, [E] in the caller's order; and, when asked for,
    the edges by class, whose columns are their numbers, and their ends."""

    ids: Tensor
    rows: Callable[[], Sorted]
    ends: Ends


class Spec(NamedTuple):
    """Everything else: the edges by destination and, when asked for, by source; the score's kind and numbers, as in
    `mpnn.kernels.row_spec`; dropout's keys [B * H] int32, None without; the classes of edge and edge_value, None where
    each edge has its own."""

    rows: Sorted
    columns: Callable[[], Sorted]
    heads: int
    kind: int
    normalize: int
    scale: float = 1.0
    cap: float = 0.0
    slope: float = 1.0
    tanh: bool = False
    keys: Tensor | None = None
    dropout: float = 0.0
    return_weights: bool = False
    edge_classes: Classes | None = None
    value_classes: Classes | None = None

    @property
    def softmax(self) -> bool:
        return self.normalize == NORMALIZERS["softmax"]


def attend(spec: Spec, given: Given) -> tuple[Tensor, Tensor | None]:
    """out [B, N_dst, H, DV], and weights before dropout [B, E, H] in the caller's order if they are asked for."""
    return _RowAttention.apply(spec, *given)


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: Spec, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        given = _stepped(Given(*tensors))
        with on_device(given.value):
            out, norm, weights = _forward(spec, given)
        ctx.spec = spec
        ctx.save_for_backward(out, norm, weights, *given)
        ctx.set_materialize_grads(False)
        return out, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None) -> Any:
        out, norm, weights, *tensors = ctx.saved_tensors
        if d_out is None and d_weights is None:
            return (None,) * (1 + len(tensors))
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        with on_device(out):
            delta = _deltas(ctx.spec, out, d_out, weights, d_weights) if ctx.spec.softmax else None
            passed = _Passed(norm, delta, d_out, d_weights)
            return None, *_backward(ctx.spec, Given(*tensors), passed, ctx.needs_input_grad[1:])


class _Passed(NamedTuple):
    """What the backward pass gets, but for what was given: `norm` and `delta` [B, N_dst, H] for softmax."""

    norm: Tensor
    delta: Tensor | None
    d_out: Tensor
    d_weights: Tensor | None


def _stepped(given: Given) -> Given:
    """Features, of nodes or on edges, with a contiguous last dimension."""
    features = {name: stepped(x) for name, x in given._asdict().items() if x is not None and x.dim() == 4}
    return given._replace(**features, vector=None if given.vector is None else given.vector.contiguous())


def _forward(spec: Spec, given: Given) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, norm [B, N_dst, H], and weights."""
    value, heads, rows = given.value, spec.heads, spec.rows
    batch, width = value.shape[0], value.shape[-1]
    kind, language = real(value.dtype)
    out = value.new_empty(batch, rows.num_rows, heads, width)
    norm = value.new_empty(*out.shape[:-1], dtype=kind) if spec.softmax else value.new_empty(0, 0, 0, dtype=kind)
    weights = value.new_empty(batch, rows.num_edges, heads, dtype=kind) if spec.return_weights else None
    if not batch * rows.num_rows * heads:
        return out, norm, weights
    slots = rows.divided.slots
    part, top, total = (
        value.new_empty(batch, slots, heads, *of, dtype=kind) if slots else None for of in ((width,), (), ())
    )
    shared = _shared(spec, given)
    for b in rows.bins:
        shape = _tile(spec, given, heads, b.long)
        forward.attend[_programs(b, shape, heads, batch)](
            b.units, rows.edges, _blocks(heads, shape), heads, *shared, view(out), view(norm, False),
            view(weights, False), view(part), view(top, False), view(total, False), **_options(spec, given, shape),
        )  # fmt: skip
    if slots:
        shape = tile(heads, width, False)
        blocks = _blocks(heads, shape)
        forward.join[(rows.divided.count * blocks * batch,)](
            rows.divided, blocks, heads, view(part), view(top, False), view(total, False), view(out),
            view(norm, False), NORMALIZE=spec.normalize, BH=shape.heads, WIDTH=shape.width, REAL=language,
        )  # fmt: skip
    if weights is not None and spec.softmax:
        weights.sub_(norm.index_select(1, rows.row_of_number)).exp_()
    return out, norm, weights


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
    return delta + row_reduce.fold(per_edge, None, spec.rows, spec.rows.numbered, "sum")[0].squeeze(-2)


def _backward(spec: Spec, given: Given, passed: _Passed, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of each tensor of `given`, None where it is not needed."""
    wanted = Given(*(x if need else None for x, need in zip(given, needed, strict=True)))
    empty = not spec.rows.num_edges * passed.d_out.shape[:-1].numel()
    found = Given(*(None if x is None else (torch.zeros_like if empty else _fresh)(x) for x in wanted))
    if empty:
        return list(found)
    tables = [
        (name, classes)
        for name, classes in (("edge", spec.edge_classes), ("edge_value", spec.value_classes))
        if classes is not None and getattr(found, name) is not None
    ]
    for name, classes in tables:
        _by_class(spec, given, passed, getattr(found, name), name, classes)
    by_row = found._replace(**dict.fromkeys((name for name, _ in tables), None))
    if any(x is not None for x in (by_row.dst, *by_row[3:])):
        found = found._replace(vector=_by_destination(spec, given, passed, by_row))
    if found.value is not None or found.src is not None:
        _by_source(spec, given, passed, found)
    return list(found)


def _fresh(x: Tensor) -> Tensor:
    """Room for the gradient of x, which may repeat its entries."""
    return x.new_empty(x.shape)


def _by_destination(spec: Spec, given: Given, passed: _Passed, found: Given) -> Tensor | None:
    """Writes the gradients of what destinations and edges have, and gives that of the vector of activated scores."""
    rows, heads, batch = spec.rows, spec.heads, len(passed.d_out)
    part, vectors = _parts(rows.divided, found.dst, passed), []
    for b in rows.bins:
        shape = _tile(spec, given, heads, b.long, 2 if b.long else 4)
        (programs,), blocks, width = _programs(b, shape, heads, batch), _blocks(heads, shape), _width(spec, given)
        d_vector = None
        if found.vector is not None:
            d_vector = passed.d_out.new_empty(programs, shape.heads, width, dtype=passed.norm.dtype)
            vectors.append(d_vector.view(batch, blocks, -1, shape.heads, width))
        backward.by_destination[(programs,)](
            b.units, rows.edges, blocks, heads, *_shared(spec, given), *_views(passed), view(found.dst), d_vector,
            _views_of_edges(found), view(part), **_options(spec, given, shape),
        )  # fmt: skip
    row_reduce.join_parts(rows, part, found.dst)
    if found.vector is None:
        return None
    whole = [x.sum((0, 2)).flatten(0, 1)[:heads, : found.vector.shape[1]] for x in vectors]
    return sum(whole[1:], whole[0]).to(found.vector.dtype)


def _by_source(spec: Spec, given: Given, passed: _Passed, found: Given) -> None:
    """Writes the gradients of what sources have."""
    columns, (batch, _, heads, _) = spec.columns(), given.value.shape
    part_src, part_value = (_parts(columns.divided, x, passed) for x in (found.src, found.value))
    for b in columns.bins:
        shape = _tile(spec, given, heads, b.long, 2 if b.long else 4)
        backward.by_source[_programs(b, shape, heads, batch)](
            b.units, columns.edges, _blocks(heads, shape), heads, *_shared(spec, given), *_views(passed),
            view(found.src), view(found.value), view(part_src), view(part_value), **_options(spec, given, shape),
        )  # fmt: skip
    row_reduce.join_parts(columns, part_src, found.src)
    row_reduce.join_parts(columns, part_value, found.value)


def _by_class(spec: Spec, given: Given, passed: _Passed, out: Tensor, name: str, classes: Classes) -> None:
    """Writes the gradient of a table of vectors, which is `name` in `Given`."""
    rows, heads, batch = classes.rows(), spec.heads, len(passed.d_out)
    part = _parts(rows.divided, out, passed)
    outs = [view(x) if name == which else None for x in (out, part) for which in ("edge", "edge_value")]
    for b in rows.bins:
        shape = _tile(spec, given, heads, b.long, 4)
        backward.by_class[_programs(b, shape, heads, batch)](
            b.units, rows.edges, classes.ends, _blocks(heads, shape), heads, *_shared(spec, given), *_views(passed),
            *outs, **_options(spec, given, shape),
        )  # fmt: skip
    row_reduce.join_parts(rows, part, out)


def _parts(divided: Divided, out: Tensor | None, passed: _Passed) -> Tensor | None:
    """Room for the parts of divided rows of `out` [B, rows, heads, width]; None if there are none."""
    if out is None or not divided.slots:
        return None
    return out.new_empty(len(out), divided.slots, *out.shape[2:], dtype=passed.norm.dtype)


# ---------------------------------------------------------------------------------------- arguments of kernels


def _shared(spec: Spec, given: Given) -> tuple[Any, ...]:
    """What all kernels read, from `dst` to `slope`."""
    grow, threshold = 1 / (1 - spec.dropout), round(spec.dropout * (1 << _BITS))
    features = view(given.dst), view(given.src), view(given.value), given.vector, _views_of_edges(given, spec)
    return (*features, spec.keys, threshold, grow, spec.scale, spec.cap, spec.slope)


def _views_of_edges(x: Given, spec: Spec | None = None) -> PerEdge:
    """What edges have; with the spec, as far as it stands in tables, by class."""
    classes = (spec.edge_classes, spec.value_classes) if spec else (None, None)
    edge, edge_value = (None if c is None else c.ids for c in classes)
    return PerEdge(
        view(x.edge, ids=edge), view(x.edge_value, ids=edge_value), view(x.before, False), view(x.bias, False)
    )


def _views(passed: _Passed) -> tuple[Any, ...]:
    norm, delta, d_out, d_weights = passed
    return view(norm, False), view(delta, False), view(d_out), view(d_weights, False)


def _width(spec: Spec, given: Given) -> int:
    """Of tiles of features that are scored."""
    return 1 if spec.kind == CONSTANT else power_of_two(given.dst.shape[-1])


def _tile(spec: Spec, given: Given, heads: int, long: bool, tensors: int = 2) -> Tile:
    return tile(heads, max(_width(spec, given), given.value.shape[-1]), long, tensors)


def _options(spec: Spec, given: Given, shape: Tile) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {
        "GROUP": spec.heads // given.value.shape[2],
        "KIND": spec.kind,
        "NORMALIZE": spec.normalize,
        "TANH": spec.tanh,
        "CAPPED": spec.cap != 0.0,
        "DROPS": spec.keys is not None,
        "R": shape.rows,
        "E": shape.edges,
        "BH": shape.heads,
        "WIDTH": _width(spec, given),
        "VALUE_WIDTH": power_of_two(given.value.shape[-1]),
        "REAL": real(given.value.dtype)[1],
    }


def _blocks(heads: int, shape: Tile) -> int:
    return triton.cdiv(heads, shape.heads)


def _programs(b: Bin, shape: Tile, heads: int, batch: int) -> tuple[int]:
    return (triton.cdiv(b.units.count, shape.rows) * _blocks(heads, shape) * batch,)
