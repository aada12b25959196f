"""Attention along the rows of a sparse graph: scores, normaliser and weighted sum in one pass, nothing of E x D.

A call does a part of the edges, cut wherever that falls within a row, so that one hub does not hold up a core: the
softmax is an online one, and the two rows that a part may share with its neighbours are left in a small state, put
together afterwards by `join`, always in the same order. Edges go in blocks of at most 64, whose scores and features
stay in cache; the features that the next edges need are fetched early, since a sparse graph reads them in no order
that hardware could guess. No atomics: results are the same on every run, whatever the number of threads.
"""

from __future__ import annotations

import math

import numpy as np

from mpnn.kernels.cpu.caching import njit
from mpnn.kernels.cpu.edgewise import also_weighted, exponentials, finished, highest, sigmoid, weighted
from mpnn.kernels.cpu.emit import INNER, LANES
from mpnn.kernels.cpu.layout import AHEAD, BEGUN, KERNEL, UNENDED
from mpnn.kernels.cpu.scores import SIGMOID, SOFTMAX, Buffers, block_of, draw, find, multiply, named, scores


@njit(inline="always")
def _rescaled(top, z, sums, old, heads, width):  # type: ignore[no-untyped-def]
    """Brings z and sums from the scale of `old` to that of `top`."""
    for h in range(heads):
        if old[h] != top[h]:
            factor = math.exp(old[h] - top[h])
            z[h] *= factor
            for d in range(width):
                sums[h * width + d] *= factor


@njit(**KERNEL)
def forward(part, problem, buffers, out, norm, given, state, state_row):  # type: ignore[no-untyped-def]
    """out [N * H * DV] and norm [N * 2 * H] (see `finished`) of the rows that lie in the part (first edge, last edge,
    row of the first), and, if asked for, scores `given` [E * H] (weights without softmax).

    What the part has of its first and last row goes to `state` [2, H * (2 + DV)], their names to `state_row`.
    """
    problem = named(problem)
    block, ptr, heads = block_of(problem, Buffers(*buffers)), problem.rows.ptr, problem.heads
    values, edge_value, dropped = problem.value, problem.edge_value, len(problem.dropout.keys) > 0
    first, last, row = part
    vectors, width = heads * values.vectors, values.vectors * LANES
    top, old = block.reals[:heads], block.reals[heads : 2 * heads]
    shift, z = block.reals[2 * heads : 3 * heads], block.reals[3 * heads : 4 * heads]
    sums = block.reals[4 * heads :]
    z[:] = 1
    softmax, fresh = problem.normalize == SOFTMAX, True
    for b in range(first, last, block.size):
        n = min(block.size, last - b)
        count = find(problem, block, b, n, row)
        scores(problem, block, b, n, 0, problem.score.src.size)
        if problem.normalize == SIGMOID:
            sigmoid(block.s, n * heads)
        for c in range(n * heads if len(given) else 0):
            given[b * heads + c] = block.s[c]
        if dropped:
            draw(problem, block, count, b)
            if not softmax:
                multiply(block.s, block.kept, n * heads)
        for k in range(count):
            row, begin, end = block.seg_row[k], block.seg_first[k], block.seg_first[k + 1]
            if softmax:
                for h in range(0 if fresh else heads):
                    old[h] = top[h]
                highest(block.s, begin * heads, end - begin, heads, fresh, top, shift)
                if not fresh:
                    _rescaled(top, z, sums, old, heads, width)
                exponentials(block.s, begin * heads, end - begin, heads, fresh, shift, z)
                if dropped:
                    multiply(block.s[begin * heads :], block.kept[begin * heads :], (end - begin) * heads)
            weighted(
                block.s, block.weight_at, values.data, block.value_at, begin, end, values.head, values.offset, vectors,
                AHEAD, values.size, fresh, sums,
            )  # fmt: skip
            if len(edge_value.data):
                also_weighted(
                    block.s, block.weight_at, block.value_stage, block.value_stage_at, begin, end, values.head,
                    edge_value.offset, vectors, sums,
                )  # fmt: skip
            fresh = b + end == ptr[row + 1]
            if fresh and ptr[row] >= first:
                finished(row, sums, shift, z, heads, values.vectors, out, norm)
            elif fresh or b + end == last:
                which = BEGUN if ptr[row] < first else UNENDED
                state_row[which] = row
                for h in range(heads):
                    state[which, h], state[which, heads + h] = top[h], z[h]
                for d in range(heads * width):
                    state[which, 2 * heads + d] = sums[d]


@njit(**INNER)
def _finished(row, sums, top, z, heads, width, out, norm):  # type: ignore[no-untyped-def]
    for h in range(heads):
        if top[h] == -np.inf:
            top[h] = 0
    finished(row, sums, top, z, heads, width // LANES, out, norm)


@njit(**KERNEL)
def join(heads, width, softmax, out, norm, state, state_row):  # type: ignore[no-untyped-def]
    """Writes the rows that parts share, from what `forward` left of them: state [parts, 2, ...] and their rows, -1 for
    none."""
    row = -1
    top, z, sums = state[0, 0, :heads], state[0, 0, heads : 2 * heads], state[0, 0, 2 * heads :]
    for p in range(2 * len(state)):
        found = state_row[p // 2, p % 2]
        if found < 0:
            continue
        piece = state[p // 2, p % 2]
        new_top, new_z, new_sums = piece[:heads], piece[heads : 2 * heads], piece[2 * heads :]
        if found == row:
            for h in range(heads):
                shared = max(top[h], new_top[h])
                ours = math.exp(top[h] - shared) if softmax and top[h] != shared else state.dtype.type(1)
                theirs = math.exp(new_top[h] - shared) if softmax and new_top[h] != shared else state.dtype.type(1)
                new_top[h], new_z[h] = shared, z[h] * ours + new_z[h] * theirs if softmax else z[h]
                for d in range(h * width, (h + 1) * width):
                    new_sums[d] = sums[d] * ours + new_sums[d] * theirs
        elif row >= 0:
            _finished(row, sums, top, z, heads, width, out, norm)
        row, top, z, sums = found, new_top, new_z, new_sums
    if row >= 0:
        _finished(row, sums, top, z, heads, width, out, norm)
