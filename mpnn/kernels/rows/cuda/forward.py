"""Attention along the rows of a sparse graph: logits, normalizer and weighted sum in one pass.

    out_i = sum_j w_ij keep_ij / (1 - p) (v_j + edge_value_ij)
    w_ij  = exp(s_ij - lse_i), lse_i = log sum_j exp(s_ij); or sigmoid(s_ij), or s_ij: the logits of `logits.py`

    for each unit of rows:            one program for each block of heads of each batch entry
        load the queries
        for each E edges of a row:    R rows side by side
            gather keys: s; rescale the sums by the new maximum; gather values: add w v and w
        join the entries of the tile; write the row, or a part of it that `join` adds to the other parts

Called by `attention.py`.
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
    store_vectors,
    table_rows,
)
from mpnn.kernels.rows.cuda.logits import ACTIVATED, CONSTANT, SOFTMAX, logits, weights


@triton.jit
def attend(
    units, col, edge, query, key, value, vector, edge_key, key_types, edge_value, value_types, bias, seed, out,
    lse, edge_out, part, part_max, part_sum, query_at, key_at, value_at, edge_key_at, edge_value_at, bias_at, out_at,
    lse_at, edge_out_at, part_at, part_number_at, count, blocks, heads, first_stream, streams, threshold,
    keep_scale: tl.float64, scale: tl.float64, softcap: tl.float64, slope: tl.float64, GROUP: tl.constexpr,
    KIND: tl.constexpr, NORMALIZE: tl.constexpr, TANH: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    REAL: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """out [B, N_dst, H, DV] and lse [B, N_dst, H] of whole rows.

    Parts of divided rows go to their slots of part [B, slots, H, DV], part_max and part_sum [B, slots, H]. `edge_out`
    [B, E, H], if not None, gets logits (weights without softmax). `GROUP` heads share a key and a value.
    """
    row, first, last, slot, h, exists, b = rows_of_program(units, count, blocks, heads, R, BH, INDEX)
    q = tl.zeros([1, 1, 1, 1], REAL)
    v = q
    if KIND != CONSTANT:
        q = load_vectors(query, query_at, b, row, h, exists, WIDTH, REAL)
    if KIND == ACTIVATED:
        v = load_parameter(vector, h, heads, query_at.width, WIDTH, REAL)
    if DROPOUT:
        dst_key, src_key, stream_key = role_keys(seed)
        of_streams = word(stream_key, b * streams + first_stream + h)
        keep_scale = tl.full([], keep_scale, REAL)
    scale, softcap, slope = tl.full([], scale, REAL), tl.full([], softcap, REAL), tl.full([], slope, REAL)
    # an online softmax for each entry of the tile, joined after the loop, so that no iteration waits for other warps
    row_max = tl.full([R, E, BH], float("-inf"), REAL)
    row_sum = tl.zeros([R, E, BH], REAL)
    sums = tl.zeros([R, E, BH, VALUE_WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    next_j, next_id, next_mask = other_ends(col, edge, first, last, exists, E)
    for t in range(0, longest, E):
        j = next_j
        edge_id = next_id
        mask = next_mask
        next_j, next_id, next_mask = other_ends(col, edge, first + t + E, last, exists, E)
        k = q if KIND == CONSTANT else load_vectors(key, key_at, b, j, h // GROUP, mask, WIDTH, REAL)
        s, _, _ = logits(
            q, k, v, edge_key, edge_key_at, key_types, bias, bias_at, b, edge_id, h, mask, scale, softcap, slope, KIND,
            TANH, SOFTCAP, WIDTH, REAL,
        )  # fmt: skip
        if NORMALIZE == SOFTMAX:
            if edge_out is not None:
                store_numbers(edge_out, edge_out_at, b, edge_id, h, mask, s)
            s = tl.where(mask, s, float("-inf"))
            new_max = tl.maximum(row_max, s)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            w = tl.exp(s - shift)
            rescale = tl.exp(row_max - shift)
            row_max = new_max
            row_sum = row_sum * rescale + w
            sums = sums * rescale[:, :, :, None]
        else:
            w = weights(s, s, mask, NORMALIZE)
            if edge_out is not None:
                store_numbers(edge_out, edge_out_at, b, edge_id, h, mask, w)
        if DROPOUT:
            of_edges = (word(dst_key, row) * word(src_key, j))[:, :, None]
            w = tl.where(of_edges * of_streams >= threshold, w * keep_scale, 0.0)
        messages = load_vectors(value, value_at, b, j, h // GROUP, mask, VALUE_WIDTH, REAL)
        if edge_value is not None:
            table_row = table_rows(value_types, edge_id)
            messages += load_vectors(edge_value, edge_value_at, b, table_row, h, mask, VALUE_WIDTH, REAL)
        sums += w[:, :, :, None] * messages
    if NORMALIZE == SOFTMAX:
        tile_max = tl.max(row_max, 1)
        shift = tl.where(tile_max == float("-inf"), 0.0, tile_max)
        rescale = tl.exp(row_max - shift[:, None, :])
        tile_sum = tl.sum(row_sum * rescale, 1)
        sums = sums * rescale[:, :, :, None]
    total = tl.sum(sums, 1)
    whole = (slot < 0)[:, :, None] & exists
    if part is not None:
        divided = (slot >= 0)[:, :, None] & exists
        store_vectors(part, part_at, b, slot, h, divided, total[:, None, :, :], VALUE_WIDTH)
        if NORMALIZE == SOFTMAX:
            store_numbers(part_max, part_number_at, b, slot, h, divided, tile_max[:, None, :])
            store_numbers(part_sum, part_number_at, b, slot, h, divided, tile_sum[:, None, :])
    if NORMALIZE == SOFTMAX:
        total, row_lse = normalize(total, tile_max, tile_sum)
        store_numbers(lse, lse_at, b, row, h, whole, row_lse[:, None, :])
    store_vectors(out, out_at, b, row, h, whole, total[:, None, :, :], VALUE_WIDTH)


@triton.jit
def normalize(sums, row_max, row_sum):
    """Weighted sums [R, BH, D] divided by the sums of their weights, and the log-sum-exp. Rows without in-neighbors, or
    whose logits are all -inf, are zeros, and their log-sum-exp is inf, so that their weights are exp(s - inf) = 0."""
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    return sums / row_sum[:, :, None], tl.where(empty, float("inf"), row_max + tl.log(row_sum))


@triton.jit
def join(
    rows, ptr, part, part_max, part_sum, out, lse, part_at, part_number_at, out_at, lse_at, count, blocks, heads,
    NORMALIZE: tl.constexpr, BH: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Joins the parts of the `count` divided rows, always in the same order: row `rows[n]` has slots ptr[n] to
    ptr[n + 1]."""
    n = tl.program_id(0) % count
    rest = tl.program_id(0) // count
    h, b = ((rest % blocks) * BH + tl.arange(0, BH)).to(tl.int64), (rest // blocks).to(tl.int64)
    mask = (h < heads)[None, None, :]
    row_max = tl.full([1, BH], float("-inf"), REAL)
    row_sum = tl.zeros([1, BH], REAL)
    sums = tl.zeros([1, BH, WIDTH], REAL)
    for p in range(tl.load(ptr + n), tl.load(ptr + n + 1)):
        slot = tl.zeros([1, 1], tl.int64) + p
        next_sums = tl.sum(load_vectors(part, part_at, b, slot, h, mask, WIDTH, REAL), 1)
        if NORMALIZE == SOFTMAX:
            next_max = tl.sum(load_numbers(part_max, part_number_at, b, slot, h, mask, REAL), 1)
            next_sum = tl.sum(load_numbers(part_sum, part_number_at, b, slot, h, mask, REAL), 1)
            new_max = tl.maximum(row_max, next_max)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale, next_rescale = tl.exp(row_max - shift), tl.exp(next_max - shift)
            row_sum = row_sum * rescale + next_sum * next_rescale
            sums = sums * rescale[:, :, None] + next_sums * next_rescale[:, :, None]
            row_max = new_max
        else:
            sums += next_sums
    row = tl.zeros([1, 1], tl.int64) + tl.load(rows + n)
    if NORMALIZE == SOFTMAX:
        sums, row_lse = normalize(sums, row_max, row_sum)
        store_numbers(lse, lse_at, b, row, h, mask, row_lse[:, None, :])
    store_vectors(out, out_at, b, row, h, mask, sums[:, None, :, :], WIDTH)
