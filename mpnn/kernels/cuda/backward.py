"""The backward pass of attention along the rows of a sparse graph.

Weights are computed again, from the scores and `norm`; nothing of E x H is kept but what the caller asked for. One
kernel goes by destination, and gives gradients of what destinations and edges have; one goes by source, over the
transposed graph; and one by class, for vectors that edges of a class share.
"""

import triton
import triton.language as tl

from mpnn.kernels.cuda.hashing import kept
from mpnn.kernels.cuda.scores import (
    ACTIVATED,
    ADDITIVE,
    CONSTANT,
    DOT,
    SOFTMAX,
    activation,
    score_gradients,
    scores,
    steepness,
    weights,
)
from mpnn.kernels.cuda.tensors import assigned, ends, numbers, put_numbers, put_vectors, vectors


@triton.jit
def deltas(out, d_out, delta, count, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """`<out, d_out>` of each row and head into delta [count]; out and d_out contiguous [count, width]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    at = row[:, None] * width + d
    mask = (row < count)[:, None] & (d < width)
    x, y = tl.load(out + at, mask=mask, other=0.0), tl.load(d_out + at, mask=mask, other=0.0)
    tl.store(delta + row, tl.sum(x.to(REAL) * y.to(REAL), 1), mask=row < count)


@triton.jit
def pulled(d_s, inner, dst, keys, vector, scale, slope, KIND: tl.constexpr, TANH: tl.constexpr, CAPPED: tl.constexpr):
    """Gradients by what an edge's destination and its source (and its own vector) add to its score, from that of the
    score: [R, E, BH, WIDTH] each."""
    if KIND == DOT:
        g = d_s * scale
        if CAPPED:
            g = g * (1.0 - inner * inner)
        return g[:, :, :, None] * keys, g[:, :, :, None] * dst
    elif KIND == ADDITIVE:
        g = (d_s * steepness(inner, slope, TANH))[:, :, :, None]
        return g, g
    else:
        g = d_s[:, :, :, None] * vector * steepness(inner, slope, TANH)
        return g, g


@triton.jit
def by_destination(
    units, edges, blocks, heads, dst, src, value, vector, given, keys, threshold, grow: tl.float64,
    scale: tl.float64, cap: tl.float64, slope: tl.float64, norm, delta, d_out, d_weights, d_dst, d_vector, d_given,
    part, GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr, TANH: tl.constexpr,
    CAPPED: tl.constexpr, DROPS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """d_dst [B, N_dst, H, D] of whole rows, parts of others into part [B, slots, H, D]; `d_given` as `PerEdge`; and
    d_vector [programs, BH, D], each program's part of it. Those that are None are not wanted."""
    row, first, last, slot, h, there, b = assigned(units, blocks, heads, R, BH)
    of_dst = tl.zeros([1, 1, 1, 1], REAL)
    weighed = of_dst
    if KIND != CONSTANT:
        of_dst = vectors(dst, b, row, h, there, WIDTH, REAL)
    if KIND == ACTIVATED:
        d = tl.arange(0, WIDTH)
        mask = (h < heads)[:, None] & (d < dst.width)
        weighed = tl.load(vector + h[:, None] * dst.width + d, mask=mask, other=0.0).to(REAL)
        vector_sums = tl.zeros([R, E, BH, WIDTH], REAL)
    if DROPS:
        key = tl.load(keys + b * heads + h, mask=h < heads, other=0)
        grow = tl.full([], grow, REAL)
    scale, cap, slope = tl.full([], scale, REAL), tl.full([], cap, REAL), tl.full([], slope, REAL)
    pull = vectors(d_out, b, row, h, there, VALUE_WIDTH, REAL)
    of_norm = tl.zeros([1, 1, 1], REAL)
    of_delta = of_norm
    if NORMALIZE == SOFTMAX:
        of_norm = numbers(norm, b, row, h, there, REAL)
        of_delta = numbers(delta, b, row, h, there, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        j, number = ends(edges, e, is_edge)
        on = is_edge[:, :, None] & there
        of_src = of_dst if KIND == CONSTANT else vectors(src, b, j, h // GROUP, on, WIDTH, REAL)
        s, inner, queried = scores(
            of_dst, of_src, weighed, given, number, b, h, on, scale, cap, slope, KIND, TANH, CAPPED, WIDTH, REAL
        )
        w = weights(s, of_norm, on, NORMALIZE)
        messages = vectors(value, b, j, h // GROUP, on, VALUE_WIDTH, REAL)
        if given.edge_value is not None:
            messages += vectors(given.edge_value, b, number, h, on, VALUE_WIDTH, REAL)
        d_w = tl.sum(pull * messages, 3)
        dropped = w
        if DROPS:
            keep = kept(key, row, j, threshold)
            d_w = tl.where(keep, d_w * grow, 0.0)
            dropped = tl.where(keep, w * grow, 0.0)
        if d_weights is not None:
            d_w += numbers(d_weights, b, number, h, on, REAL)
        d_s = score_gradients(w, d_w, of_delta, NORMALIZE)
        if d_given.bias is not None:
            put_numbers(d_given.bias, b, number, h, on, d_s)
        if d_given.edge_value is not None:
            put_vectors(d_given.edge_value, b, number, h, on, dropped[:, :, :, None] * pull, VALUE_WIDTH)
        if KIND != CONSTANT:
            d_s = tl.where(on, d_s, 0.0)
            to_dst, to_edge = pulled(d_s, inner, of_dst, queried, weighed, scale, slope, KIND, TANH, CAPPED)
            sums += to_dst
            if d_given.before is not None:
                put_numbers(d_given.before, b, number, h, on, tl.sum(to_edge, 3))
            if d_given.edge is not None:
                put_vectors(d_given.edge, b, number, h, on, to_edge, WIDTH)
        if KIND == ACTIVATED and d_vector is not None:
            vector_sums += d_s[:, :, :, None] * activation(inner, slope, TANH)
    if d_dst is not None:
        row_sums = tl.sum(sums, 1)[:, None, :, :]
        put_vectors(d_dst, b, row, h, (slot < 0)[:, :, None] & there, row_sums, WIDTH)
        if part is not None:
            put_vectors(part, b, slot, h, (slot >= 0)[:, :, None] & there, row_sums, WIDTH)
    if KIND == ACTIVATED and d_vector is not None:
        at = (tl.program_id(0).to(tl.int64) * BH + tl.arange(0, BH)[:, None]) * WIDTH + tl.arange(0, WIDTH)
        tl.store(d_vector + at, tl.sum(tl.sum(vector_sums, 1), 0))


@triton.jit
def by_source(
    units, edges, blocks, heads, dst, src, value, vector, given, keys, threshold, grow: tl.float64,
    scale: tl.float64, cap: tl.float64, slope: tl.float64, norm, delta, d_out, d_weights, d_src, d_value, part_src,
    part_value, GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr, TANH: tl.constexpr,
    CAPPED: tl.constexpr, DROPS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """d_src [B, N_src, heads, D] and d_value [B, N_src, heads, DV] of whole rows, parts of others into part_src and
    part_value. Here `heads` are those of keys and values, each of which `GROUP` heads share."""
    row, first, last, slot, h, there, b = assigned(units, blocks, heads, R, BH)
    of_src = tl.zeros([1, 1, 1, 1], REAL)
    weighed = of_src
    of_norm = tl.zeros([1, 1, 1], REAL)
    if KIND != CONSTANT:
        of_src = vectors(src, b, row, h, there, WIDTH, REAL)
    if KIND == ACTIVATED:
        d = tl.arange(0, WIDTH)
        mask = (h < heads)[:, None] & (d < src.width)
        weighed = tl.load(vector + h[:, None] * src.width + d, mask=mask, other=0.0).to(REAL)
    of_value = vectors(value, b, row, h, there, VALUE_WIDTH, REAL)
    grow = tl.full([], grow, REAL)
    scale, cap, slope = tl.full([], scale, REAL), tl.full([], cap, REAL), tl.full([], slope, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    value_sums = tl.zeros([R, E, BH, VALUE_WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        i, number = ends(edges, e, is_edge)
        on = is_edge[:, :, None] & there
        for g in range(GROUP):
            head = h * GROUP + g
            of_dst = of_src if KIND == CONSTANT else vectors(dst, b, i, head, on, WIDTH, REAL)
            s, inner, queried = scores(
                of_dst, of_src, weighed, given, number, b, head, on, scale, cap, slope, KIND, TANH, CAPPED, WIDTH, REAL
            )
            if NORMALIZE == SOFTMAX:
                w = weights(s, numbers(norm, b, i, head, on, REAL), on, NORMALIZE)
                of_delta = numbers(delta, b, i, head, on, REAL)
            else:
                w = weights(s, s, on, NORMALIZE)
                of_delta = of_norm
            pull = vectors(d_out, b, i, head, on, VALUE_WIDTH, REAL)
            dropped = w
            if DROPS:
                key = tl.load(keys + b * heads * GROUP + head, mask=h < heads, other=0)
                keep = kept(key, i, row, threshold)
                dropped = tl.where(keep, w * grow, 0.0)
            value_sums += dropped[:, :, :, None] * pull
            if KIND != CONSTANT and d_src is not None:
                messages = of_value
                if given.edge_value is not None:
                    messages = of_value + vectors(given.edge_value, b, number, head, on, VALUE_WIDTH, REAL)
                d_w = tl.sum(pull * messages, 3)
                if DROPS:
                    d_w = tl.where(keep, d_w * grow, 0.0)
                if d_weights is not None:
                    d_w += numbers(d_weights, b, number, head, on, REAL)
                d_s = tl.where(on, score_gradients(w, d_w, of_delta, NORMALIZE), 0.0)
                _, to_src = pulled(d_s, inner, of_dst, queried, weighed, scale, slope, KIND, TANH, CAPPED)
                sums += to_src
    here, elsewhere = (slot < 0)[:, :, None] & there, (slot >= 0)[:, :, None] & there
    if d_value is not None:
        value_row = tl.sum(value_sums, 1)[:, None, :, :]
        put_vectors(d_value, b, row, h, here, value_row, VALUE_WIDTH)
        if part_value is not None:
            put_vectors(part_value, b, slot, h, elsewhere, value_row, VALUE_WIDTH)
    if d_src is not None:
        row_sums = tl.sum(sums, 1)[:, None, :, :]
        put_vectors(d_src, b, row, h, here, row_sums, WIDTH)
        if part_src is not None:
            put_vectors(part_src, b, slot, h, elsewhere, row_sums, WIDTH)


@triton.jit
def by_class(
    units, edges, ends_of, blocks, heads, dst, src, value, vector, given, keys, threshold, grow: tl.float64,
    scale: tl.float64, cap: tl.float64, slope: tl.float64, norm, delta, d_out, d_weights, d_edge, d_value, part_edge,
    part_value, GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr, TANH: tl.constexpr,
    CAPPED: tl.constexpr, DROPS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """d_edge [B, classes, H, D] and d_value [B, classes, H, DV] of vectors beside keys and beside values, of whole
    rows, parts of others into part_edge and part_value. The columns of `edges` are numbers of edges, which have their
    destinations and sources in `ends_of`."""
    row, first, last, slot, h, there, b = assigned(units, blocks, heads, R, BH)
    weighed = tl.zeros([1, 1, 1, 1], REAL)
    if KIND == ACTIVATED:
        d = tl.arange(0, WIDTH)
        mask = (h < heads)[:, None] & (d < dst.width)
        weighed = tl.load(vector + h[:, None] * dst.width + d, mask=mask, other=0.0).to(REAL)
    if DROPS:
        key = tl.load(keys + b * heads + h, mask=h < heads, other=0)
        grow = tl.full([], grow, REAL)
    scale, cap, slope = tl.full([], scale, REAL), tl.full([], cap, REAL), tl.full([], slope, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    value_sums = tl.zeros([R, E, BH, VALUE_WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        number, _ = ends(edges, e, is_edge)
        on = is_edge[:, :, None] & there
        i, j = tl.load(ends_of.dst + number).to(tl.int64), tl.load(ends_of.src + number).to(tl.int64)
        of_dst = weighed if KIND == CONSTANT else vectors(dst, b, i, h, on, WIDTH, REAL)
        of_src = weighed if KIND == CONSTANT else vectors(src, b, j, h // GROUP, on, WIDTH, REAL)
        s, inner, queried = scores(
            of_dst, of_src, weighed, given, number, b, h, on, scale, cap, slope, KIND, TANH, CAPPED, WIDTH, REAL
        )
        if NORMALIZE == SOFTMAX:
            w = weights(s, numbers(norm, b, i, h, on, REAL), on, NORMALIZE)
            of_delta = numbers(delta, b, i, h, on, REAL)
        else:
            w = weights(s, s, on, NORMALIZE)
            of_delta = w
        pull = vectors(d_out, b, i, h, on, VALUE_WIDTH, REAL)
        dropped = w
        if DROPS:
            keep = kept(key, i, j, threshold)
            dropped = tl.where(keep, w * grow, 0.0)
        if d_value is not None:
            value_sums += dropped[:, :, :, None] * pull
        if KIND != CONSTANT and d_edge is not None:
            messages = vectors(value, b, j, h // GROUP, on, VALUE_WIDTH, REAL)
            if given.edge_value is not None:
                messages += vectors(given.edge_value, b, number, h, on, VALUE_WIDTH, REAL)
            d_w = tl.sum(pull * messages, 3)
            if DROPS:
                d_w = tl.where(keep, d_w * grow, 0.0)
            if d_weights is not None:
                d_w += numbers(d_weights, b, number, h, on, REAL)
            d_s = tl.where(on, score_gradients(w, d_w, of_delta, NORMALIZE), 0.0)
            _, to_edge = pulled(d_s, inner, of_dst, queried, weighed, scale, slope, KIND, TANH, CAPPED)
            sums += to_edge
    here, elsewhere = (slot < 0)[:, :, None] & there, (slot >= 0)[:, :, None] & there
    if d_value is not None:
        value_row = tl.sum(value_sums, 1)[:, None, :, :]
        put_vectors(d_value, b, row, h, here, value_row, VALUE_WIDTH)
        if part_value is not None:
            put_vectors(part_value, b, slot, h, elsewhere, value_row, VALUE_WIDTH)
    if d_edge is not None:
        row_sums = tl.sum(sums, 1)[:, None, :, :]
        put_vectors(d_edge, b, row, h, here, row_sums, WIDTH)
        if part_edge is not None:
            put_vectors(part_edge, b, slot, h, elsewhere, row_sums, WIDTH)
