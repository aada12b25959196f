"""Attention along the rows of a sparse graph as a differentiable function of tensors, on CPU.

`attend` takes features of one dtype, padded to whole vectors. The backend converts a `mpnn.request.request.Request` to
that form with torch operations. No E x D tensor is allocated, forward or backward, except gradients of E x D inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpnn.kernels import memory
from mpnn.kernels.once_differentiable import once_differentiable
from mpnn.kernels.row_spec import ACTIVATED, ADDITIVE, DOT, LANES, NORMALIZERS, Array, Given, Order, Spec

Problem = tuple[Any, ...]
_NO_BATCH = torch.Size()
_TRAILING = {"edge": 3, "edge_value": 3, "before": 2, "bias": 2, "table": 2}  # dimensions after the batch


@cache
def _kernels() -> Any:
    """The compiled kernels. Imported at first use, because numba imports slowly."""
    from mpnn.kernels import cpu
    from mpnn.kernels.cpu import rows, rows_backward, scores, spread, threads  # noqa: F401

    return cpu


def attend(spec: Spec, given: Given) -> tuple[Tensor, Tensor]:
    """out [..., N_dst, H, DV], and weights before dropout [..., E, H] by destination, empty unless returned."""
    out, weights = _RowAttention.apply(spec, *given)
    return out, weights


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: Spec, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        given = Given(*tensors)  # type: ignore[arg-type]
        problems = _problems(spec, given)
        out, norm, weights = _forward(spec, given, problems)
        ctx.spec, ctx.problems = spec, problems
        ctx.save_for_backward(out, norm, weights if spec.return_weights else None, *tensors)
        ctx.set_materialize_grads(False)
        return out, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None) -> Any:
        out, norm, weights, *tensors = ctx.saved_tensors
        if d_out is None and (d_weights is None or weights is None):
            return (None,) * (1 + len(tensors))
        given = Given(*tensors)
        problems = ctx.problems or _problems(ctx.spec, given)
        ctx.problems = None  # else its arrays would outlive the saved tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        inputs = _BackwardInputs(out, norm, d_out, None if weights is None else d_weights, weights)
        return None, *_backward(ctx.spec, given, problems, inputs, ctx.needs_input_grad[1:])


def _forward(spec: Spec, given: Given, problems: list[Problem]) -> tuple[Tensor, Tensor, Tensor]:
    """out, the row maximum and inverse row sum [..., N_dst, 2, H], and the weights."""
    value, heads = given.value, spec.heads
    batch, width = value.shape[:-3], value.shape[-1]
    n, edges = len(spec.rows.ptr) - 1, len(spec.rows.col)
    out, norm = (
        _by_rows(value, spec.rows, len(problems), heads * width, *batch, n, *shape)
        for shape in ((heads, width), (2, heads))
    )
    logits = memory.empty(value, *batch, edges if spec.return_weights else 0, heads)
    if not edges:
        return out, norm, logits
    parts = spec.rows.parts(heads * width)
    outs = [_entries(x, len(problems)) for x in (out, norm, logits)]
    states = _states(len(problems), len(parts), heads * (2 + width), value)
    work = [
        (part, problem, _buffers(problem, 0, heads * (4 + width)), *(x[b] for x in outs), state.sums[p], state.row[p])
        for b, (problem, state) in enumerate(zip(problems, states, strict=True))
        for p, part in enumerate(parts)
    ]
    cpu = _kernels()
    cpu.threads.each(work, lambda args: cpu.rows.forward(*args))
    softmax = spec.normalize == NORMALIZERS["softmax"]
    for b, state in enumerate(states if len(parts) > 1 else ()):
        cpu.rows.join(heads, width, softmax, outs[0][b], outs[1][b], state.sums, state.row)
    if spec.return_weights and softmax:
        row_max, inverse = norm.index_select(-3, _row_of_edge(spec)).unbind(-2)
        logits.sub_(row_max).exp_().mul_(inverse)
    return out, norm, logits


class _BackwardInputs(NamedTuple):
    """The inputs of the backward pass: results of the forward pass, and incoming gradients."""

    out: Tensor
    norm: Tensor
    d_out: Tensor
    d_weights: Tensor | None
    weights: Tensor | None


def _backward(
    spec: Spec, given: Given, problems: list[Problem], inputs: _BackwardInputs, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient of each tensor of `given`, or None if it is not needed."""
    wanted = Given(*(x if need else None for x, need in zip(given, needed, strict=True)))
    gradients = _Gradients(spec, given, wanted, len(problems))
    if len(spec.rows.col) and problems:
        d_out = [(x, *gradients.value_shape) for x in _entries(inputs.d_out, len(problems))]
        _by_source(spec, problems, inputs, d_out, gradients)
        for sums in gradients.sums():
            _spread(sums, spec, problems, d_out, gradients)
    return gradients.result()


def _by_source(
    spec: Spec, problems: list[Problem], inputs: _BackwardInputs, d_out: list[Any], gradients: _Gradients
) -> None:
    """Gradients of the tensors of sources and edges."""
    columns, count, size = spec.columns(), len(problems), gradients.size
    parts, order = columns.parts(gradients.width), (columns.ptr, columns.col, columns.edge)
    of_rows, weights = _of_rows(spec, inputs, d_out), _entries(inputs.d_weights, count, like=inputs.norm)
    states, outs = _states(count, len(parts), size, gradients.like), _outs(gradients.of_source(), gradients)
    work = [
        [
            (
                part, (order, *problem[1:]), _buffers(problem, 3 * spec.heads, size + 3 * LANES), d_out[b], of_rows[b],
                weights[b], gradients.of_edges(b, p), gradients.edges(b), *outs[b], state.sums[p], state.row[p],
            )
            for p, part in enumerate(parts)
        ]
        for b, (problem, state) in enumerate(zip(problems, states, strict=True))
    ]  # fmt: skip
    # entries of a batch that share a tensor of edges must not add to its gradient in parallel
    cpu = _kernels()
    for together in work if gradients.shared else [[args for entry in work for args in entry]]:
        cpu.threads.each(together, lambda args: cpu.rows_backward.backward(*args))
    _join(parts, gradients, outs, states)


def _of_rows(spec: Spec, inputs: _BackwardInputs, d_out: list[Any]) -> list[Array]:
    """Per destination, the values that weights and their gradients depend on; empty without softmax."""
    heads, count, norm, real = spec.heads, len(d_out), inputs.norm, _real(inputs.norm)
    if spec.normalize != NORMALIZERS["softmax"]:
        return [_nothing(real)] * count
    more = None
    if inputs.d_weights is not None and inputs.weights is not None:
        more = torch.zeros_like(norm[..., 0, :]).index_add_(-2, _row_of_edge(spec), inputs.d_weights * inputs.weights)
    outs, norms, mores = (_entries(x, count, like=norm) for x in (inputs.out, norm, more))
    rows, width = len(spec.rows.ptr) - 1, heads * inputs.out.shape[-1]
    cpu = _kernels()
    of_rows = np.empty((count, 3 * heads * rows), real)
    cuts = np.linspace(0, rows, len(spec.rows.parts(width)) + 1).astype(np.int64).tolist()
    work = [
        (
            *cut, heads, d_out[b][2], outs[b], d_out[b][0], norms[b], mores[b], cpu.scores.buffers(heads, 0, 0, real),
            of_rows[b],
        )
        for b in range(count)
        for cut in pairwise(cuts)
    ]  # fmt: skip
    cpu.threads.each(work, lambda args: cpu.rows_backward.prepare(*args))
    return list(of_rows)


_Outs = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Sums(NamedTuple):
    """A sum along the rows of an order of edges. `outs`: gradients of values, of keys [..., rows, heads, D] and of
    numbers [..., rows, heads]. `which`: the index of the summed number of an edge. `by_destination`: whether rows are
    destinations or edge types."""

    order: Order
    outs: _Outs
    which: int
    by_destination: bool


def _spread(sums: _Sums, spec: Spec, problems: list[Problem], d_out: list[Any], gradients: _Gradients) -> None:
    count, heads, size = len(problems), spec.heads, gradients.size
    parts, order = sums.order.parts(gradients.width), (sums.order.ptr, sums.order.col, sums.order.edge)
    states, outs, work = _states(count, len(parts), size, gradients.like), _outs(sums.outs, gradients), []
    for b, (problem, state) in enumerate(zip(problems, states, strict=True)):
        kind, dst, src, edge, *rest = problem[2]
        ends = (src, dst, edge) if sums.by_destination else (dst, src, (_nothing(_real(gradients.like)), *edge[1:]))
        work += [
            (
                part, order, heads, gradients.edges(b), sums.which, (kind, *ends, *rest),
                _buffers(problem, 0, size + heads * gradients.key_width), d_out[b], *outs[b], state.sums[p],
                state.row[p],
            )
            for p, part in enumerate(parts)
        ]  # fmt: skip
    cpu = _kernels()
    cpu.threads.each(work, lambda args: cpu.spread.gradients(*args))
    _join(parts, gradients, outs, states)


def _join(parts: list[Any], gradients: _Gradients, outs: list[Any], states: list[_State]) -> None:
    shape = (
        gradients.spec.heads,
        gradients.width // gradients.spec.heads,
        gradients.key_width,
        _real(gradients.like)(gradients.spec.scale),
    )
    for to, state in zip(outs, states, strict=True) if len(parts) > 1 else ():
        _kernels().spread.join(*shape, *to, state.sums, state.row)


def _outs(outs: _Outs, gradients: _Gradients) -> list[Any]:
    """Three `spread.Out` for each entry of the batch."""
    arrays = [_entries(x, gradients.count, like=gradients.like) for x in outs]
    shared_by = [1 if x is None else x.shape[-2 if k < 2 else -1] for k, x in enumerate(outs)]
    return [[(heads, x[b]) for heads, x in zip(shared_by, arrays, strict=True)] for b in range(gradients.count)]


class _Gradients:
    """The gradients of a call: the outputs that kernels write."""

    def __init__(self, spec: Spec, given: Given, wanted: Given, count: int) -> None:
        self.spec, self.given, self.wanted, self.count = spec, given, wanted, count
        self.like, self.batch, heads = given.value, given.value.shape[:-3], spec.heads
        vectors = given.value.shape[-1] // LANES
        self.width = heads * vectors * LANES  # components of an edge, which determine the parts
        self.value_shape = (self.width, *_shape(heads, heads, vectors), vectors)
        self.key_width = given.dst.shape[-1] if spec.kind in (DOT, ACTIVATED) else 0  # type: ignore[union-attr]
        self.size = self.width + heads * (self.key_width + 1)
        tables = {name: ids.order for name, ids in zip(_TRAILING, spec.ids, strict=True) if ids.order is not None}
        self.tables = {name: order for name, order in tables.items() if getattr(wanted, name) is not None}
        self.tensors = {
            name: self._fresh(name, x)
            for name, x in zip(Given._fields, wanted, strict=True)
            if x is not None and name not in tables and name != "vector"
        }
        self.arrays = {name: _entries(x, count, self.batch, _TRAILING.get(name)) for name, x in self.tensors.items()}
        self.shared = count > 1 and any(
            name in _TRAILING and x.shape[: -_TRAILING[name]].numel() < count for name, x in self.tensors.items()
        )
        # numbers of each edge: the gradient of its logit, and optional ones
        with_weight = "edge_value" in self.tables
        with_bias = "table" in self.tables and (spec.cap != 0 or spec.kind in (ADDITIVE, ACTIVATED))
        self.stride = 1 + with_weight + with_bias if "dst" in self.tensors or self.tables else 0
        self.weight_at, self.bias_at = (1 if with_weight else -1), (1 + with_weight if with_bias else -1)
        real = _real(self.like)
        self.on_edges = np.empty((count, len(spec.rows.col) * heads * self.stride), real)
        size, parts = (0, 1) if given.vector is None else (given.vector.numel(), len(spec.columns().parts(self.width)))
        self.vector = np.zeros((count, parts, size), real)

    def _fresh(self, name: str, x: Tensor) -> Tensor:
        """Allocates a gradient; rows that no kernel writes are zero."""
        if name in _TRAILING:
            return memory.zeros(x, *x.shape)
        order = self.spec.rows if name == "dst" else self.spec.columns()
        return _by_rows(x, order, self.count, self.width, *x.shape)

    def array(self, name: str, b: int) -> Array:
        return self.arrays[name][b] if name in self.arrays else _nothing(_real(self.like))

    def edges(self, b: int) -> tuple[Any, ...]:
        """`spread.Edges`."""
        return self.on_edges[b], self.stride, self.weight_at, self.bias_at

    def of_edges(self, b: int, part: int) -> tuple[Any, ...]:
        """`rows_backward.Wanted` for a part of an entry of the batch."""
        vector = self.vector[b, min(part, self.vector.shape[1] - 1)]
        return vector, *(self.array(name, b) for name in ("edge", "edge_value", "before", "bias"))

    def of_source(self) -> _Outs:
        return self._ends("value", "src")

    def sums(self) -> Iterator[_Sums]:
        if "dst" in self.tensors:
            yield _Sums(self.spec.rows, self._ends("", "dst"), 0, True)
        for name, order in self.tables.items():
            table = getattr(self.wanted, name)
            out = table.new_zeros(self.count, *_whole_vectors(table.shape, name))
            into = tuple(out if name == x else None for x in ("edge_value", "edge", "table"))
            yield _Sums(order(), into, max(self.bias_at, 0), False)  # type: ignore[arg-type]
            self.tensors[name] = out.sum(0)[..., : table.shape[-1]]

    def _ends(self, value: str, end: str) -> _Outs:
        """The outputs of one end. Ends of an additive score have numbers, ends of other scores have vectors."""
        own, additive = self.tensors.get(end), self.spec.kind == ADDITIVE
        return self.tensors.get(value), None if additive else own, own if additive else None

    def result(self) -> list[Tensor | None]:
        if self.wanted.vector is not None:
            self.tensors["vector"] = torch.from_numpy(self.vector.sum((0, 1))).view(self.wanted.vector.shape)
        return [
            None if x is None else self.tensors[name] if name in self.tensors else torch.zeros_like(x)
            for name, x in zip(Given._fields, self.wanted, strict=True)
        ]


def _by_rows(like: Tensor, order: Order, count: int, width: int, *shape: int) -> Tensor:
    """Allocates an output along the rows of `order`, for `count` entries of the batch. Rows that no part writes in full
    are zero; an edge has `width` components."""
    out = memory.empty(like, *shape)
    if not memory.is_large(out) or not len(order.col):
        return out.zero_()
    out.view(count, len(order.ptr) - 1, -1).index_fill_(1, torch.from_numpy(order.unwritten(width)), 0)
    return out


def _whole_vectors(shape: torch.Size, name: str) -> tuple[int, ...]:
    """The shape of a table, with vectors padded."""
    return tuple(shape) if name == "table" else (*shape[:-1], shape[-1] + -shape[-1] % LANES)


class _State(NamedTuple):
    """Partial sums of rows shared by several parts: sums [parts, 2, size], and their rows, -1 for none."""

    sums: Array
    row: Array

    def add_to(self, out: Array) -> None:
        """Adds the sums to their rows of `out` [rows * size]."""
        size = self.sums.shape[-1]
        for row, sums in zip(self.row.ravel().tolist(), self.sums.reshape(-1, size), strict=True):
            if row >= 0 and len(out):
                out[row * size : (row + 1) * size] += sums


def _states(count: int, parts: int, size: int, like: Tensor) -> list[_State]:
    """One state for each entry of a batch. With a single part no row is shared, so the state is empty."""
    real, size = _real(like), size if parts > 1 else 0
    return [_State(np.empty((parts, 2, size), real), np.full((parts, 2), -1)) for _ in range(count)]


@cache
def _real_type(dtype: torch.dtype) -> Any:
    return np.float32 if dtype == torch.float32 else np.float64


def _real(x: Tensor) -> Any:
    return _real_type(x.dtype)


@cache
def _nothing(real: Any) -> Array:
    return np.zeros(0, real)


def _row_of_edge(spec: Spec) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(spec.rows.ptr) - 1), np.diff(spec.rows.ptr)))


def _entries(
    x: Tensor | None, count: int, batch: torch.Size = _NO_BATCH, trailing: int | None = None, like: Tensor | None = None
) -> list[Array]:
    """A flat array for each of the `count` entries of the batch; empty ones, typed as `like`, for None.

    With `trailing` dimensions after the batch, x is broadcast over the batch.
    """
    if x is None:
        assert like is not None
        return [_nothing(_real(like))] * count
    flat = x.detach().resolve_neg().contiguous().numpy().reshape(-1)
    if count == 1:
        return [flat]
    leading = batch if trailing is None else x.shape[:-trailing]
    if trailing is None or leading.numel() == count:
        return list(flat.reshape(count, -1)) if count else []
    rows = flat.reshape(leading.numel(), -1)
    return [rows[k] for k in torch.arange(leading.numel()).view(leading).expand(batch).flatten().tolist()]


@lru_cache(maxsize=256)
def _shape(heads: int, own_heads: int, vectors: int) -> tuple[Array, Array, Array]:
    """The offset of each head in the features of a node with `own_heads` heads, and for each vector of all heads its
    head and offset."""
    start = np.arange(heads) * own_heads // heads * vectors * LANES
    offset = start[:, None] + np.arange(vectors) * LANES
    return start, np.repeat(np.arange(heads), vectors), offset.reshape(-1)


def _buffers(problem: Problem, each: int, more: int) -> Any:
    """`scores.Buffers` for one call, with `each` numbers per edge of a block and `more` others."""
    edge, edge_value = problem[2][3], problem[6]
    return _kernels().scores.buffers(problem[1], each + 2 * edge[4] + edge_value[4], more, problem[5][0].dtype)


def _problems(spec: Spec, given: Given) -> list[Problem]:
    """`scores.Problem` for each entry of the batch."""
    value, heads, real = given.value, spec.heads, _real(given.value)
    batch = value.shape[:-3]
    count = batch.numel()
    edge_ids, value_ids, before_ids, bias_ids, table_ids = (ids.ids for ids in spec.ids)
    edges, edge_values = (_entries(x, count, batch, 3, value) for x in (given.edge, given.edge_value))
    befores, biases, tables = (_entries(x, count, batch, 2, value) for x in (given.before, given.bias, given.table))
    values, dsts, srcs = (_entries(x, count, like=value) for x in (value, given.dst, given.src))
    (vector,) = _entries(given.vector, 1, like=value)
    wide = spec.kind in (DOT, ACTIVATED)
    vectors = given.dst.shape[-1] // LANES if wide else 0  # type: ignore[union-attr]
    key_heads = given.src.shape[-2] if wide else heads  # type: ignore[union-attr]
    dst_shape = (heads * max(vectors * LANES, 1), *_shape(heads, heads, vectors), vectors)
    src_shape = (key_heads * max(vectors * LANES, 1), *_shape(heads, key_heads, vectors), vectors)
    of_values, value_heads = value.shape[-1] // LANES, value.shape[-2]
    value_shape = (value_heads * of_values * LANES, *_shape(heads, value_heads, of_values), of_values)
    numbers = (real(spec.scale), real(spec.cap), real(spec.slope), int(spec.tanh))
    drops = (np.uint32(round(spec.dropout * (1 << 24))), real(1 / (1 - spec.dropout)))
    edge, edge_value = (_on_edges(x, heads, v) for x, v in ((given.edge, vectors), (given.edge_value, of_values)))
    before, bias, table = (1 if x is None else x.shape[-1] for x in (given.before, given.bias, given.table))
    graph = (spec.rows.ptr, spec.rows.col, spec.rows.edge)
    return [
        (
            graph,
            heads,
            (
                spec.kind, (dsts[b], *dst_shape), (srcs[b], *src_shape), (edges[b], edge_ids, *edge), vector,
                (befores[b], before_ids, before), *numbers,
            ),
            (biases[b], bias_ids, bias),
            (tables[b], table_ids, table),
            (values[b], *value_shape),
            (edge_values[b], value_ids, *edge_value),
            (spec.keys[b * heads : (b + 1) * heads], *drops),
            spec.normalize,
        )
        for b in range(count)
    ]  # fmt: skip


def _on_edges(x: Tensor | None, heads: int, vectors: int) -> tuple[Any, ...]:
    """`layout.EdgeVectors` without data and ids."""
    own_heads, width = (1, 0) if x is None else x.shape[-2:]
    start, _, offset = _shape(heads, own_heads, vectors)
    return own_heads, width, own_heads * max(vectors, 1) * LANES, start, offset
