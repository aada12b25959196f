"""Aggregation along the rows of a sparse graph, as a differentiable function of tensors; on CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.kernels.memory import empty
from mpnn.kernels.once_differentiable import once_differentiable

Array = NDArray[Any]
Scalar = Callable[[float, float], float]

KINDS = ("sum", "mean", "max", "min", "var")
_PARTS = 16  # at most; independent of the number of threads, so that results are too
_LEAST = 1 << 18  # components per part


@dataclass(frozen=True)
class Associative:
    """`combine(a, b)` of two numbers, associative and commutative; `combine(identity, m)` is m. `gradient(m, out)` is
    the derivative of a row's result `out` by one of its messages m, or None if there is no backward pass."""

    combine: Scalar
    identity: float
    gradient: Scalar | None


@dataclass(frozen=True, eq=False)
class Walk:
    """The rows of a graph in the order in which kernels process them: `arrays` as `mpnn.kernels.cpu.reduce.Walk`."""

    arrays: tuple[Array, ...]

    @property
    def num_rows(self) -> int:
        return len(self.arrays[0]) - 1

    @cached_property
    def degree(self) -> Tensor:
        """The number of edges of each row, at least 1, [rows, 1]."""
        ptr, _, _, node = self.arrays
        degree = np.maximum(np.diff(ptr), 1)
        if len(node):
            degree[node] = degree.copy()
        return torch.from_numpy(degree)[:, None]

    def parts(self, size: int) -> list[tuple[int, int, int, int]]:
        """Splits the edges into parts of equal size: (first edge, last edge, first row that begins there, last row).

        If there are edges, no part is empty: an empty part would have no extreme to join with the others.
        """
        ptr, col = self.arrays[:2]
        edges = len(col)
        count = max(1, min(_PARTS, edges, edges * size // _LEAST))
        if count == 1:
            return [(0, edges, 0, self.num_rows)]
        cuts = [edges * p // count for p in range(count + 1)]
        rows = [0, *np.searchsorted(ptr, cuts[1:-1]).tolist(), self.num_rows]
        return list(zip(cuts[:-1], cuts[1:], rows[:-1], rows[1:], strict=True))


class RowReduce(torch.autograd.Function):
    """`RowReduce.apply(value, weight, rows, columns, kind)` -> out [B, N_dst, H * D].

    value [B, N_src, H * D], float32 or float64, contiguous; weight [B or 1, E, H], contiguous, in the caller's edge
    order, or None for ones; `rows` is the walk by destination, `columns` the walk by source, or None if there is no
    backward pass. `kind` is one of KINDS, or an `Associative`.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, value: Tensor, weight: Tensor | None, rows: Walk, columns: Walk | None, kind: str | Associative
    ) -> Tensor:
        ctx.rows, ctx.columns, ctx.kind = rows, columns, kind
        compared = count = None
        if kind == "var":
            compared, _ = _fold(value, weight, rows, "mean")
        out, count = _fold(value, weight, rows, kind, compared, counted=columns is not None)
        if kind in ("sum", "mean"):
            value = value if weight is not None and weight.requires_grad else None
        elif compared is None:
            compared = out
        ctx.save_for_backward(value, weight, compared, count)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        value, weight, compared, count = ctx.saved_tensors
        rows, columns, kind = ctx.rows, ctx.columns, ctx.kind
        if columns is None:
            raise RuntimeError("this was planned without gradients; run it again with gradients enabled")
        if kind == "mean":
            count = rows.degree.to(d_out.dtype)
        elif kind == "var":
            count = rows.degree.to(d_out.dtype) / 2
        if count is not None:
            d_out = torch.div(d_out, count, out=empty(d_out, *d_out.shape))
        d_out = d_out.contiguous()
        if value is None:
            d_value, d_weight = _fold(d_out, weight, columns, "sum")[0], None
        else:
            with_weight = weight is not None and ctx.needs_input_grad[1]
            d_value, d_weight = _spread(d_out, compared, value, weight, columns, kind, with_weight)
        return d_value, d_weight, None, None, None


def _fold(
    value: Tensor,
    weight: Tensor | None,
    walk: Walk,
    kind: str | Associative,
    own: Tensor | None = None,
    counted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The results of rows [B, rows, size], and the number of messages equal to each extreme if `counted`."""
    out = empty(value, value.shape[0], walk.num_rows, value.shape[2])
    count = empty(out, *out.shape) if counted and kind in ("max", "min") else None
    if out.numel():
        for b in range(len(value)):
            x, w, mine, o, c = (_entry(t, b, value) for t in (value, weight, own, out, count))
            if isinstance(kind, Associative):
                _combine_one(x, w, o, value.shape[2], _heads(weight), walk, kind)
            else:
                _fold_one(x, w, mine, o, c, value.shape[2], _heads(weight), walk, kind)
    return out, count


def _fold_one(
    x: Array, weight: Array, own: Array, out: Array, count: Array, size: int, heads: int, walk: Walk, kind: str
) -> None:
    from mpnn.kernels.cpu import fold, reduce

    parts, real = walk.parts(size), x.dtype.type
    shape = {"sum": fold.SUM, "mean": fold.SUM, "var": fold.SQUARES}.get(kind, fold.EXTREME)
    shape = fold.COUNTED if len(count) else shape
    factor, mean = real(-1 if kind == "min" else 1), kind in ("mean", "var")
    shared = walk.arrays, x, size, weight, heads, factor, mean, own
    pieces = np.empty((2, len(parts), size if len(parts) > 1 else 0), x.dtype)
    _run_parts(parts, walk, lambda part, *into: reduce.forward(part, *shared, *into, shape), (out, count), pieces)
    if len(parts) > 1:
        reduce.join(np.array(parts), walk.arrays, size, factor, kind in ("max", "min"), out, count, *pieces)


def _combine_one(x: Array, weight: Array, out: Array, size: int, heads: int, walk: Walk, kind: Associative) -> None:
    from mpnn.kernels.cpu import combine

    parts, code = walk.parts(size), combine.compiled(kind.combine, kind.gradient, x.dtype)
    shared = walk.arrays, x, size, weight, heads, x.dtype.type(kind.identity)
    pieces = np.empty((1, len(parts), size if len(parts) > 1 else 0), x.dtype)
    _run_parts(parts, walk, lambda part, into: code.forward(part, *shared, into), (out,), pieces)
    if len(parts) > 1:
        code.join(np.array(parts), walk.arrays, size, out, *pieces)


def _run_parts(
    parts: list[tuple[int, int, int, int]],
    walk: Walk,
    kernel: Callable[..., None],
    out: tuple[Array, ...],
    pieces: Array,
) -> None:
    """Runs the kernel on all parts. Rows that begin in a part are written to `out`; the part's share of the row before
    is written to `pieces`."""
    from mpnn.kernels.cpu import threads

    ptr = walk.arrays[0]

    def run(p: int) -> None:
        first, last, row, stop = parts[p]
        if first < ptr[row]:
            kernel((first, last, row - 1, row, False), *pieces[:, p])
        kernel((first, last, row, stop, True), *out)

    threads.each(range(len(parts)), run)


def _spread(
    d_out: Tensor,
    compared: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    walk: Walk,
    kind: str | Associative,
    with_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the value and, if `with_weight`, of the weight."""
    d_value = empty(value, *value.shape)
    d_weight = torch.zeros_like(weight) if with_weight and weight is not None else None
    if d_value.numel():
        for b in range(len(value)):
            g, r, w, x, d = (_entry(t, b, value) for t in (d_out, compared, weight, value, d_value))
            d_w = np.empty_like(w) if d_weight is not None else w[:0]
            _spread_one(g, r, w, d_w, x, d, value.shape[2], _heads(weight), walk, kind)
            if d_weight is not None:
                d_weight[b if len(d_weight) > 1 else 0] += torch.from_numpy(d_w).view(d_weight.shape[1:])
    return d_value, d_weight


def _spread_one(
    d_out: Array,
    compared: Array,
    weight: Array,
    d_weight: Array,
    own: Array,
    out: Array,
    size: int,
    heads: int,
    walk: Walk,
    kind: str | Associative,
) -> None:
    from mpnn.kernels.cpu import combine, fold, reduce

    parts = walk.parts(size)
    shared = walk.arrays, d_out, compared, size, weight, d_weight, heads, own
    pieces = np.empty((1, len(parts), size if len(parts) > 1 else 0), own.dtype)
    if isinstance(kind, Associative):
        code = combine.compiled(kind.combine, kind.gradient, own.dtype)
        _run_parts(parts, walk, lambda part, into: code.backward(part, *shared, into), (out,), pieces)
    else:
        shape = {"sum": fold.SUM, "mean": fold.SUM, "var": fold.SQUARES}.get(kind, fold.EXTREME)
        dots = (0,) if len(d_weight) else ()
        _run_parts(parts, walk, lambda part, into: reduce.backward(part, *shared, into, shape, dots), (out,), pieces)
    if len(parts) > 1:
        one, none = own.dtype.type(1), out[:0]
        reduce.join(np.array(parts), walk.arrays, size, one, False, out, none, pieces[0], pieces[0])


def _heads(weight: Tensor | None) -> int:
    return 1 if weight is None else weight.shape[-1]


def _entry(x: Tensor | None, b: int, like: Tensor) -> Array:
    """Entry b of the batch, flat; the only entry if there is one; empty for None."""
    if x is None:
        return torch.empty(0, dtype=like.dtype).numpy()
    return x.detach().resolve_neg()[b if len(x) > 1 else 0].view(-1).numpy()
