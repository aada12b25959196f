"""Aggregation by a user's own `combine(a, b)`, compiled into the same walk along rows as `mpnn.kernels.cpu.reduce`.

Number by number rather than in vectors of our own: what can be vectorised of a function we do not know is the
compiler's to find. Compiled once for each function in a process; the functions of a user have no place in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.core.errors import NumbaError

from mpnn.kernels.cpu.fold import AHEAD, fetch_row
from mpnn.kernels.cpu.vector import MATH


class Compiled(NamedTuple):
    forward: Callable[..., None]
    backward: Callable[..., None]
    join: Callable[..., None]


@lru_cache(maxsize=128)
def compiled(combine: Callable[..., float], gradient: Callable[..., float] | None, dtype: np.dtype) -> Compiled:
    """Kernels with these functions of two numbers inside.

    Raises:
        TypeError: numba cannot compile one of them.
    """
    put_together = _scalar("combine", combine, dtype)
    slope = put_together if gradient is None else _scalar("gradient", gradient, dtype)

    @njit(inline="always")
    def fold_row(begin, end, at, col, edge, x, size, weight, heads, identity, out):  # type: ignore[no-untyped-def]
        width = size // heads
        for d in range(size):
            out[at + d] = identity if begin < end else 0
        for e in range(begin, end):
            fetch_row(x, np.int64(col[min(e + AHEAD, len(col) - 1)]) * size, size)
            source = np.int64(col[e]) * size
            to = (edge[e] if len(edge) else e) * heads
            for h in range(heads):
                w = weight[to + h] if len(weight) else x.dtype.type(1)
                for d in range(h * width, (h + 1) * width):
                    out[at + d] = put_together(out[at + d], w * x[source + d])

    @njit(fastmath=MATH, error_model="numpy", nogil=True)
    def forward(part, walk, x, size, weight, heads, identity, out):  # type: ignore[no-untyped-def]
        first, last, first_row, last_row, in_place = part
        ptr, col, edge, node = walk
        for r in range(first_row, last_row):
            at = (node[r] if len(node) else r) * size if in_place else 0
            begin, end = max(ptr[r], first), min(ptr[r + 1], last)
            fold_row(begin, end, at, col, edge, x, size, weight, heads, identity, out)

    @njit(inline="always")
    def spread_row(  # type: ignore[no-untyped-def]
        begin, end, own_at, at, col, edge, d_out, other, size, weight, d_weight, heads, own, out
    ):
        width = size // heads
        for d in range(size):
            out[at + d] = 0
        for e in range(begin, end):
            ahead = np.int64(col[min(e + AHEAD, len(col) - 1)]) * size
            fetch_row(d_out, ahead, size)
            fetch_row(other, ahead, size)
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

    @njit(fastmath=MATH, error_model="numpy", nogil=True)
    def backward(  # type: ignore[no-untyped-def]
        part, walk, d_out, other, size, weight, d_weight, heads, own, out
    ):
        first, last, first_row, last_row, in_place = part
        ptr, col, edge, node = walk
        for r in range(first_row, last_row):
            own_at = (node[r] if len(node) else r) * size
            at, begin, end = own_at if in_place else 0, max(ptr[r], first), min(ptr[r + 1], last)
            spread_row(begin, end, own_at, at, col, edge, d_out, other, size, weight, d_weight, heads, own, out)

    @njit(nogil=True)
    def join(parts, walk, size, out, piece):  # type: ignore[no-untyped-def]
        ptr, _, _, node = walk
        for p in range(len(parts)):
            first, _, row, _ = parts[p]
            if first < ptr[row]:
                to = (node[row - 1] if len(node) else row - 1) * size
                for d in range(size):
                    out[to + d] = put_together(out[to + d], piece[p, d])

    return Compiled(forward, backward, join)


def _scalar(name: str, function: Callable[..., float], dtype: np.dtype) -> Any:
    number = types.float32 if dtype == np.float32 else types.float64
    inner = njit(function)
    try:
        inner.compile((number, number))
    except NumbaError as error:
        raise TypeError(
            f"{name} must be a function of two numbers that numba can compile, made of arithmetic, comparisons and the "
            f"math module; {function!r} is not: {error}"
        ) from error
    return inner
