"""The backward pass of attention along the rows of a sparse graph.

Weights are computed again, from the logits and `lse`; no E x H tensor is stored unless the caller asked for weights.

    dw_ij = keep_ij / (1 - p) <do_i, v_j + edge_value_ij>      delta_i = <out_i, do_i>
    ds_ij = w_ij (dw_ij - delta_i) of a softmax                w_ij (1 - w_ij) dw_ij of a sigmoid; else dw_ij
    dv_j  = sum_i w_ij keep_ij / (1 - p) do_i                  dq_i, dk_j = sums of ds_ij times derivatives of the logit

    for each unit of rows:            one program for each block of heads of each batch entry
        for each E edges of a row:    R rows side by side; by source also the heads that share a key
            gather the other ends; compute s, w and ds again; add to the gradients of the row
        write the row, or a part of it

Called by `attention.py`. One kernel visits the edges in three orders: by destination, for gradients of queries and
of the data of edges; by source, over the transposed graph, for keys and values; and by type, for tables of vectors that
edges of a type share.
"""

import triton
import triton.language as tl

from mpnn.kernels.cuda.dropout import role_keys, word
from mpnn.kernels.cuda.tensors import (
    load_numbers,
    load_parameter,
    load_vectors,
    other_ends,
    rows_of_program,
    store_numbers,
    store_rows,
    store_vectors,
    table_rows,
)
from mpnn.kernels.rows.cuda.logits import (
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

DESTINATIONS, SOURCES, TYPES = (tl.constexpr(rows) for rows in range(3))


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
def load_destinations(
    query, query_at, d_out, out_at, lse, delta, lse_at, b, i, h, mask, KIND: tl.constexpr, NORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Queries, gradients of results, lse and delta; zeros where nothing reads them."""
    q, row_lse, row_delta = tl.zeros([1, 1, 1, 1], REAL), tl.zeros([1, 1, 1], REAL), tl.zeros([1, 1, 1], REAL)
    if KIND != CONSTANT:
        q = load_vectors(query, query_at, b, i, h, mask, WIDTH, REAL)
    d_message = load_vectors(d_out, out_at, b, i, h, mask, VALUE_WIDTH, REAL)
    if NORMALIZE == SOFTMAX:
        row_lse = load_numbers(lse, lse_at, b, i, h, mask, REAL)
        if delta is not None:
            row_delta = load_numbers(delta, lse_at, b, i, h, mask, REAL)
    return q, d_message, row_lse, row_delta


@triton.jit
def load_sources(
    key, key_at, value, value_at, b, j, h, mask, KIND: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """Keys, zeros where nothing reads them, and values."""
    k = tl.zeros([1, 1, 1, 1], REAL)
    if KIND != CONSTANT:
        k = load_vectors(key, key_at, b, j, h, mask, WIDTH, REAL)
    return k, load_vectors(value, value_at, b, j, h, mask, VALUE_WIDTH, REAL)


@triton.jit
def gradients(
    units, col, edge, end_dst, end_src, query, key, value, vector, edge_key, key_types, edge_value, value_types, bias,
    seed, out, lse, delta, d_out, d_weights, d_rows, d_values, part, part_values, d_vector, d_edge_key,
    d_edge_value, d_bias, query_at, key_at, value_at, edge_key_at, edge_value_at, bias_at, out_at, lse_at,
    d_weights_at, d_rows_at, d_values_at, part_at, part_values_at, d_edge_key_at, d_edge_value_at, d_bias_at, count,
    blocks, heads, first_stream, streams, threshold, keep_scale: tl.float64, scale: tl.float64, softcap: tl.float64,
    slope: tl.float64, ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr,
    TANH: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    BH: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Gradients [B, rows, heads, D or DV] of whole rows, parts of others into part and part_values [B, slots, heads, D
    or DV]. Those that are None are not needed.

    DESTINATIONS: d_rows of queries; d_edge_key, d_edge_value and d_bias; and d_vector [programs, BH, D], the share of
    each program. If `out` is not None, delta, the sum of `out * d_out` of each row, is written too; else it is read.
    SOURCES: d_rows of keys and d_values. Here `heads` are those of keys and values, each of which GROUP heads share.
    TYPES: d_rows of the table edge_key, and d_values of edge_value. Here a row holds the edges of a type. Then `col`
    holds numbers of edges in the caller's order, and `end_dst` and `end_src` their destinations and sources.
    """
    row, first, last, slot, h, exists, b = rows_of_program(units, count, blocks, heads, R, BH, INDEX)
    v = tl.zeros([1, 1, 1, 1], REAL)
    if KIND == ACTIVATED:  # whose heads share no keys
        v = load_parameter(vector, h, heads, query_at.width, WIDTH, REAL)
    if ROWS == DESTINATIONS:
        known = delta if out is None else None
        q, d_message, row_lse, row_delta = load_destinations(
            query, query_at, d_out, out_at, lse, known, lse_at, b, row, h, exists, KIND, NORMALIZE, WIDTH, VALUE_WIDTH,
            REAL,
        )  # fmt: skip
        if out is not None:
            row_delta = tl.sum(load_vectors(out, out_at, b, row, h, exists, VALUE_WIDTH, REAL) * d_message, 3)
            store_numbers(delta, lse_at, b, row, h, exists, row_delta)
    if ROWS == SOURCES:
        own_key, own_value = load_sources(
            key, key_at, value, value_at, b, row, h, exists, KIND, WIDTH, VALUE_WIDTH, REAL
        )
    if DROPOUT:
        dst_key, src_key, stream_key = role_keys(seed)
        first_stream = b * streams + first_stream
        of_streams = word(stream_key, first_stream + h)
    keep_scale, scale = tl.full([], keep_scale, REAL), tl.full([], scale, REAL)
    softcap, slope = tl.full([], softcap, REAL), tl.full([], slope, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    value_sums = tl.zeros([R, E, BH, VALUE_WIDTH], REAL)
    vector_sums = tl.zeros([R, E, BH, WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    next_other, next_id, next_mask = other_ends(col, edge, first, last, exists, E)
    for t in range(0, longest, E):
        other = next_other
        edge_id = next_id
        mask = next_mask
        next_other, next_id, next_mask = other_ends(col, edge, first + t + E, last, exists, E)
        i = row
        j = other
        if ROWS == SOURCES:
            i = other
            j = row
        if ROWS == TYPES:
            edge_id = other
            i, j = tl.load(end_dst + edge_id).to(row.dtype), tl.load(end_src + edge_id).to(row.dtype)
        if DROPOUT:
            of_edges = (word(dst_key, i) * word(src_key, j))[:, :, None]
        for g in range(GROUP if ROWS == SOURCES else 1):
            head = h * GROUP + g if ROWS == SOURCES else h
            if ROWS != DESTINATIONS:
                q, d_message, row_lse, row_delta = load_destinations(
                    query, query_at, d_out, out_at, lse, delta, lse_at, b, i, head, mask, KIND, NORMALIZE, WIDTH,
                    VALUE_WIDTH, REAL,
                )  # fmt: skip
            if ROWS == SOURCES:
                k = own_key
                messages = own_value
            else:
                k, messages = load_sources(
                    key, key_at, value, value_at, b, j, h // GROUP, mask, KIND, WIDTH, VALUE_WIDTH, REAL
                )
            s, inner, k = logits(
                q, k, v, edge_key, edge_key_at, key_types, bias, bias_at, b, edge_id, head, mask, scale, softcap, slope,
                KIND, TANH, SOFTCAP, WIDTH, REAL,
            )  # fmt: skip
            w = weights(s, row_lse, mask, NORMALIZE)
            dropped = w
            if DROPOUT:
                if ROWS == SOURCES and GROUP > 1:
                    of_streams = word(stream_key, first_stream + head)
                kept = of_edges * of_streams >= threshold
                dropped = tl.where(kept, w * keep_scale, 0.0)
            if ROWS == DESTINATIONS or d_rows is not None:
                if edge_value is not None:
                    table_row = table_rows(value_types, edge_id)
                    messages += load_vectors(edge_value, edge_value_at, b, table_row, head, mask, VALUE_WIDTH, REAL)
                d_w = tl.sum(d_message * messages, 3)
                if DROPOUT:
                    d_w = tl.where(kept, d_w * keep_scale, 0.0)
                if d_weights is not None:
                    d_w += load_numbers(d_weights, d_weights_at, b, edge_id, head, mask, REAL)
                d_s = tl.where(mask, logit_gradients(w, d_w, row_delta, NORMALIZE), 0.0)
            if d_values is not None:
                value_sums += dropped[:, :, :, None] * d_message
            if KIND != CONSTANT and (ROWS == DESTINATIONS or d_rows is not None):
                to_query, to_key = end_gradients(d_s, inner, q, k, v, scale, slope, KIND, TANH, SOFTCAP)
                sums += to_query if ROWS == DESTINATIONS else to_key
            if d_vector is not None:
                vector_sums += d_s[:, :, :, None] * activation(inner, slope, TANH)
            if d_bias is not None:
                store_numbers(d_bias, d_bias_at, b, edge_id, head, mask, d_s)
            if d_edge_value is not None:
                to_value = dropped[:, :, :, None] * d_message
                store_vectors(d_edge_value, d_edge_value_at, b, edge_id, head, mask, to_value, VALUE_WIDTH)
            if d_edge_key is not None:
                if KIND == ADDITIVE:
                    store_numbers(d_edge_key, d_edge_key_at, b, edge_id, head, mask, tl.sum(to_key, 3))
                else:
                    store_vectors(d_edge_key, d_edge_key_at, b, edge_id, head, mask, to_key, WIDTH)
    if d_rows is not None:
        row_sums = tl.sum(sums, 1)[:, None, :, :]
        store_rows(d_rows, d_rows_at, part, part_at, b, row, slot, h, exists, row_sums, WIDTH)
    if d_values is not None:
        row_sums = tl.sum(value_sums, 1)[:, None, :, :]
        store_rows(d_values, d_values_at, part_values, part_values_at, b, row, slot, h, exists, row_sums, VALUE_WIDTH)
    if d_vector is not None:
        at = (tl.program_id(0).to(tl.int64) * BH + tl.arange(0, BH)[:, None]) * WIDTH + tl.arange(0, WIDTH)
        tl.store(d_vector + at, tl.sum(tl.sum(vector_sums, 1), 0))
