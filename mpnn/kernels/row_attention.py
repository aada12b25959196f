"""Attention along the rows of a sparse graph as a differentiable function of tensors, on CPU.

`attend` takes features that are padded to whole vectors and of one type; what a `mpnn.scores.Request` says is brought
into that form by the backend, with ordinary operations of torch. Nothing of E x D is made, forward or backward, but the
gradients of such tensors that the caller gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpnn.kernels.row_spec import ACTIVATED, ADDITIVE, DOT, LANES, NORMALIZERS, Array, Given, Order, Spec

Problem = tuple[Any, ...]
_NO_BATCH = torch.Size()
_TRAILING = {"edge": 3, "edge_value": 3, "before": 2, "bias": 2, "table": 2}  # dimensions behind the batch


@cache
def _kernels() -> Any:
    """The compiled kernels: imported when first needed, since numba takes a while."""
    from mpnn.kernels import cpu
    from mpnn.kernels.cpu import rows, rows_backward, scores, spread, threads  # noqa: F401

    return cpu


def attend(spec: Spec, given: Given) -> tuple[Tensor, Tensor]:
    """out [..., N_dst, H, DV], and weights before dropout [..., E, H] by destination, empty unless asked for."""
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
    @torch.autograd.function.once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None) -> Any:
        out, norm, weights, *tensors = ctx.saved_tensors
        if d_out is None and (d_weights is None or weights is None):
            return (None,) * (1 + len(tensors))
        given = Given(*tensors)
        problems = ctx.problems or _problems(ctx.spec, given)
        ctx.problems = None  # its arrays would outlive the saved tensors that they belong to
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        passed = _Passed(out, norm, d_out, None if weights is None else d_weights, weights)
        return None, *_backward(ctx.spec, given, problems, passed, ctx.needs_input_grad[1:])


def _forward(spec: Spec, given: Given, problems: list[Problem]) -> tuple[Tensor, Tensor, Tensor]:
    """out, what weights follow from [..., N_dst, 2, H], and weights."""
    value, heads = given.value, spec.heads
    batch, width = value.shape[:-3], value.shape[-1]
    n, edges = len(spec.rows.ptr) - 1, len(spec.rows.col)
    out, norm = value.new_zeros(*batch, n, heads, width), value.new_zeros(*batch, n, 2, heads)
    scores = value.new_empty(*batch, edges if spec.return_weights else 0, heads)
    if not edges:
        return out, norm, scores
    parts = spec.rows.parts(heads * width)
    outs = [_entries(x, len(problems)) for x in (out, norm, scores)]
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
        shift, inverse = norm.index_select(-3, _row_of_edge(spec)).unbind(-2)
        scores.sub_(shift).exp_().mul_(inverse)
    return out, norm, scores


class _Passed(NamedTuple):
    """What the backward pass gets: of the forward one, its results; of what follows, gradients."""

    out: Tensor
    norm: Tensor
    d_out: Tensor
    d_weights: Tensor | None
    weights: Tensor | None


def _backward(
    spec: Spec, given: Given, problems: list[Problem], passed: _Passed, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient of each tensor of `given`, None where it is not needed."""
    wanted = Given(*(x if need else None for x, need in zip(given, needed, strict=True)))
    found = _Gradients(spec, given, wanted, len(problems))
    if len(spec.rows.col) and problems:
        d_out = _entries(passed.d_out, len(problems))
        _by_row(spec, problems, passed, d_out, found)
        for order, outs, which in found.sums():
            _spread(order, spec, problems, d_out, found, outs, which)
    return found.result()


def _by_row(spec: Spec, problems: list[Problem], passed: _Passed, d_out: list[Array], found: _Gradients) -> None:
    """Gradients of queries, and of edges."""
    heads, width, norm = spec.heads, passed.out.shape[-1], passed.norm
    d_weights, more = passed.d_weights, None
    if d_weights is not None and passed.weights is not None and spec.normalize == NORMALIZERS["softmax"]:
        more = torch.zeros_like(norm[..., 0, :]).index_add_(-2, _row_of_edge(spec), d_weights * passed.weights)
    parts, own = spec.rows.parts(heads * width), _shape(heads, heads, width // LANES)[0]
    out, norms, mores, d_weight = (_entries(x, len(problems), like=norm) for x in (passed.out, norm, more, d_weights))
    states = _states(len(problems), len(parts), found.size_of_dst, passed.out)
    room = found.size_of_dst + heads + LANES
    work = [
        [
            (
                part, problem, _buffers(problem, heads, room), own, out[b], norms[b], mores[b], d_out[b], d_weight[b],
                found.wanted_by_row(b, p), state.sums[p], state.row[p],
            )
            for p, part in enumerate(parts)
        ]
        for b, (problem, state) in enumerate(zip(problems, states, strict=True))
    ]  # fmt: skip
    # entries of a batch that share a tensor on edges would add to its gradient side by side
    cpu = _kernels()
    for together in work if found.shared else [[args for entry in work for args in entry]]:
        cpu.threads.each(together, lambda args: cpu.rows_backward.backward(*args))
    for b, state in enumerate(states if len(parts) > 1 else ()):
        state.add_to(found.array("dst", b))


def _spread(
    order: Order,
    spec: Spec,
    problems: list[Problem],
    d_out: list[Array],
    found: _Gradients,
    outs: tuple[Tensor | None, Tensor | None, Tensor | None],
    which: int,
) -> None:
    """Sums over the rows of `order` into outs: values', keys' [..., rows, heads, D], numbers' [..., rows, heads]."""
    count, heads = len(problems), spec.heads
    vectors, key_vectors = problems[0][5][5], problems[0][2][1][5]
    parts = order.parts(heads * vectors * LANES)
    size = heads * ((vectors + key_vectors) * LANES + 1)
    states = _states(count, len(parts), size, found.like)
    arrays = [_entries(x, count, like=found.like) for x in outs]
    shared_by = [1 if x is None else x.shape[-2 if k < 2 else -1] for k, x in enumerate(outs)]
    edges, work, ends = (order.ptr, order.col, order.edge), [], []
    for b, (problem, state) in enumerate(zip(problems, states, strict=True)):
        to = [(h, x[b]) for h, x in zip(shared_by, arrays, strict=True)]
        grad = (d_out[b], heads * vectors * LANES, *_shape(heads, heads, vectors), vectors)
        work += [
            (
                part, edges, heads, found.edges[b], found.stride, problem[2],
                _buffers(problem, 0, size + heads * key_vectors * LANES), grad, *to, which, state.sums[p], state.row[p],
            )
            for p, part in enumerate(parts)
        ]  # fmt: skip
        ends.append((heads, vectors * LANES, key_vectors * LANES, problem[2][6], *to, state.sums, state.row))
    cpu = _kernels()
    cpu.threads.each(work, lambda args: cpu.spread.gradients(*args))
    for args in ends if len(parts) > 1 else ():
        cpu.spread.join(*args)


class _Gradients:
    """The gradients of a call: what is asked of the kernels, and what they wrote."""

    def __init__(self, spec: Spec, given: Given, wanted: Given, count: int) -> None:
        self.spec, self.given, self.wanted, self.count = spec, given, wanted, count
        self.like = given.value
        tables = {name: ids.order for name, ids in zip(_TRAILING, spec.ids, strict=True) if ids.order is not None}
        self.tables = {name: order for name, order in tables.items() if getattr(wanted, name) is not None}
        self.tensors = {
            name: x.new_zeros(x.shape)
            for name, x in zip(Given._fields, wanted, strict=True)
            if x is not None and name not in tables and name != "vector"
        }
        batch = given.value.shape[:-3]
        self.arrays = {name: _entries(x, count, batch, _TRAILING.get(name)) for name, x in self.tensors.items()}
        self.shared = count > 1 and any(
            name in _TRAILING and x.shape[: -_TRAILING[name]].numel() < count for name, x in self.tensors.items()
        )
        activated = spec.cap != 0 or spec.kind in (ADDITIVE, ACTIVATED)
        self.stride = 3 if activated and "table" in self.tables else 2
        real = _real(self.like)
        self.edges = np.empty((count, len(spec.rows.col) * spec.heads * self.stride), real)
        dst, vector = given.dst, given.vector
        self.size_of_dst = 0 if dst is None else dst.shape[len(batch) + 1 :].numel()
        parts = len(spec.rows.parts(spec.heads * given.value.shape[-1])) if vector is not None else 0
        self.vector = np.zeros((max(count, 1), max(parts, 1), 0 if vector is None else vector.numel()), real)

    def array(self, name: str, b: int) -> Array:
        return self.arrays[name][b] if name in self.arrays else _nothing(_real(self.like))

    def wanted_by_row(self, b: int, part: int) -> tuple[Any, ...]:
        """`rows_backward.Wanted` for a part of an entry of the batch."""
        vector = self.vector[b, min(part, self.vector.shape[1] - 1)]
        on_edges = [self.array(name, b) for name in ("edge", "edge_value", "before", "bias")]
        return (self.edges[b], self.stride, self.array("dst", b), vector, *on_edges)

    def sums(self) -> Iterator[tuple[Order, tuple[Tensor | None, Tensor | None, Tensor | None], int]]:
        """What is added up by source, and by class: over which order of edges, into what, which of their numbers."""
        value, src = self.tensors.get("value"), self.tensors.get("src")
        if value is not None or src is not None:
            additive = self.spec.kind == ADDITIVE
            yield self.spec.columns(), (value, None if additive else src, src if additive else None), 1
        for name, order in self.tables.items():
            table = getattr(self.wanted, name)
            out = table.new_zeros(self.count, *_whole_vectors(table.shape, name))
            into = tuple(out if name == x else None for x in ("edge_value", "edge", "table"))
            yield order(), into, self.stride - 1  # type: ignore[misc]
            self.tensors[name] = out.sum(0)[..., : table.shape[-1]]

    def result(self) -> list[Tensor | None]:
        if self.wanted.vector is not None:
            self.tensors["vector"] = torch.from_numpy(self.vector.sum((0, 1))).view(self.wanted.vector.shape)
        return [
            None if x is None else self.tensors[name] if name in self.tensors else torch.zeros_like(x)
            for name, x in zip(Given._fields, self.wanted, strict=True)
        ]


def _whole_vectors(shape: torch.Size, name: str) -> tuple[int, ...]:
    """The shape of a table, its vectors filled up."""
    return tuple(shape) if name == "table" else (*shape[:-1], shape[-1] + -shape[-1] % LANES)


class _State(NamedTuple):
    """What parts have of the rows that they share with others: sums [parts, 2, size], and their rows, -1 for none."""

    sums: Array
    row: Array

    def add_to(self, out: Array) -> None:
        """Adds the sums to their rows of `out` [rows * size]."""
        size = self.sums.shape[-1]
        for row, sums in zip(self.row.ravel().tolist(), self.sums.reshape(-1, size), strict=True):
            if row >= 0 and len(out):
                out[row * size : (row + 1) * size] += sums


def _states(count: int, parts: int, size: int, like: Tensor) -> list[_State]:
    """One for each entry of a batch. A single part shares nothing, so its state takes nothing."""
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

    With `trailing` dimensions behind the batch, x may lack dimensions of it, or have 1 there: its entries repeat.
    """
    if x is None:
        assert like is not None
        return [_nothing(_real(like))] * count
    flat = x.detach().contiguous().numpy().reshape(-1)
    if count == 1:
        return [flat]
    leading = batch if trailing is None else x.shape[:-trailing]
    if trailing is None or leading.numel() == count:
        return list(flat.reshape(count, -1)) if count else []
    rows = flat.reshape(leading.numel(), -1)
    return [rows[k] for k in torch.arange(leading.numel()).view(leading).expand(batch).flatten().tolist()]


@lru_cache(maxsize=256)
def _shape(heads: int, given: int, vectors: int) -> tuple[Array, Array, Array]:
    """Where heads begin among the features of a node that has `given` of them, and for each vector of all heads, its
    head and where it begins."""
    start = np.arange(heads) * given // heads * vectors * LANES
    offset = start[:, None] + np.arange(vectors) * LANES
    return start, np.repeat(np.arange(heads), vectors), offset.reshape(-1)


def _buffers(problem: Problem, each: int, more: int) -> Any:
    """`scores.Buffers` for one call, with so many numbers for each edge of a block, and so many others."""
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
    vector = _nothing(real) if given.vector is None else given.vector.detach().contiguous().numpy().reshape(-1)
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
    graph = (spec.rows.ptr, spec.rows.col)
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
    """`layout.EdgeVectors` but for their data and ids."""
    given, width = (1, 0) if x is None else x.shape[-2:]
    start, _, offset = _shape(heads, given, vectors)
    return given, width, given * max(vectors, 1) * LANES, start, offset
