"""Scores of a block of edges, and what else forward and backward have in common along the rows of a sparse graph.

Functions here are inlined into their kernels, as groups of arrays are slow to hand over.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from mpnn.kernels.cpu.activated import activated_dots
from mpnn.kernels.cpu.edgewise import added, dots, keep
from mpnn.kernels.cpu.emit import INNER, LANES
from mpnn.kernels.cpu.hashing import mix
from mpnn.kernels.cpu.layout import (
    AHEAD,
    Dropout,
    EdgeNumbers,
    EdgeVectors,
    Features,
    Rows,
    add_numbers,
    block_room,
    block_size,
    by_column,
    by_row,
    evenly,
    segments,
    staged,
)

SOFTMAX, SIGMOID, NONE = 0, 1, 2
CONSTANT, DOT, ADDITIVE, ACTIVATED = 0, 1, 2, 3


class Score(NamedTuple):
    """What edges are weighed by: `dst` are queries and `src` keys, or the two terms of an additive score.

    `edge` are vectors added to keys, or under the activation of an `ACTIVATED` score, of which `vector` is the other
    side; `before` are numbers added under the activation of an `ADDITIVE` score. `cap` is 0 without soft capping;
    `slope` is that of LeakyReLU, unless the activation is tanh. A `CONSTANT` score is its scale.
    """

    kind: int
    dst: Features
    src: Features
    edge: EdgeVectors
    vector: np.ndarray
    before: EdgeNumbers
    scale: float
    cap: float
    slope: float
    tanh: int


class Problem(NamedTuple):
    """What forward and backward share: the graph, its numbers, and how they are normalised."""

    rows: Rows
    heads: int
    score: Score
    bias: EdgeNumbers
    table: EdgeNumbers
    value: Features
    edge_value: EdgeVectors
    dropout: Dropout
    normalize: int


class Buffers(NamedTuple):
    """Zeros that a call of a kernel works in: see `buffers`."""

    integers: np.ndarray
    reals: np.ndarray
    words: np.ndarray


class Block(NamedTuple):
    """A block of edges: the pieces of rows that it has, where each edge reads its features, vectors of edges, scores,
    gradients of weights, what weights are multiplied by when dropped, and what activations see.

    `reals` is what is left of the buffer.
    """

    size: int
    seg_row: np.ndarray
    seg_first: np.ndarray
    dst_at: np.ndarray
    src_at: np.ndarray
    value_at: np.ndarray
    out_at: np.ndarray
    weight_at: np.ndarray
    key_stage: np.ndarray
    key_stage_at: np.ndarray
    value_stage: np.ndarray
    value_stage_at: np.ndarray
    s: np.ndarray
    g: np.ndarray
    kept: np.ndarray
    raw: np.ndarray
    row_keys: np.ndarray
    reals: np.ndarray


def buffers(heads: int, each: int, more: int, real: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`Buffers` for a block of edges with room for `each` numbers an edge besides what every block has, and `more`."""
    room = block_size.py_func(heads) + AHEAD + LANES  # block_room, whose py_func would call what numba compiles
    reals = 4 * (room * heads + LANES) + room * each + more
    return np.zeros(9 * room, np.int64), np.zeros(reals, real), np.zeros(heads, np.uint32)


@njit(inline="always")
def named_score(given):  # type: ignore[no-untyped-def]
    kind, dst, src, edge, vector, before, scale, cap, slope, tanh = given
    return Score(
        kind, Features(*dst), Features(*src), EdgeVectors(*edge), vector, EdgeNumbers(*before), scale, cap, slope, tanh
    )


@njit(inline="always")
def named(given):  # type: ignore[no-untyped-def]
    rows, heads, score, bias, table, value, edge_value, dropout, normalize = given
    return Problem(
        Rows(*rows),
        heads,
        named_score(score),
        EdgeNumbers(*bias),
        EdgeNumbers(*table),
        Features(*value),
        EdgeVectors(*edge_value),
        Dropout(*dropout),
        normalize,
    )


@njit(inline="always")
def block_of(problem, buffers):  # type: ignore[no-untyped-def]
    """A block in the buffers."""
    heads, edge, edge_value = problem.heads, problem.score.edge, problem.edge_value
    size, room = block_size(heads), block_room(heads)
    at = buffers.integers
    weight_at, key_stage_at, value_stage_at = at[4 * room : 5 * room], at[5 * room : 6 * room], at[6 * room : 7 * room]
    evenly(heads, weight_at)
    if len(edge.data):
        evenly(edge.size, key_stage_at)
    if len(edge_value.data):
        evenly(edge_value.size, value_stage_at)
    reals, numbers = buffers.reals, room * heads + LANES
    key_from = 4 * numbers
    value_from = key_from + key_stage_at[room - 1] + edge.size
    rest = value_from + value_stage_at[room - 1] + edge_value.size
    return Block(
        size, at[7 * room : 8 * room], at[8 * room : 9 * room], at[:room], at[room : 2 * room],
        at[2 * room : 3 * room], at[3 * room : 4 * room], weight_at, reals[key_from:value_from], key_stage_at,
        reals[value_from:rest], value_stage_at, reals[:numbers], reals[numbers : 2 * numbers],
        reals[2 * numbers : 3 * numbers], reals[3 * numbers : 4 * numbers], buffers.words, reals[rest:],
    )  # fmt: skip


@njit(**INNER)
def add(x, y, count):  # type: ignore[no-untyped-def]
    """`x += y` for so many numbers."""
    for c in range(count):
        x[c] += y[c]


@njit(**INNER)
def multiply(x, y, count):  # type: ignore[no-untyped-def]
    """`x *= y` for so many numbers."""
    for c in range(count):
        x[c] *= y[c]


@njit(**INNER)
def _activated(raw, slope, tanh, count, s):  # type: ignore[no-untyped-def]
    """The activation of an additive score. Of tanh, the derivative of which follows from it, `raw` keeps the result."""
    if tanh:
        for c in range(count):
            raw[c] = math.tanh(raw[c])
            s[c] = raw[c]
    else:
        for c in range(count):
            s[c] = raw[c] if raw[c] > 0 else raw[c] * slope


@njit(**INNER)
def _capped(s, cap, count, raw):  # type: ignore[no-untyped-def]
    """Soft capping."""
    for c in range(count):
        raw[c] = math.tanh(s[c] / cap)
        s[c] = cap * raw[c]


@njit(inline="always")
def find(problem, block, first, n, row):  # type: ignore[no-untyped-def]
    """Prepares the block for n edges by destination, from `first` on, which begin in `row`; returns how many rows they
    lie in."""
    score, col = problem.score, problem.rows.col
    count = segments(first, n, row, problem.rows.ptr, block.seg_row, block.seg_first)
    by_column(first, n, col, problem.value.size, block.value_at)
    if score.kind != CONSTANT:
        by_column(first, n, col, score.src.size, block.src_at)
        by_row(count, block.seg_row, block.seg_first, score.dst.size, block.dst_at)
    _stage(problem, block, first, n)
    return count


@njit(inline="always")
def find_by_source(problem, size, block, first, n, row):  # type: ignore[no-untyped-def]
    """The same for edges by source; `block.out_at` says where their destinations have `size` numbers."""
    score, col = problem.score, problem.rows.col
    count = segments(first, n, row, problem.rows.ptr, block.seg_row, block.seg_first)
    by_row(count, block.seg_row, block.seg_first, problem.value.size, block.value_at)
    by_column(first, n, col, size, block.out_at)
    if score.kind != CONSTANT:
        by_row(count, block.seg_row, block.seg_first, score.src.size, block.src_at)
        by_column(first, n, col, score.dst.size, block.dst_at)
    _stage(problem, block, first, n)
    return count


@njit(inline="always")
def _stage(problem, block, first, n):  # type: ignore[no-untyped-def]
    if len(problem.score.edge.data):
        staged(problem.score.edge, problem.rows.edge, first, n, block.key_stage)
    if len(problem.edge_value.data):
        staged(problem.edge_value, problem.rows.edge, first, n, block.value_stage)


@njit(inline="always")
def scores(problem, block, first, n, of_dst, of_src):  # type: ignore[no-untyped-def]
    """Scores of the block's n edges into `block.s`, and what the derivative of an activation needs into `block.raw`.

    Of features that are read in no order, so many numbers of a destination or a source are fetched early.
    """
    heads, score, edge, s, raw = problem.heads, problem.score, problem.rows.edge, block.s, block.raw
    dst, src = score.dst, score.src
    if score.kind == DOT:
        dots(
            dst.data, block.dst_at, src.data, block.src_at, src.start, n, heads, dst.vectors, score.scale, AHEAD,
            of_dst, of_src, s,
        )  # fmt: skip
        if len(score.edge.data):
            dots(
                dst.data, block.dst_at, block.key_stage, block.key_stage_at, score.edge.start, n, heads, dst.vectors,
                score.scale, 0, 0, 0, block.g,
            )  # fmt: skip
            add(s, block.g, n * heads)
        if score.cap != 0:
            _capped(s, score.cap, n * heads, raw)
    elif score.kind == ADDITIVE:
        added(dst.data, block.dst_at, src.data, block.src_at, n, heads, AHEAD, of_dst, of_src, raw)
        add_numbers(score.before, edge, first, n, heads, raw)
        _activated(raw, score.slope, score.tanh, n * heads, s)
    elif score.kind == ACTIVATED:
        activated_dots(
            score.vector, dst.data, block.dst_at, src.data, block.src_at, block.key_stage, block.key_stage_at,
            score.edge.start, n, heads, dst.vectors, score.slope, score.tanh, AHEAD, of_dst, of_src, s,
        )  # fmt: skip
    else:
        for c in range(n * heads):
            s[c] = score.scale
    add_numbers(problem.bias, edge, first, n, heads, s)
    add_numbers(problem.table, edge, first, n, heads, s)


@njit(inline="always")
def draw(problem, block, count, first):  # type: ignore[no-untyped-def]
    """What the weights of the block's edges are multiplied by, into `block.kept`."""
    heads, drop = problem.heads, problem.dropout
    for k in range(count):
        begin, end = block.seg_first[k], block.seg_first[k + 1]
        for h in range(heads):
            block.row_keys[h] = mix(np.uint32(drop.keys[h] ^ np.uint32(block.seg_row[k])))
        keep(
            block.row_keys, problem.rows.col, first + begin, begin * heads, end - begin, heads, drop.threshold,
            drop.grow, block.kept,
        )  # fmt: skip


@njit(**INNER)
def _each_drawn(keys, dst, first, seg_row, seg_first, count, heads, threshold, grow, kept):  # type: ignore[no-untyped-def]
    """Row by row the first half of the hash differs."""
    for k in range(count):
        source = np.uint32(seg_row[k])
        for e in range(seg_first[k], seg_first[k + 1]):
            row = np.uint32(dst[first + e])
            for h in range(heads):
                drawn = mix(np.uint32(mix(np.uint32(keys[h] ^ row)) ^ source)) >> np.uint32(8)
                kept[e * heads + h] = grow if drawn >= threshold else 0


@njit(inline="always")
def draw_by_source(problem, block, count, first):  # type: ignore[no-untyped-def]
    """The same as `draw`, number by number, for edges by source."""
    drop = problem.dropout
    _each_drawn(
        drop.keys, problem.rows.col, first, block.seg_row, block.seg_first, count, problem.heads, drop.threshold,
        drop.grow, block.kept,
    )  # fmt: skip
