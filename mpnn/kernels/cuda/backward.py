"""The backward pass of attention along the rows of a sparse graph.

Weights are computed again, from the logits and `lse`; no E x H tensor is stored unless the caller asked for weights.
Three kernels visit the edges: by destination, for gradients of queries and of the data of edges; by source, over the
transposed graph, for keys and values; and by type, for tables of vectors that edges of a type share. What happens at an
edge is the same for all, `edge_gradients`; they differ in what they gather and in what they sum.
"""

import triton
import triton.language as tl

from mpnn.kernels.cuda.hashing import keep
from mpnn.kernels.cuda.logits import (
    ACTIVATED,
    ADDITIVE,
    CONSTANT,
    SOFTMAX,
    activation,
    end_gradients,
    logit_gradients,
    logits,
    weights,
)
from mpnn.kernels.cuda.tensors import (
    load_numbers,
    load_parameter,
    load_vectors,
    other_ends,
    rows_of_program,
    store_numbers,
    store_rows,
    store_vectors,
)


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
def edge_gradients(
    d_end, q, k, v, messages, d_message, row_lse, row_delta, i, j, per_edge, d_weights, dropout_key, threshold,
    keep_scale, b, edge_id, h, mask, scale, softcap, slope, KIND: tl.constexpr, NORMALIZE: tl.constexpr,
    TANH: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """What all kernels compute for a tile of edges (j -> i) and heads: the gradients of logits and the weights after
    dropout [R, E, BH]; and what `logits` returns for gradients of the ends.

    d_end: None if gradients of logits are not needed; zeros are returned for them. q, k, v: tiles of queries, keys and
    the score's vector. messages: of values. d_message, row_lse and row_delta: of the destinations.
    """
    s, inner, k = logits(
        q, k, v, per_edge, b, edge_id, h, mask, scale, softcap, slope, KIND, TANH, SOFTCAP, WIDTH, REAL
    )
    w = weights(s, row_lse, mask, NORMALIZE)
    dropped = w
    if DROPOUT:
        kept = keep(dropout_key, i, j, threshold)
        dropped = tl.where(kept, w * keep_scale, 0.0)
    d_s = tl.zeros([1, 1, 1], REAL)
    if d_end is not None:
        if per_edge.edge_value is not None:
            messages = messages + load_vectors(per_edge.edge_value, b, edge_id, h, mask, VALUE_WIDTH, REAL)
        d_w = tl.sum(d_message * messages, 3)
        if DROPOUT:
            d_w = tl.where(kept, d_w * keep_scale, 0.0)
        if d_weights is not None:
            d_w += load_numbers(d_weights, b, edge_id, h, mask, REAL)
        d_s = tl.where(mask, logit_gradients(w, d_w, row_delta, NORMALIZE), 0.0)
    return d_s, dropped, inner, k


@triton.jit
def load_lse_and_delta(lse, delta, b, i, h, mask, NORMALIZE: tl.constexpr, REAL: tl.constexpr):
    """lse and delta of destinations, [R, 1 or E, BH]; without softmax zeros, which nothing reads."""
    if NORMALIZE == SOFTMAX:
        return load_numbers(lse, b, i, h, mask, REAL), load_numbers(delta, b, i, h, mask, REAL)
    else:
        zero = tl.zeros([1, 1, 1], REAL)
        return zero, zero


@triton.jit
def load_dropout_key(dropout_keys, b, heads, h, DROPOUT: tl.constexpr):
    """The dropout keys of heads, int32 [BH]; without dropout anything, which nothing reads."""
    if DROPOUT:
        return tl.load(dropout_keys + b * heads + h, mask=h < heads, other=0)
    else:
        return h


@triton.jit
def by_destination(
    units, edges, blocks, heads, query, key, value, vector, per_edge, dropout_keys, threshold, keep_scale: tl.float64,
    scale: tl.float64, softcap: tl.float64, slope: tl.float64, lse, delta, d_out, d_weights, d_query, d_vector,
    d_per_edge, part, GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr, TANH: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """d_query [B, N_dst, H, D] of whole rows, parts of others into part [B, slots, H, D]; `d_per_edge`; and d_vector
    [programs, BH, D], the share of each program. Those that are None are not needed."""
    row, first, last, slot, h, exists, b = rows_of_program(units, blocks, heads, R, BH)
    q = tl.zeros([1, 1, 1, 1], REAL)
    v = q
    if KIND != CONSTANT:
        q = load_vectors(query, b, row, h, exists, WIDTH, REAL)
    if KIND == ACTIVATED:
        v = load_parameter(vector, h, heads, query.width, WIDTH, REAL)
        vector_sums = tl.zeros([R, E, BH, WIDTH], REAL)
    dropout_key = load_dropout_key(dropout_keys, b, heads, h, DROPOUT)
    keep_scale, scale = tl.full([], keep_scale, REAL), tl.full([], scale, REAL)
    softcap, slope = tl.full([], softcap, REAL), tl.full([], slope, REAL)
    d_message = load_vectors(d_out, b, row, h, exists, VALUE_WIDTH, REAL)
    row_lse, row_delta = load_lse_and_delta(lse, delta, b, row, h, exists, NORMALIZE, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        j, edge_id = other_ends(edges, e, is_edge)
        mask = is_edge[:, :, None] & exists
        k = q if KIND == CONSTANT else load_vectors(key, b, j, h // GROUP, mask, WIDTH, REAL)
        messages = load_vectors(value, b, j, h // GROUP, mask, VALUE_WIDTH, REAL)
        d_s, w, inner, k = edge_gradients(
            d_out, q, k, v, messages, d_message, row_lse, row_delta, row, j, per_edge, d_weights, dropout_key,
            threshold, keep_scale, b, edge_id, h, mask, scale, softcap, slope, KIND, NORMALIZE, TANH, SOFTCAP, DROPOUT,
            WIDTH, VALUE_WIDTH, REAL,
        )  # fmt: skip
        if d_per_edge.bias is not None:
            store_numbers(d_per_edge.bias, b, edge_id, h, mask, d_s)
        if d_per_edge.edge_value is not None:
            store_vectors(d_per_edge.edge_value, b, edge_id, h, mask, w[:, :, :, None] * d_message, VALUE_WIDTH)
        if KIND != CONSTANT:
            to_query, to_key = end_gradients(d_s, inner, q, k, v, scale, slope, KIND, TANH, SOFTCAP)
            sums += to_query
            if d_per_edge.edge_key is not None:
                if KIND == ADDITIVE:
                    store_numbers(d_per_edge.edge_key, b, edge_id, h, mask, tl.sum(to_key, 3))
                else:
                    store_vectors(d_per_edge.edge_key, b, edge_id, h, mask, to_key, WIDTH)
        if KIND == ACTIVATED and d_vector is not None:
            vector_sums += d_s[:, :, :, None] * activation(inner, slope, TANH)
    if d_query is not None:
        store_rows(d_query, part, b, row, slot, h, exists, tl.sum(sums, 1)[:, None, :, :], WIDTH)
    if KIND == ACTIVATED and d_vector is not None:
        at = (tl.program_id(0).to(tl.int64) * BH + tl.arange(0, BH)[:, None]) * WIDTH + tl.arange(0, WIDTH)
        tl.store(d_vector + at, tl.sum(tl.sum(vector_sums, 1), 0))


@triton.jit
def by_source(
    units, edges, blocks, heads, query, key, value, vector, per_edge, dropout_keys, threshold, keep_scale: tl.float64,
    scale: tl.float64, softcap: tl.float64, slope: tl.float64, lse, delta, d_out, d_weights, d_key, d_value, part_key,
    part_value, GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr, TANH: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """d_key [B, N_src, heads, D] and d_value [B, N_src, heads, DV] of whole rows, parts of others into part_key and
    part_value. Here `heads` are those of keys and values, each of which `GROUP` heads share."""
    row, first, last, slot, h, exists, b = rows_of_program(units, blocks, heads, R, BH)
    k = tl.zeros([1, 1, 1, 1], REAL)
    v = k
    if KIND != CONSTANT:
        k = load_vectors(key, b, row, h, exists, WIDTH, REAL)
    if KIND == ACTIVATED:  # whose heads share no keys
        v = load_parameter(vector, h, heads, key.width, WIDTH, REAL)
    messages = load_vectors(value, b, row, h, exists, VALUE_WIDTH, REAL)
    keep_scale, scale = tl.full([], keep_scale, REAL), tl.full([], scale, REAL)
    softcap, slope = tl.full([], softcap, REAL), tl.full([], slope, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    value_sums = tl.zeros([R, E, BH, VALUE_WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        i, edge_id = other_ends(edges, e, is_edge)
        mask = is_edge[:, :, None] & exists
        for g in range(GROUP):
            head = h * GROUP + g
            q = k if KIND == CONSTANT else load_vectors(query, b, i, head, mask, WIDTH, REAL)
            d_message = load_vectors(d_out, b, i, head, mask, VALUE_WIDTH, REAL)
            row_lse, row_delta = load_lse_and_delta(lse, delta, b, i, head, mask, NORMALIZE, REAL)
            dropout_key = load_dropout_key(dropout_keys, b, heads * GROUP, head, DROPOUT)
            d_s, w, inner, edge_key = edge_gradients(
                d_key, q, k, v, messages, d_message, row_lse, row_delta, i, row, per_edge, d_weights, dropout_key,
                threshold, keep_scale, b, edge_id, head, mask, scale, softcap, slope, KIND, NORMALIZE, TANH, SOFTCAP,
                DROPOUT, WIDTH, VALUE_WIDTH, REAL,
            )  # fmt: skip
            value_sums += w[:, :, :, None] * d_message
            if KIND != CONSTANT and d_key is not None:
                _, to_key = end_gradients(d_s, inner, q, edge_key, v, scale, slope, KIND, TANH, SOFTCAP)
                sums += to_key
    if d_value is not None:
        store_rows(d_value, part_value, b, row, slot, h, exists, tl.sum(value_sums, 1)[:, None, :, :], VALUE_WIDTH)
    if d_key is not None:
        store_rows(d_key, part_key, b, row, slot, h, exists, tl.sum(sums, 1)[:, None, :, :], WIDTH)


@triton.jit
def by_type(
    units, edges, ends, blocks, heads, query, key, value, vector, per_edge, dropout_keys, threshold,
    keep_scale: tl.float64, scale: tl.float64, softcap: tl.float64, slope: tl.float64, lse, delta, d_out, d_weights,
    d_edge_key, d_edge_value, part_key, part_value, GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr,
    TANH: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    BH: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """d_edge_key [B, edge types, H, D] and d_edge_value [B, edge types, H, DV], the gradients of tables: of whole rows,
    parts of others into part_key and part_value. Here a row holds the edges of a type. The columns of `edges` are
    numbers of edges in the caller's order, whose destinations and sources `ends` holds."""
    row, first, last, slot, h, exists, b = rows_of_program(units, blocks, heads, R, BH)
    v = tl.zeros([1, 1, 1, 1], REAL)
    if KIND == ACTIVATED:
        v = load_parameter(vector, h, heads, query.width, WIDTH, REAL)
    dropout_key = load_dropout_key(dropout_keys, b, heads, h, DROPOUT)
    keep_scale, scale = tl.full([], keep_scale, REAL), tl.full([], scale, REAL)
    softcap, slope = tl.full([], softcap, REAL), tl.full([], slope, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    value_sums = tl.zeros([R, E, BH, VALUE_WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        edge_id, _ = other_ends(edges, e, is_edge)
        mask = is_edge[:, :, None] & exists
        i, j = tl.load(ends.dst + edge_id).to(tl.int64), tl.load(ends.src + edge_id).to(tl.int64)
        q = v if KIND == CONSTANT else load_vectors(query, b, i, h, mask, WIDTH, REAL)
        k = v if KIND == CONSTANT else load_vectors(key, b, j, h // GROUP, mask, WIDTH, REAL)
        messages = load_vectors(value, b, j, h // GROUP, mask, VALUE_WIDTH, REAL)
        d_message = load_vectors(d_out, b, i, h, mask, VALUE_WIDTH, REAL)
        row_lse, row_delta = load_lse_and_delta(lse, delta, b, i, h, mask, NORMALIZE, REAL)
        d_s, w, inner, k = edge_gradients(
            d_edge_key, q, k, v, messages, d_message, row_lse, row_delta, i, j, per_edge, d_weights, dropout_key,
            threshold, keep_scale, b, edge_id, h, mask, scale, softcap, slope, KIND, NORMALIZE, TANH, SOFTCAP, DROPOUT,
            WIDTH, VALUE_WIDTH, REAL,
        )  # fmt: skip
        if d_edge_value is not None:
            value_sums += w[:, :, :, None] * d_message
        if KIND != CONSTANT and d_edge_key is not None:
            _, to_key = end_gradients(d_s, inner, q, k, v, scale, slope, KIND, TANH, SOFTCAP)
            sums += to_key
    if d_edge_value is not None:
        store_rows(d_edge_value, part_value, b, row, slot, h, exists, tl.sum(value_sums, 1)[:, None, :, :], VALUE_WIDTH)
    if d_edge_key is not None:
        store_rows(d_edge_key, part_key, b, row, slot, h, exists, tl.sum(sums, 1)[:, None, :, :], WIDTH)
