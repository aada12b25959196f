"""Sums, means, extremes and spreads along the rows of a sparse graph, and their gradients: one pass, nothing of E x D.

Work is cut into parts of equally many edges, wherever their borders fall within rows, so that one hub does not hold up
a core. Rows that begin in a part are written in place; what a part has of the row that began before it goes to a buffer
of its own, and `join` adds those up afterwards, always in the same order. Gradients of sources go by the transposed
graph. No atomics: results are the same on every run and for every number of threads.

Arrays are flat and contiguous; absent ones are empty. Features are [nodes, heads * width], weights [E, heads].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpnn.kernels.cpu.caching import njit
from mpnn.kernels.cpu.fold import BYTES, PARTLY, fetch_row, fold, spread
from mpnn.kernels.cpu.vector import MATH

BLOCK = 32  # edges whose features stay in the cache nearest the core
_WEIGHTS_AHEAD = 64  # edges, by which weights are fetched early that lie in another order
_ROWS_AHEAD = 4  # rows, by which results are fetched early that lie in another order
_LINE = 64  # bytes of a cache line
_WIDE, _TWO = (0,) * 8, (0,) * 2  # vectors that are taken at once


class Walk(NamedTuple):
    """Rows in the order of the walk: row r has the edges `ptr[r]` to `ptr[r + 1]`.

    Each edge has its neighbour `col` and its number `edge`, each row the node `node`; both may be absent where they
    would only count up.
    """

    ptr: NDArray[np.int64]
    col: NDArray[np.int32]
    edge: NDArray[np.int64]
    node: NDArray[np.int64]


@njit(inline="always")
def _stage(weight, edge, first, n, heads, factor, staged):  # type: ignore[no-untyped-def]
    """The weights of n edges, each times `factor`, into `staged` [n * heads]."""
    for e in range(n):
        if len(edge):
            fetch_row(weight, edge[min(first + e + _WEIGHTS_AHEAD, len(edge) - 1)] * heads, heads)
        at = (edge[first + e] if len(edge) else first + e) * heads
        for h in range(heads):
            staged[e * heads + h] = weight[at + h] * factor


@njit(inline="always")
def _fold_row(  # type: ignore[no-untyped-def]
    begin, end, own_at, out_at, factor, scale, col, edge, x, size, weight, heads, staged, own, out, count, kind
):
    """Folds the edges `begin` to `end` into `out[out_at : out_at + size]`, block by block."""
    lanes = BYTES // x.itemsize
    width = size // heads
    last = len(col) - 1
    if begin == end:
        for d in range(size):
            out[out_at + d] = 0
    for b in range(begin, end, BLOCK):
        n = min(BLOCK, end - b)
        if len(weight):
            _stage(weight, edge, b, n, heads, factor, staged)
        begins, times = b == begin, scale if b + n == end else x.dtype.type(1)
        lines = (size * x.itemsize + _LINE - 1) // _LINE
        for h in range(heads):
            d, stop = h * width, (h + 1) * width
            while d < stop:
                here, mine = out_at + d, own_at + d
                if d + len(_WIDE) * lanes <= stop:
                    fold(
                        x, d, size, lines, col, b, n, last, staged, h, heads, own, mine, out, here, count, begins,
                        times, 0, kind, _WIDE,
                    )  # fmt: skip
                    d += len(_WIDE) * lanes
                elif d + len(_TWO) * lanes <= stop:
                    fold(
                        x, d, size, lines, col, b, n, last, staged, h, heads, own, mine, out, here, count, begins,
                        times, 0, kind, _TWO,
                    )  # fmt: skip
                    d += len(_TWO) * lanes
                else:
                    fold(
                        x, d, size, lines, col, b, n, last, staged, h, heads, own, mine, out, here, count, begins,
                        times, min(lanes, stop - d), kind, PARTLY,
                    )  # fmt: skip
                    d += lanes
                lines = 0


@njit(fastmath=MATH, error_model="numpy", cache=True, nogil=True)
def forward(  # type: ignore[no-untyped-def]
    part, walk, x, size, weight, heads, factor, mean, own, out, count, kind
):
    """Folds rows into `out` [rows, size]: what `kind` says of the messages `weight_e * x_j`.

    `mean`: divided by the number of edges. `factor` -1 turns the largest into the smallest. SQUARES are about `own`
    [rows, size]. `part` is (first edge, last edge, first row, last row, whether `out` holds all rows or one alone).
    """
    first, last, first_row, last_row, in_place = part
    ptr, col, edge, node = walk
    one = x.dtype.type(1)
    staged = np.full(BLOCK * heads, factor)
    for r in range(first_row, last_row):
        if len(node):
            fetch_row(out, node[min(r + _ROWS_AHEAD, len(node) - 1)] * size, size)
        at = (node[r] if len(node) else r) * size
        scale = x.dtype.type(one / max(ptr[r + 1] - ptr[r], 1)) if mean else factor
        _fold_row(
            max(ptr[r], first), min(ptr[r + 1], last), at, at if in_place else 0, factor, scale, col, edge, x, size,
            weight, heads, staged, own, out, count, kind,
        )  # fmt: skip


@njit(inline="always")
def _spread_row(  # type: ignore[no-untyped-def]
    begin, end, own_at, out_at, col, edge, d_out, other, size, weight, d_weight, heads, staged, dot, own, out, kind,
    dots,
):  # fmt: skip
    lanes = BYTES // out.itemsize
    width = size // heads
    last = len(col) - 1
    if begin == end:
        for d in range(size):
            out[out_at + d] = 0
    for b in range(begin, end, BLOCK):
        n = min(BLOCK, end - b)
        if len(weight):
            _stage(weight, edge, b, n, heads, out.dtype.type(1), staged)
        if len(dots):
            dot[:] = 0
        begins = b == begin
        lines = (size * out.itemsize + _LINE - 1) // _LINE
        for h in range(heads):
            d, stop = h * width, (h + 1) * width
            while d < stop:
                here, mine = out_at + d, own_at + d
                if d + len(_WIDE) * lanes <= stop:
                    spread(
                        d_out, other, d, size, lines, col, b, n, last, staged, dot, h, heads, own, mine, out, here,
                        begins, 0, kind, dots, _WIDE,
                    )  # fmt: skip
                    d += len(_WIDE) * lanes
                elif d + len(_TWO) * lanes <= stop:
                    spread(
                        d_out, other, d, size, lines, col, b, n, last, staged, dot, h, heads, own, mine, out, here,
                        begins, 0, kind, dots, _TWO,
                    )  # fmt: skip
                    d += len(_TWO) * lanes
                else:
                    spread(
                        d_out, other, d, size, lines, col, b, n, last, staged, dot, h, heads, own, mine, out, here,
                        begins, min(lanes, stop - d), kind, dots, PARTLY,
                    )  # fmt: skip
                    d += lanes
                lines = 0
        if len(dots):
            for e in range(n):
                at = (edge[b + e] if len(edge) else b + e) * heads
                for h in range(heads):
                    d_weight[at + h] = dot[e * heads + h]


@njit(fastmath=MATH, error_model="numpy", cache=True, nogil=True)
def backward(  # type: ignore[no-untyped-def]
    part, walk, d_out, other, size, weight, d_weight, heads, own, out, kind, dots
):
    """The gradient of the features `own` [rows, size] into `out`, by the transposed graph, and that of the weights into
    `d_weight` [E, heads] if `dots` is not ().

    `d_out` [columns, size], divided among equal extremes before, or times 2 / n for SQUARES; `other` [columns, size]:
    the extremes, or the means.
    """
    first, last, first_row, last_row, in_place = part
    ptr, col, edge, node = walk
    staged, dot = np.ones(BLOCK * heads, out.dtype), np.zeros(BLOCK * heads, out.dtype)
    for r in range(first_row, last_row):
        at = (node[r] if len(node) else r) * size
        _spread_row(
            max(ptr[r], first), min(ptr[r + 1], last), at, at if in_place else 0, col, edge, d_out, other, size, weight,
            d_weight, heads, staged, dot, own, out, kind, dots,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def join(parts, walk, size, factor, extreme, out, count, piece, piece_count):  # type: ignore[no-untyped-def]
    """Puts the pieces [parts, size] of rows that parts share into `out` [rows, size]: sums, or what is `extreme`, with
    how many are equal to it in `count` if that is not absent."""
    ptr, _, _, node = walk
    for p in range(len(parts)):
        first, _, row, _ = parts[p]
        if first == ptr[row]:
            continue
        to = (node[row - 1] if len(node) else row - 1) * size
        for d in range(size):
            x, so_far = piece[p, d], out[to + d]
            if not extreme:
                out[to + d] = so_far + x
                continue
            larger = x * factor > so_far * factor
            if len(count):
                if larger:
                    count[to + d] = piece_count[p, d]
                elif x == so_far:
                    count[to + d] += piece_count[p, d]
            if larger or x != x:
                out[to + d] = x
