"""Sums over the edges of each destination, or of each class, in attention's backward pass, from the gradients of scores
that `mpnn.kernels.cpu.rows_backward` leaves.

Work is cut into parts of equal numbers of edges, wherever that falls within a row, so that one hub does not hold up a
core: rows that lie within a part are written by it, and the two rows that it may share with its neighbours are added up
afterwards, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpnn.kernels.cpu.activated import activated_gradient
from mpnn.kernels.cpu.caching import njit
from mpnn.kernels.cpu.edgewise import also_weighted, copied, scaled, totalled, weighted
from mpnn.kernels.cpu.emit import LANES
from mpnn.kernels.cpu.fold import fetch_row
from mpnn.kernels.cpu.layout import (
    AHEAD,
    BEGUN,
    KERNEL,
    UNENDED,
    Features,
    Rows,
    block_room,
    block_size,
    by_column,
    by_row,
    evenly,
    segments,
    staged,
)
from mpnn.kernels.cpu.scores import ACTIVATED, Buffers, named_score


class Out(NamedTuple):
    """Where sums go, [rows, heads, ...]; several heads may share one. Empty where they are not asked for."""

    heads: int
    data: np.ndarray


class Edges(NamedTuple):
    """What backward passes leave of each edge, in the order of destinations: [E, stride, H]. The gradient of its score
    comes first; its weight and the gradient of its bias stand at `weight` and `bias`, -1 where nobody needs them."""

    data: np.ndarray
    stride: int
    weight: int
    bias: int


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


@njit(inline="always")
def _write_all(row, sums, heads, value_width, key_width, scale, add, value, key, number):  # type: ignore[no-untyped-def]
    """A row's sums for values, for keys times `scale`, and its numbers, which lie one after the other."""
    one = sums.dtype.type(1)
    _write(row, sums, 0, heads, value_width, one, add, value)
    _write(row, sums, heads * value_width, heads, key_width, scale, add, key)
    _write(row, sums, heads * (value_width + key_width), heads, 1, one, add, number)


@njit(inline="always")
def settle(  # type: ignore[no-untyped-def]
    row, ptr, end, first, last, sums, heads, value_width, key_width, scale, value, key, number, state, state_row
):
    """Brings the sums of a row to where they belong once they have the row's edges before `end`: written, if all its
    edges lie within the part from first to last; to the state of the part, at its end or the row's."""
    if end == ptr[row + 1] and ptr[row] >= first:
        _write_all(row, sums, heads, value_width, key_width, scale, False, value, key, number)
    elif end == ptr[row + 1] or end == last:
        piece = BEGUN if ptr[row] < first else UNENDED
        state_row[piece] = row
        for d in range(heads * (value_width + key_width + 1)):
            state[piece, d] = sums[d]


@njit(**KERNEL)
def gradients(  # type: ignore[no-untyped-def]
    part, order, heads, edges, which, score, buffers, d_out, value, key, number, state, state_row
):
    """Sums over each row of edges, by head: `weight_e * d_out` into `value`, the gradients of what scores read of a
    row into `key`, and the numbers `which` of each edge into `number`.

    `order` is `Rows`, `score` as `Score`, with what stands at the other ends as its dst and what is the row's as its
    src; its vectors of edges are added to the other end's. `state` [2, ...] is for the rows shared with other parts.
    """
    order, score, d_out, edges = Rows(*order), named_score(score), Features(*d_out), Edges(*edges)
    value, key, number = Out(*value), Out(*key), Out(*number)
    first, last, row = part
    other, own, edge, ptr = score.dst, score.src, score.edge, order.ptr
    integers, reals, _ = Buffers(*buffers)
    size, room, stride = block_size(heads), block_room(heads), edges.stride * heads
    out_at, other_at, own_at = integers[:room], integers[room : 2 * room], integers[2 * room : 3 * room]
    value_weight, key_weight = integers[3 * room : 4 * room], integers[4 * room : 5 * room]
    seg_row, seg_first, stage_at = (
        integers[5 * room : 6 * room], integers[6 * room : 7 * room], integers[7 * room : 8 * room]
    )  # fmt: skip
    evenly(stride, key_weight)
    for e in range(room):
        value_weight[e] = key_weight[e] + edges.weight * heads
    if len(edge.data):
        evenly(edge.size, stage_at)
    value_width, key_width = d_out.vectors * LANES, other.vectors * LANES
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
        if len(order.edge):
            for e in range(n):
                copied(edges.data, order.edge[b + e] * stride, 0, 1, stride, w, e * stride, 0)
        else:
            w = edges.data[b * stride : (b + n) * stride]
        if len(value.data):
            by_column(b, n, order.col, d_out.size, out_at)
        if len(key.data):
            by_column(b, n, order.col, other.size, other_at)
        if len(key.data) and len(edge.data):
            staged(edge, order.edge, b, n, stage)
        if len(key.data) and score.kind == ACTIVATED:
            by_row(count, seg_row, seg_first, own.size, own_at)
            for e in range(n):
                fetch_row(other.data, other_at[e], other.size)
                for h in range(heads):
                    flat[e * heads + h] = w[e * stride + h]
        for k in range(count):
            row, begin, end = seg_row[k], seg_first[k], seg_first[k + 1]
            fresh = b + begin == max(ptr[row], first)
            if fresh and score.kind == ACTIVATED:
                key_sums[:] = 0
            if len(value.data):
                weighted(
                    w, value_weight, d_out.data, out_at, begin, end, d_out.head, d_out.offset, heads * d_out.vectors,
                    AHEAD, d_out.size, fresh, value_sums,
                )  # fmt: skip
            if len(key.data) and score.kind == ACTIVATED:
                activated_gradient(
                    score.vector, other.data, other_at, own.data, own_at, stage, stage_at, edge.start, flat, begin,
                    end, heads, other.vectors, score.slope, score.tanh, key_sums, d_vector, unused,
                )  # fmt: skip
            elif len(key.data):
                weighted(
                    w, key_weight, other.data, other_at, begin, end, other.head, other.offset, heads * other.vectors,
                    AHEAD, other.size, fresh, key_sums,
                )  # fmt: skip
                if len(edge.data):
                    also_weighted(
                        w, key_weight, stage, stage_at, begin, end, other.head, edge.offset, heads * other.vectors,
                        key_sums,
                    )  # fmt: skip
            if len(number.data):
                totalled(w, begin * stride + which * heads, stride, end - begin, heads, fresh, number_sums)
            settle(
                row, ptr, b + end, first, last, sums, heads, value_width, key_width, score.scale, value, key, number,
                state, state_row,
            )  # fmt: skip


@njit(**KERNEL)
def join(heads, value_width, key_width, scale, value, key, number, state, state_row):  # type: ignore[no-untyped-def]
    """Adds up the rows that parts share, from what they left of them: state [parts, 2, ...], their rows, -1 for
    none. `value`, `key` and `number` are 0 there before."""
    value, key, number = Out(*value), Out(*key), Out(*number)
    for p in range(2 * len(state)):
        row, sums = state_row[p // 2, p % 2], state[p // 2, p % 2]
        if row >= 0:
            _write_all(row, sums, heads, value_width, key_width, scale, True, value, key, number)
