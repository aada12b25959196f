"""The backward pass of attention along the rows of a sparse graph.

It goes by row for queries and writes, for each edge and head, its weight and the gradient of its score; keys and values
then get theirs as sums over the transposed graph (`mpnn.kernels.cpu.spread`). Parts and blocks are those of
`mpnn.kernels.cpu.rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from mpnn.kernels.cpu.activated import activated_gradient
from mpnn.kernels.cpu.edgewise import also_weighted, copied, dots, scaled, sigmoid, softmax_gradient, weighted
from mpnn.kernels.cpu.emit import INNER, LANES
from mpnn.kernels.cpu.layout import AHEAD, BEGUN, KERNEL, UNENDED, by_row, take_numbers, unstaged
from mpnn.kernels.cpu.scores import (
    ACTIVATED,
    ADDITIVE,
    DOT,
    SIGMOID,
    SOFTMAX,
    Buffers,
    add,
    block_of,
    draw,
    find,
    multiply,
    named,
    scores,
)


class Wanted(NamedTuple):
    """Gradients by row and by edge; empty arrays are not wanted.

    `edges` [E, H * stride]: each edge's (dropped) weight, the gradient of its score as `Score` defines it, and, where
    stride is 3, that of its bias. `dst` as `Score.dst.data`; `vector` [2.. parts] as `Score.vector`, one for each part.
    """

    edges: np.ndarray
    stride: int
    dst: np.ndarray
    vector: np.ndarray
    key: np.ndarray
    value: np.ndarray
    before: np.ndarray
    bias: np.ndarray


@njit(inline="always")
def _deltas(problem, block, count, out, d_out, own, delta, given):  # type: ignore[no-untyped-def]
    """`<d_out_i, out_i>` for each of the block's rows, plus what is given, into delta [rows of the block, H]."""
    heads, vectors = problem.heads, problem.value.vectors
    at, size = block.out_at, heads * vectors * LANES
    for k in range(count):
        at[k] = block.seg_row[k] * size
    for k in range(count, count + LANES):
        at[k] = at[count - 1]
    dots(d_out, at, out, at, own, count, heads, vectors, out.dtype.type(1), 0, 0, delta)
    if len(given):
        for k in range(count):
            for h in range(heads):
                delta[k * heads + h] += given[block.seg_row[k] * heads + h]


@njit(inline="always")
def _weight_gradients(problem, block, count, first, n, d_out, d_weights, more):  # type: ignore[no-untyped-def]
    """Gradients of the block's weights before dropout, into `block.g`; `more` is for working in."""
    heads, value, g = problem.heads, problem.value, block.g
    by_row(count, block.seg_row, block.seg_first, heads * value.vectors * LANES, block.out_at)
    one = d_out.dtype.type(1)
    dots(
        d_out, block.out_at, value.data, block.value_at, value.start, n, heads, value.vectors, one, AHEAD,
        value.size, g,
    )  # fmt: skip
    if len(problem.edge_value.data):
        dots(
            d_out, block.out_at, block.value_stage, block.value_stage_at, problem.edge_value.start, n, heads,
            value.vectors, one, 0, 0, more,
        )  # fmt: skip
        add(g, more, n * heads)
    if len(problem.dropout.keys):
        draw(problem, block, count, first)
        multiply(g, block.kept, n * heads)
    if len(d_weights):
        add(g, d_weights[first * heads :], n * heads)


@njit(**INNER)
def _through_sigmoid(s, count, g):  # type: ignore[no-untyped-def]
    for c in range(count):
        g[c] *= s[c] - s[c] * s[c]


@njit(**INNER)
def _through_tanh(y, count, g):  # type: ignore[no-untyped-def]
    for c in range(count):
        g[c] -= g[c] * y[c] * y[c]


@njit(**INNER)
def _through_leaky(x, slope, count, g):  # type: ignore[no-untyped-def]
    for c in range(count):
        g[c] = g[c] if x[c] > 0 else g[c] * slope


@njit(inline="always")
def _through_activation(problem, block, n):  # type: ignore[no-untyped-def]
    """Gradients of scores in `block.g` become those of what an activation, or soft capping, was applied to."""
    score = problem.score
    if (score.kind == DOT and score.cap != 0) or (score.kind == ADDITIVE and score.tanh):
        _through_tanh(block.raw, n * problem.heads, block.g)
    elif score.kind == ADDITIVE:
        _through_leaky(block.raw, score.slope, n * problem.heads, block.g)


@njit(**INNER)
def _edge_gradients(weight, x, size, seg_row, seg_first, count, first, ids, heads, given, padded, width, scale, out):  # type: ignore[no-untyped-def]
    """Adds `scale * weight * x` of each edge's row to the vectors of the block's edges, [given, width], given 1 or all;
    x [rows, heads, padded]."""
    for k in range(count):
        for e in range(seg_first[k], seg_first[k + 1]):
            own = (ids[first + e] if len(ids) else first + e) * given
            for h in range(heads):
                factor = weight[e * heads + h] * scale
                to, at = (own + (h if given == heads else 0)) * width, seg_row[k] * size + h * padded
                for d in range(width):
                    out[to + d] += factor * x[at + d]


@njit(**KERNEL)
def backward(  # type: ignore[no-untyped-def]
    part, problem, buffers, own, out, norm, more_delta, d_out, d_weights, wanted, state, state_row
):
    """Gradients by row and by edge (`Wanted`), for the part's edges.

    d_out as out; d_weights [E * H] of the weights before dropout, with `more_delta` [N * H] their sums over each row
    times the weights; both may be empty. `own` says where heads begin in out. What belongs to rows shared with other
    parts goes to `state` [2, ...].
    """
    problem, wanted = named(problem), Wanted(*wanted)
    block, ptr, kind = block_of(problem, Buffers(*buffers)), problem.rows.ptr, problem.score.kind
    heads, normalize = problem.heads, problem.normalize
    dst, src, edge = problem.score.dst, problem.score.src, problem.score.edge
    edge_value, width, one = problem.edge_value, problem.value.vectors * LANES, d_out.dtype.type(1)
    first, last, row = part
    vectors = heads * dst.vectors
    sums_from = len(block.s)
    stage_from = sums_from + vectors * LANES + heads
    delta, sums, rest = block.reals[:sums_from], block.reals[sums_from:stage_from], block.reals[stage_from:]
    d_stage = rest[: len(block.key_stage) if kind == ACTIVATED and len(wanted.key) else 0]
    for b in range(first, last, block.size):
        n = min(block.size, last - b)
        count = find(problem, block, b, n, row)
        scores(problem, block, b, n)
        _weight_gradients(problem, block, count, b, n, d_out, d_weights, delta)
        if normalize == SOFTMAX:
            _deltas(problem, block, count, out, d_out, own, delta, more_delta)
            for k in range(count):
                begin, end = block.seg_first[k], block.seg_first[k + 1]
                # norm stands by row, delta by piece
                softmax_gradient(
                    block.s, block.g, begin * heads, end - begin, heads, norm, 2 * block.seg_row[k] * heads, delta,
                    k * heads,
                )  # fmt: skip
        elif normalize == SIGMOID:
            sigmoid(block.s, n * heads)
            _through_sigmoid(block.s, n * heads, block.g)
        take_numbers(problem.bias, b, n, heads, block.g, wanted.bias)
        if len(problem.dropout.keys):
            multiply(block.s, block.kept, n * heads)
        stride = heads * wanted.stride
        if wanted.stride == 3:
            copied(block.g, 0, heads, n, heads, wanted.edges, b * stride + 2 * heads, stride)
        _through_activation(problem, block, n)
        take_numbers(problem.score.before, b, n, heads, block.g, wanted.before)
        copied(block.s, 0, heads, n, heads, wanted.edges, b * stride, stride)
        copied(block.g, 0, heads, n, heads, wanted.edges, b * stride + heads, stride)
        if len(wanted.value):
            _edge_gradients(
                block.s, d_out, heads * width, block.seg_row, block.seg_first, count, b, edge_value.ids, heads,
                edge_value.heads, width, edge_value.width, one, wanted.value,
            )  # fmt: skip
        if len(wanted.key) and kind == DOT:
            _edge_gradients(
                block.g, dst.data, dst.size, block.seg_row, block.seg_first, count, b, edge.ids, heads, edge.heads,
                dst.vectors * LANES, edge.width, problem.score.scale, wanted.key,
            )  # fmt: skip
        for k in range(count):
            row, begin, end = block.seg_row[k], block.seg_first[k], block.seg_first[k + 1]
            if len(wanted.dst) == 0:
                continue
            fresh = b + begin == max(ptr[row], first)
            if fresh and kind != DOT:
                sums[:] = 0
            if kind == DOT:
                weighted(
                    block.g, block.weight_at, src.data, block.src_at, begin, end, dst.head, src.offset, vectors, 0, 0,
                    fresh, sums,
                )  # fmt: skip
                if len(edge.data):
                    also_weighted(
                        block.g, block.weight_at, block.key_stage, block.key_stage_at, begin, end, dst.head,
                        edge.offset, vectors, sums,
                    )  # fmt: skip
            elif kind == ADDITIVE:
                for e in range(begin, end):
                    for h in range(heads):
                        sums[h] += block.g[e * heads + h]
            else:
                activated_gradient(
                    problem.score.vector, dst.data, block.dst_at, src.data, block.src_at, block.key_stage,
                    block.key_stage_at, edge.start, block.g, begin, end, heads, dst.vectors, problem.score.slope,
                    problem.score.tanh, sums, wanted.vector, d_stage,
                )  # fmt: skip
            ends = b + end == ptr[row + 1]
            if ends and ptr[row] >= first:
                if kind == ADDITIVE:
                    copied(sums, 0, 0, 1, heads, wanted.dst, row * heads, 0)
                else:
                    scaled(sums, problem.score.scale, dst.size, wanted.dst, row * dst.size)
            elif ends or b + end == last:
                which = BEGUN if ptr[row] < first else UNENDED
                state_row[which] = row
                for d in range(dst.size):
                    state[which, d] = sums[d] * problem.score.scale
        if len(d_stage):
            unstaged(edge, b, n, d_stage, wanted.key)
        row = block.seg_row[count - 1]
