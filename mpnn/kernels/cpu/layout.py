"""How kernels that walk a sparse graph are given their numbers, and how a block of edges finds its own.

Arguments come in groups, as plain tuples (numba looks at those fastest), and are named in the kernels by the tuples
here. Arrays are flat and contiguous; absent ones are empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from mpnn.kernels.cpu.emit import INNER, LANES

Ints = NDArray[np.int64]
Reals = NDArray[np.floating]
AHEAD = 8  # edges, by which features are fetched early
BEGUN, UNENDED = 0, 1  # the two rows that a part may share with others, where its state is
KERNEL: Any = {**INNER, "cache": True}


class Rows(NamedTuple):
    """A graph by destination, by source, or by class of edge: row r has the edges `ptr[r]` to `ptr[r + 1]`.

    `col` is the node at the other end of each, by class the destination; `edge` its place in the order of destinations,
    empty where this is that order.
    """

    ptr: Ints
    col: Ints
    edge: Ints


@njit(inline="always")
def place(edge, ids, e):  # type: ignore[no-untyped-def]
    """Where edge e of some rows has its own among what the caller gave for each edge, or each class."""
    e = edge[e] if len(edge) else e
    return ids[e] if len(ids) else e


class Features(NamedTuple):
    """Vectors of nodes, by head, padded with zeros to whole vectors; heads may share them.

    Those of node i are the `size` numbers from `data[i * size]` on. `start[h]` says where the features of head h begin
    among them; `head` and `offset` name, for each vector of all heads, its head and where it begins.
    """

    data: Reals
    size: int
    start: Ints
    head: Ints
    offset: Ints
    vectors: int


class EdgeVectors(NamedTuple):
    """Vectors of edges as the caller has them, not padded: edge e has `data[ids[e]]`, [heads, width], heads 1 or all.

    Without ids, `data[e]`. They are staged block by block, padded to `size` numbers; `start` and `offset` are as in
    Features.
    """

    data: Reals
    ids: Ints
    heads: int
    width: int
    size: int
    start: Ints
    offset: Ints


class EdgeNumbers(NamedTuple):
    """A number for each edge and head: `data[ids[e]]`, [heads], heads 1 or all; without ids, `data[e]`."""

    data: Reals
    ids: Ints
    heads: int


class Dropout(NamedTuple):
    """Keys by head (none: no dropout), the threshold below which a draw drops, what kept weights are multiplied by."""

    keys: NDArray[np.uint32]
    threshold: np.uint32
    grow: float


@njit(inline="always")
def block_size(heads):  # type: ignore[no-untyped-def]
    """Edges in a block: a multiple of 8, so few that scores and features stay in cache."""
    return max(8, min(64, 1024 // heads // 8 * 8))


@njit(inline="always")
def block_room(heads):  # type: ignore[no-untyped-def]
    """How many edges have room in a block's buffers."""
    return block_size(heads) + AHEAD + LANES


@njit(**INNER)
def segments(first, n, row, ptr, seg_row, seg_first):  # type: ignore[no-untyped-def]
    """Cuts the n edges from `first` on, which begin in `row`, by row; returns the number of pieces.

    Piece k has the edges `seg_first[k]` to `seg_first[k + 1]` of the block, all in row `seg_row[k]`.
    """
    count = 0
    e = 0
    while e < n:
        while ptr[row + 1] <= first + e:
            row += 1
        seg_row[count] = row
        seg_first[count] = e
        e = min(n, ptr[row + 1] - first)
        count += 1
    seg_first[count] = n
    return count


@njit(**INNER)
def by_column(first, n, col, size, at):  # type: ignore[no-untyped-def]
    """Where the features of each edge's other end begin, for n edges and the few after them that are read early."""
    end = len(col) - first
    for e in range(min(n + AHEAD + LANES, end)):
        at[e] = col[first + e] * size
    for e in range(end, n + AHEAD + LANES):
        at[e] = at[end - 1]


@njit(**INNER)
def by_row(count, seg_row, seg_first, size, at):  # type: ignore[no-untyped-def]
    """Where the features of each edge's row begin; the edges up to the next multiple of 8 read the last one's."""
    for k in range(count):
        for e in range(seg_first[k], seg_first[k + 1]):
            at[e] = seg_row[k] * size
    n = seg_first[count]
    for e in range(n, n + LANES):
        at[e] = at[n - 1]


@njit(**INNER)
def evenly(size, at):  # type: ignore[no-untyped-def]
    """Offsets of things that lie one after the other."""
    for e in range(len(at)):
        at[e] = e * size


@njit(**INNER)
def _staged(data, edge, ids, heads, width, padded, first, n, stage):  # type: ignore[no-untyped-def]
    for e in range(n):
        at = place(edge, ids, first + e) * heads * width
        for h in range(heads):
            for d in range(width):
                stage[(e * heads + h) * padded + d] = data[at + h * width + d]


@njit(inline="always")
def staged(edges, edge, first, n, stage):  # type: ignore[no-untyped-def]
    """Puts the vectors of n edges into `stage`, which was zero and stays so beyond their width."""
    _staged(edges.data, edge, edges.ids, edges.heads, edges.width, edges.size // edges.heads, first, n, stage)


@njit(**INNER)
def _unstaged(edge, ids, heads, width, padded, first, n, stage, out):  # type: ignore[no-untyped-def]
    for e in range(n):
        at = place(edge, ids, first + e) * heads * width
        for h in range(heads):
            for d in range(width):
                out[at + h * width + d] += stage[(e * heads + h) * padded + d]
                stage[(e * heads + h) * padded + d] = 0


@njit(inline="always")
def unstaged(edges, edge, first, n, stage, out):  # type: ignore[no-untyped-def]
    """Adds what `stage` holds to `out`, laid out as `edges.data`, and clears it."""
    _unstaged(edge, edges.ids, edges.heads, edges.width, edges.size // edges.heads, first, n, stage, out)


@njit(**INNER)
def _add_numbers(data, edge, ids, given, first, n, heads, s):  # type: ignore[no-untyped-def]
    for e in range(n):
        at = place(edge, ids, first + e) * given
        for h in range(heads):
            s[e * heads + h] += data[at + (h if given == heads else 0)]


@njit(inline="always")
def add_numbers(numbers, edge, first, n, heads, s):  # type: ignore[no-untyped-def]
    """Adds the numbers of n edges to s [n * heads]."""
    if len(numbers.data):
        _add_numbers(numbers.data, edge, numbers.ids, numbers.heads, first, n, heads, s)


@njit(**INNER)
def _take_numbers(edge, ids, given, first, n, heads, g, out):  # type: ignore[no-untyped-def]
    for e in range(n):
        at = place(edge, ids, first + e) * given
        for h in range(heads):
            out[at + (h if given == heads else 0)] += g[e * heads + h]


@njit(inline="always")
def take_numbers(numbers, edge, first, n, heads, g, out):  # type: ignore[no-untyped-def]
    """Adds g [n * heads] to `out`, laid out as `numbers.data`; nothing where out is empty."""
    if len(out):
        _take_numbers(edge, numbers.ids, numbers.heads, first, n, heads, g, out)
