"""The backward pass of attention along the rows of a sparse graph.

It goes by source: what stands there, keys and values, is at hand for a whole row of edges, and each edge reads what
stands at its destination, a query and the gradient of a result, once. That gives the gradients of keys, values and of
all that edges have. Queries then get theirs as sums over destinations (`mpnn.kernels.cpu.spread`), for which each edge
leaves the gradient of its score. So features are read out of order three times, one less than if rows of destinations
came first. Parts and blocks are those of `mpnn.kernels.cpu.rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpnn.kernels.cpu.activated import activated_gradient
from mpnn.kernels.cpu.caching import njit
from mpnn.kernels.cpu.edgewise import copied, dots, gathered, sigmoid, softmax_gradient, totalled, weighted
from mpnn.kernels.cpu.emit import INNER, LANES
from mpnn.kernels.cpu.fold import fetch_row
from mpnn.kernels.cpu.layout import AHEAD, KERNEL, Features, place, take_numbers, unstaged
from mpnn.kernels.cpu.scores import (
    ACTIVATED,
    ADDITIVE,
    DOT,
    SIGMOID,
    SOFTMAX,
    Buffers,
    add,
    block_of,
    draw_by_source,
    find_by_source,
    multiply,
    named,
    scores,
)
from mpnn.kernels.cpu.spread import Edges, Out, settle


class Wanted(NamedTuple):
    """Gradients of what edges have, laid out as that; empty arrays are not wanted. `vector` as `Score.vector`, one for
    each part."""

    vector: np.ndarray
    key: np.ndarray
    value: np.ndarray
    before: np.ndarray
    bias: np.ndarray


@njit(**KERNEL)
def prepare(first, last, heads, start, out, d_out, norm, more, buffers, of_rows):  # type: ignore[no-untyped-def]
    """What weights and their gradients follow from, into of_rows [N, 3, H], for the rows first to last: norm [N, 2, H]
    as `mpnn.kernels.cpu.rows.forward` writes it, and `<d_out, out>`, plus `more` [N, H] if that is there.

    `start` says where heads begin in a row of out. Buffers have room for 8 rows.
    """
    at, product, _ = Buffers(*buffers)
    size = len(out) // (len(norm) // (2 * heads))
    for row in range(first, last):
        at[:] = row * size
        dots(d_out, at, out, at, start, 1, heads, size // heads // LANES, out.dtype.type(1), 0, 0, 0, product)
        for c in range(2 * heads):
            of_rows[3 * row * heads + c] = norm[2 * row * heads + c]
        for h in range(heads):
            of_rows[(3 * row + 2) * heads + h] = product[h] + (more[row * heads + h] if len(more) else 0)


@njit(inline="always")
def _weight_gradients(problem, block, d_out, count, first, n, d_weights, more):  # type: ignore[no-untyped-def]
    """Gradients of the block's weights before dropout, into `block.g`; `more` is for working in."""
    heads, value, g, edge = problem.heads, problem.value, block.g, problem.rows.edge
    one = d_out.data.dtype.type(1)
    dots(
        d_out.data, block.out_at, value.data, block.value_at, value.start, n, heads, value.vectors, one, AHEAD,
        d_out.size, 0, g,
    )  # fmt: skip
    if len(problem.edge_value.data):
        dots(
            d_out.data, block.out_at, block.value_stage, block.value_stage_at, problem.edge_value.start, n, heads,
            value.vectors, one, 0, 0, 0, more,
        )  # fmt: skip
        add(g, more, n * heads)
    if len(problem.dropout.keys):
        draw_by_source(problem, block, count, first)
        multiply(g, block.kept, n * heads)
    if len(d_weights):
        for e in range(n):
            add(g[e * heads :], d_weights[edge[first + e] * heads :], heads)


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


@njit(inline="always")
def _ask(n, heads, rows, first, of_rows, edges):  # type: ignore[no-untyped-def]
    """Asks early for what `prepare` wrote of the edges' destinations, and for where `_leave` writes."""
    size = edges.stride * heads
    for e in range(first, first + n):
        if len(of_rows):
            fetch_row(of_rows, rows.col[e] * 3 * heads, 3 * heads)
        if size:
            fetch_row(edges.data, rows.edge[e] * size, size)


@njit(inline="always")
def _leave(x, n, heads, edge, first, edges, which):  # type: ignore[no-untyped-def]
    """Numbers of n edges to where `spread` finds them."""
    for e in range(n if which >= 0 else 0):
        copied(x, e * heads, 0, 1, heads, edges.data, (edge[first + e] * edges.stride + which) * heads, 0)


@njit(**INNER)
def _edge_gradients(weight, x, x_at, edge, ids, first, n, heads, given, padded, width, scale, out):  # type: ignore[no-untyped-def]
    """Adds `scale * weight * x` of each edge to its vectors [given, width], given 1 or all; x [rows, heads, padded]."""
    for e in range(n):
        own = place(edge, ids, first + e) * given
        for h in range(heads):
            factor = weight[e * heads + h] * scale
            to, at = (own + (h if given == heads else 0)) * width, x_at[e] + h * padded
            for d in range(width):
                out[to + d] += factor * x[at + d]


@njit(**KERNEL)
def backward(  # type: ignore[no-untyped-def]
    part, problem, buffers, d_out, of_rows, d_weights, wanted, edges, value, key, number, state, state_row
):
    """Gradients by source and by edge, for the part's edges; the problem's rows are those of sources.

    d_out: `Features`. of_rows as `prepare` writes it; d_weights [E * H] of the weights before dropout, may be empty.
    `value`, `key`, `number` are `Out`: gradients of values, of a source's side of dot products and activations, and of
    its numbers in additive scores. What belongs to rows shared with other parts goes to `state` [2, ...].
    """
    problem, wanted, edges, d_out = named(problem), Wanted(*wanted), Edges(*edges), Features(*d_out)
    value, key, number = Out(*value), Out(*key), Out(*number)
    block, (ptr, col, at_edge), kind = block_of(problem, Buffers(*buffers)), problem.rows, problem.score.kind
    heads, normalize = problem.heads, problem.normalize
    dst, src, edge = problem.score.dst, problem.score.src, problem.score.edge
    edge_value, one = problem.edge_value, d_out.data.dtype.type(1)
    first, last, row = part
    value_width, key_width = d_out.vectors * LANES, dst.vectors * LANES
    key_from = heads * value_width
    number_from = key_from + heads * key_width
    numbers = len(block.s)
    sums_from = 3 * numbers
    stage_from = sums_from + number_from + heads
    of_row, sums, rest = block.reals[:sums_from], block.reals[sums_from:stage_from], block.reals[stage_from:]
    value_sums, key_sums, number_sums = sums[:key_from], sums[key_from:number_from], sums[number_from:]
    d_stage = rest[: len(block.key_stage) if kind == ACTIVATED and len(wanted.key) else 0]
    for b in range(first, last, block.size):
        n = min(block.size, last - b)
        count = find_by_source(problem, d_out.size, block, b, n, row)
        _ask(n, heads, problem.rows, b, of_rows, edges)
        scores(problem, block, b, n, dst.size, 0)
        _weight_gradients(problem, block, d_out, count, b, n, d_weights, of_row)
        if normalize == SOFTMAX:
            gathered(of_rows, col, b, n, heads, of_row, numbers)
            softmax_gradient(block.s, block.g, of_row, numbers, n * heads)
        elif normalize == SIGMOID:
            sigmoid(block.s, n * heads)
            _through_sigmoid(block.s, n * heads, block.g)
        take_numbers(problem.bias, at_edge, b, n, heads, block.g, wanted.bias)
        if len(problem.dropout.keys):
            multiply(block.s, block.kept, n * heads)
        _leave(block.g, n, heads, at_edge, b, edges, edges.bias)
        _through_activation(problem, block, n)
        take_numbers(problem.score.before, at_edge, b, n, heads, block.g, wanted.before)
        if len(edges.data):
            _leave(block.g, n, heads, at_edge, b, edges, 0)
            _leave(block.s, n, heads, at_edge, b, edges, edges.weight)
        if len(wanted.value):
            _edge_gradients(
                block.s, d_out.data, block.out_at, at_edge, edge_value.ids, b, n, heads, edge_value.heads, value_width,
                edge_value.width, one, wanted.value,
            )  # fmt: skip
        if len(wanted.key) and kind == DOT:
            _edge_gradients(
                block.g, dst.data, block.dst_at, at_edge, edge.ids, b, n, heads, edge.heads, key_width, edge.width,
                problem.score.scale, wanted.key,
            )  # fmt: skip
        for k in range(count):
            row, begin, end = block.seg_row[k], block.seg_first[k], block.seg_first[k + 1]
            fresh = b + begin == max(ptr[row], first)
            if fresh and kind == ACTIVATED:
                key_sums[:] = 0
            if len(value.data):
                weighted(
                    block.s, block.weight_at, d_out.data, block.out_at, begin, end, d_out.head, d_out.offset,
                    heads * d_out.vectors, 0, 0, fresh, value_sums,
                )  # fmt: skip
            if kind == ACTIVATED:
                activated_gradient(
                    problem.score.vector, dst.data, block.dst_at, src.data, block.src_at, block.key_stage,
                    block.key_stage_at, edge.start, block.g, begin, end, heads, dst.vectors, problem.score.slope,
                    problem.score.tanh, key_sums, wanted.vector, d_stage,
                )  # fmt: skip
            elif len(key.data):
                weighted(
                    block.g, block.weight_at, dst.data, block.dst_at, begin, end, dst.head, dst.offset,
                    heads * dst.vectors, 0, 0, fresh, key_sums,
                )  # fmt: skip
            if len(number.data):
                totalled(block.g, begin * heads, heads, end - begin, heads, fresh, number_sums)
            settle(
                row, ptr, b + end, first, last, sums, heads, value_width, key_width, problem.score.scale, value, key,
                number, state, state_row,
            )  # fmt: skip
        if len(d_stage):
            unstaged(edge, at_edge, b, n, d_stage, wanted.key)
        row = block.seg_row[count - 1]
