"""Aggregation by a user's own `combine(a, b)`, compiled by numba into a loop along the rows of a sparse graph.

Needs numba: pip install numba. Kernels are compiled once for each function in a process, which
takes some seconds and is logged once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpnn.kernels.cpu import threads
from mpnn.kernels.rows.rows import Chunks, Rows

Scalar = Callable[..., float]

_MATH = {"contract", "reassoc", "nsz", "arcp", "afn"}  # fast, but NaN and infinities pass through
_COUNTS = {1: "one number", 2: "two numbers"}
_NO_EDGES = np.empty(0, np.int64)


@dataclass(frozen=True)
class Associative:
    """`combine(a, b)` of two numbers, associative and commutative; `combine(identity, m)` is m. `gradient(m, out)` is
    the derivative of a row's result `out` by one of its messages m, or None if there is no backward pass. `lift(m)` is
    what is combined of a message, None for the message itself. If `shares_ties`, the messages whose lift equals the
    result share the gradient."""

    combine: Scalar
    identity: float
    gradient: Scalar | None
    lift: Scalar | None = None
    shares_ties: bool = False


def why_missing() -> str | None:
    """The reason why no kernel can be compiled, or None."""
    if find_spec("numba") is None:
        return "compiling combine(a, b) needs numba: pip install numba"
    return None


def forward(kind: Associative, value: Tensor, weight: Tensor | None, chunks: Chunks, out: Tensor) -> None:
    """Combines the messages weight * value of each row into out [B, rows, size]."""
    code = _compiled(kind, value)
    _each_entry(code.forward, code.join, chunks, out, weight, value, out)


def ties(kind: Associative, value: Tensor, weight: Tensor | None, chunks: Chunks, out: Tensor) -> Tensor:
    """How many messages of each row have a lift that equals the result, at least 1, [B, rows, size]."""
    count = torch.zeros_like(out)
    _each_entry(_compiled(kind, value).ties, _add, chunks, count, weight, value, out)
    return count.clamp_(min=1)


def backward(
    kind: Associative,
    d_out: Tensor,
    compared: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    chunks: Chunks,
    d_value: Tensor,
    d_weight: Tensor | None,
) -> None:
    """Writes the gradients of the value [B, columns, size] and, unless d_weight is None, of the weights [B, E, H]."""
    _each_entry(_compiled(kind, value).backward, _add, chunks, d_value, weight, d_out, compared, d_weight, value)


def _each_entry(
    loop: Callable[..., None],
    join: Callable[..., None],
    chunks: Chunks,
    out: Tensor,
    weight: Tensor | None,
    *operands: Tensor | None,
) -> None:
    """Runs a loop on each part of the rows of each entry of the batch, of out and operands [B, rows, size]."""
    size = out.shape[2]
    heads = 1 if weight is None else weight.shape[-1]
    for b in range(len(out)):
        read = [_entry(x, b, out) for x in (weight, *operands)]
        shared = (*_arrays(chunks.rows), size, heads, *read)
        _each_part(chunks, out[b], lambda span, to, shared=shared: loop(*span, *shared, to), join)


def _each_part(
    chunks: Chunks, out: Tensor, run: Callable[[tuple[Any, ...], Any], None], join: Callable[..., None]
) -> None:
    """Runs `run((first edge, last edge, first row, last row, in place), target)` on each part. Rows that begin in a
    part are written to `out` [rows, size]; its share of the row before is joined afterwards."""
    rows = chunks.rows
    ptr = chunks.rows.ptr.numpy()
    cuts = chunks.cuts.tolist()
    # A row belongs to the part in which it begins.
    starts = [0, *np.searchsorted(ptr, cuts[1:-1]).tolist(), rows.num_rows]
    shared = [k for k in range(len(chunks)) if cuts[k] < ptr[starts[k]]]
    # Threads write these pieces side by side and never into the same row, so that nothing is locked.
    target = out.view(-1).numpy()
    pieces = {k: np.empty(out.shape[1], out.numpy().dtype) for k in shared}

    def work(k: int) -> None:
        if k in pieces:
            run((cuts[k], cuts[k + 1], starts[k] - 1, starts[k], False), pieces[k])
        run((cuts[k], cuts[k + 1], starts[k], starts[k + 1], True), target)

    threads.each(range(len(chunks)), work)
    # The order is that of the chunks, whichever thread was first, so that results have the same bits.
    for k in shared:
        node = starts[k] - 1 if rows.node is None else int(rows.node[starts[k] - 1])
        join(out[node].numpy(), pieces[k])


def _add(out: Any, piece: Any) -> None:
    out += piece


def _arrays(rows: Rows) -> tuple[Any, ...]:
    edge, node = (_NO_EDGES if x is None else x.numpy() for x in (rows.edge, rows.node))
    return rows.ptr.numpy(), rows.col.numpy(), edge, node


def _entry(x: Tensor | None, b: int, like: Tensor) -> Any:
    """Entry b of the batch, flat; the only entry if there is one; empty for None."""
    if x is None:
        return torch.empty(0, dtype=like.dtype).numpy()
    return x[b if len(x) > 1 else 0].reshape(-1).numpy()


class _Kernels(NamedTuple):
    forward: Callable[..., None]
    ties: Callable[..., None]
    backward: Callable[..., None]
    join: Callable[..., None]


def _compiled(kind: Associative, like: Tensor) -> _Kernels:
    return _kernels(kind.combine, kind.identity, kind.gradient, kind.lift, like.dtype == torch.float32)


@cache
def _announce() -> None:
    logging.getLogger("mpnn").info("numba compiles kernels for a combine(a, b), once in this process")


@lru_cache(maxsize=128)
def _kernels(combine: Scalar, identity: float, gradient: Scalar | None, lift: Scalar | None, single: bool) -> _Kernels:
    """Kernels with these functions of numbers inside.

    Raises:
        TypeError: numba cannot compile one of them.
    """
    import numba

    _announce()
    njit = partial(numba.njit, fastmath=_MATH, error_model="numpy", nogil=True)
    merge = _scalar("combine", combine, single)
    # Without a gradient the backward kernel is never called, but numba needs a function to compile.
    slope = merge if gradient is None else _scalar("gradient", gradient, single)
    raised = _scalar("lift", _itself if lift is None else lift, single, numbers=1)

    start = np.float32(identity) if single else identity

    def folded(first_of_row: Any, fold: Any, of_message: Any) -> Callable[..., None]:
        """A loop that folds a function of the messages of each row, and of the row's result."""

        @njit()
        def loop(  # type: ignore[no-untyped-def]
            first, last, top, bottom, in_place, ptr, col, edge, node, size, heads, weight, x, results, out
        ):
            width = size // heads
            for r in range(top, bottom):
                own_at = (node[r] if len(node) else r) * size
                at = own_at if in_place else 0
                begin = max(ptr[r], first)
                end = min(ptr[r + 1], last)
                for d in range(size):
                    # A row without messages is 0, as everywhere, and not the identity, which may be infinite.
                    out[at + d] = first_of_row if begin < end else 0
                for e in range(begin, end):
                    source = np.int64(col[e]) * size
                    to = (edge[e] if len(edge) else e) * heads
                    for h in range(heads):
                        w = weight[to + h] if len(weight) else x.dtype.type(1)
                        for d in range(h * width, (h + 1) * width):
                            out[at + d] = fold(out[at + d], of_message(w * x[source + d], results[own_at + d]))

        return loop

    forward = folded(start, merge, njit()(lambda message, result: raised(message)))
    ties = folded(0, njit()(lambda a, b: a + b), njit()(lambda message, result: raised(message) == result))

    @njit()
    def backward(  # type: ignore[no-untyped-def]
        first, last, top, bottom, in_place, ptr, col, edge, node, size, heads, weight, d_out, other, d_weight, own, out
    ):
        width = size // heads
        for r in range(top, bottom):
            own_at = (node[r] if len(node) else r) * size
            at = own_at if in_place else 0
            for d in range(size):
                out[at + d] = 0
            for e in range(max(ptr[r], first), min(ptr[r + 1], last)):
                source = np.int64(col[e]) * size
                to = (edge[e] if len(edge) else e) * heads
                for h in range(heads):
                    w = weight[to + h] if len(weight) else out.dtype.type(1)
                    total = out.dtype.type(0)
                    for d in range(h * width, (h + 1) * width):
                        t = d_out[source + d] * slope(w * own[own_at + d], other[source + d])
                        out[at + d] += w * t
                        total += t * own[own_at + d]
                    if len(d_weight):
                        d_weight[to + h] = total

    @njit()
    def join(out, piece):  # type: ignore[no-untyped-def]
        for d in range(len(piece)):
            out[d] = merge(out[d], piece[d])

    return _Kernels(forward, ties, backward, join)


def _itself(message: float) -> float:
    return message


def _scalar(name: str, function: Scalar, single: bool, numbers: int = 2) -> Any:
    from numba import njit, types
    from numba.core.errors import NumbaError

    number = types.float32 if single else types.float64
    compiled = njit(function)
    try:
        compiled.compile((number,) * numbers)
    except NumbaError as error:
        raise TypeError(
            f"{name} must be a function of {_COUNTS[numbers]} that numba can compile, made of arithmetic, comparisons "
            f"and the math module; {function!r} is not: {error}"
        ) from error
    return compiled
