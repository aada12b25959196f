"""Sums over the edges of each source, or of each class: the other half of attention's backward.

Work is cut into parts of equal numbers of edges, wherever that falls within a row, so that one hub does not hold up a
core: rows that lie within a part are written by it, and the two rows that it may share with its neighbours are added up
afterwards, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from mpnn.kernels.cpu.activated import activated_gradient
from mpnn.kernels.cpu.edgewise import copied, scaled, weighted
from mpnn.kernels.cpu.emit import LANES
from mpnn.kernels.cpu.layout import (
    AHEAD,
    BEGUN,
    KERNEL,
    UNENDED,
    Features,
    block_room,
    block_size,
    by_column,
    by_row,
    evenly,
    segments,
    staged,
)
from mpnn.kernels.cpu.scores import ACTIVATED, Buffers, named_score


class Order(NamedTuple):
    """Edges by source, or by class: row r has the edges `ptr[r]` to `ptr[r + 1]`, each with its destination `col` and
    its number in the order of the rows of destinations."""

    ptr: np.ndarray
    col: np.ndarray
    edge: np.ndarray


class Out(NamedTuple):
    """Where sums go, [rows, heads, ...]; several heads may share one. Empty where they are not asked for."""

    heads: int
    data: np.ndarray


@njit(inline="always")
def _write(row, sums, at, heads, width, factor, add, out):  # type: ignore[no-untyped-def]
    """A row of sums [heads, width] at `sums[at:]`, added up over the heads that share."""
    if len(out.data) == 0:
        return
    each = heads // out.heads
    if each == 1 and width % LANES == 0 and not add:
        scaled(sums[at:], factor, heads * width, out.data, row * heads * width)
        return
    for h in range(out.heads):
        for d in range(width):
            total = sums[at + h * each * width + d]
            for more in range(1, each):
                total += sums[at + (h * each + more) * width + d]
            to = (row * out.heads + h) * width + d
            out.data[to] = total * factor + (out.data[to] if add else 0)


@njit(**KERNEL)
def gradients(  # type: ignore[no-untyped-def]
    part, order, heads, edges, stride, score, buffers, d_out, value, key, number, which, state, state_row
):
    """Sums over each row of edges, by head: `weight_e * d_out` into `value`, the gradients of what scores read of a
    source into `key`, and the numbers `which` of each edge (1 gradients of scores, 2 of biases) into `number`.

    `edges` [E, stride, H] as `rows.backward` writes it. `state` [2, ...] is for the rows shared with other parts.
    """
    order, score, d_out = Order(*order), named_score(score), Features(*d_out)
    value, key, number = Out(*value), Out(*key), Out(*number)
    first, last, row = part
    dst, src, ptr, real = score.dst, score.src, order.ptr, edges.dtype
    one = real.type(1)
    integers, reals, _ = Buffers(*buffers)
    size, room = block_size(heads), block_room(heads)
    out_at, dst_at, src_at = integers[:room], integers[room : 2 * room], integers[2 * room : 3 * room]
    value_weight, key_weight = integers[3 * room : 4 * room], integers[4 * room : 5 * room]
    seg_row, seg_first, stage_at = (
        integers[5 * room : 6 * room], integers[6 * room : 7 * room], integers[7 * room : 8 * room]
    )  # fmt: skip
    evenly(3 * heads, value_weight)
    for e in range(room):
        key_weight[e] = value_weight[e] + heads
    if len(score.edge.data):
        evenly(score.edge.size, stage_at)
    value_width, key_width = d_out.vectors * LANES, dst.vectors * LANES
    key_from = heads * value_width
    number_from = key_from + heads * key_width
    flat_from = 3 * room * heads
    sums_from = flat_from + room * heads
    vector_from = sums_from + number_from + heads
    stage_from = vector_from + heads * key_width
    w, flat, sums = reals[:flat_from], reals[flat_from:sums_from], reals[sums_from:vector_from]
    d_vector, stage, unused = reals[vector_from:stage_from], reals[stage_from:], reals[:0]
    value_sums, key_sums, number_sums = sums[:key_from], sums[key_from:number_from], sums[number_from:]
    for b in range(first, last, size):
        n = min(size, last - b)
        count = segments(b, n, row, ptr, seg_row, seg_first)
        for e in range(n):
            copied(edges, order.edge[b + e] * stride * heads, 0, 1, stride * heads, w, e * 3 * heads, 0)
        if len(value.data):
            by_column(b, n, order.col, d_out.size, out_at)
        if len(key.data):
            by_column(b, n, order.col, dst.size, dst_at)
        if len(key.data) and score.kind == ACTIVATED:
            by_row(count, seg_row, seg_first, src.size, src_at)
            for e in range(n):
                for h in range(heads):
                    flat[e * heads + h] = w[(e * 3 + 1) * heads + h]
                if len(score.edge.data):
                    staged(score.edge, order.edge[b + e], 1, e, stage)
        for k in range(count):
            row, begin, end = seg_row[k], seg_first[k], seg_first[k + 1]
            fresh = b + begin == max(ptr[row], first)
            if fresh and score.kind == ACTIVATED:
                key_sums[:] = 0
            for h in range(heads if fresh else 0):
                number_sums[h] = 0
            if len(value.data):
                weighted(
                    w, value_weight, d_out.data, out_at, begin, end, d_out.head, d_out.offset, heads * d_out.vectors,
                    AHEAD, d_out.size, fresh, value_sums,
                )  # fmt: skip
            if len(key.data) and score.kind == ACTIVATED:
                activated_gradient(
                    score.vector, dst.data, dst_at, src.data, src_at, stage, stage_at, score.edge.start, flat, begin,
                    end, heads, dst.vectors, score.slope, score.tanh, key_sums, d_vector, unused,
                )  # fmt: skip
            elif len(key.data):
                weighted(
                    w, key_weight, dst.data, dst_at, begin, end, dst.head, dst.offset, heads * dst.vectors, AHEAD,
                    dst.size, fresh, key_sums,
                )  # fmt: skip
            for e in range(begin, end if len(number.data) else begin):
                for h in range(heads):
                    number_sums[h] += w[(e * 3 + which) * heads + h]
            ends = b + end == ptr[row + 1]
            if ends and ptr[row] >= first:
                _write(row, sums, 0, heads, value_width, one, False, value)
                _write(row, sums, key_from, heads, key_width, score.scale, False, key)
                _write(row, sums, number_from, heads, 1, one, False, number)
            elif ends or b + end == last:
                piece = BEGUN if ptr[row] < first else UNENDED
                state_row[piece] = row
                for d in range(number_from + heads):
                    state[piece, d] = sums[d]


@njit(**KERNEL)
def join(heads, value_width, key_width, scale, value, key, number, state, state_row):  # type: ignore[no-untyped-def]
    """Adds up the rows that parts share, from what `gradients` left of them: state [parts, 2, ...], their rows, -1 for
    none."""
    value, key, number = Out(*value), Out(*key), Out(*number)
    one = state.dtype.type(1)
    for p in range(2 * len(state)):
        row, sums = state_row[p // 2, p % 2], state[p // 2, p % 2]
        if row >= 0:
            _write(row, sums, 0, heads, value_width, one, True, value)
            _write(row, sums, heads * value_width, heads, key_width, scale, True, key)
            _write(row, sums, heads * (value_width + key_width), heads, 1, one, True, number)
