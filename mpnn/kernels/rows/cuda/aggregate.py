"""Sums, means, extremes and sums of squares along the rows of a sparse graph, and their gradients: one pass, without an
E x D tensor.

    SUM         y_i = sum_j w_ij x_j                  dx_j = sum_i w_ij dy_i
    CENTERED    y_i = sum_j (w_ij x_j - c_i)          c_i is a message of the row
    SQUARES     y_i = sum_j (w_ij x_j - mean_i)^2     dx_j = sum_i w_ij dy_i (w_ij x_j - mean_i)
    extremes    y_i = max_j w_ij x_j                  dx_j = sum_i w_ij dy_i [w_ij x_j = y_i]

    for each unit of rows:            one program for each block of heads of each batch entry
        for each E edges of a row:    R rows side by side
            gather messages; reduce each entry of the tile
        join the entries; write the row, or a part that `join` adds to the other parts

Rows are distributed as in attention (`schedule`). Gradients of sources are sums over the transposed graph. Called by
`reduce.py`.
"""

import triton
import triton.language as tl

from mpnn.kernels.cuda.tensors import (
    load_numbers,
    load_vectors,
    other_ends,
    rows_of_program,
    store_numbers,
    store_rows,
    store_vectors,
)

SUM, SQUARES, CENTERED, LARGEST, SMALLEST = (tl.constexpr(kind) for kind in range(5))  # the last two are extremes


@triton.jit
def segment_reduce(
    units, col, edge, x, weight, own, offset, out, equal, part, part_equal, x_at, weight_at, out_at, part_at, count,
    blocks, heads, KIND: tl.constexpr, MEAN: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, REAL: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Reduces the messages `weight_e * x_j` of each row by `KIND` into out [B, rows, H, D], and counts those that equal
    an extreme into `equal`, if not None. CENTERED are the distances from `own` [B, rows, H, D], SQUARES the squares of
    those from `own + offset`, whose sum would be rounded by more than messages that are nearly equal differ. `MEAN`:
    divided by the number of edges. Parts of divided rows go to their slots of part and part_equal [B, slots, H, D].
    """
    row, first, last, slot, h, exists, b = rows_of_program(units, count, blocks, heads, R, BH, INDEX)
    result = tl.zeros([R, E, BH, WIDTH], REAL)  # of each entry of the tile, joined after the loop
    if KIND >= LARGEST:
        result = tl.full([R, E, BH, WIDTH], float("-inf"), REAL)
    bad = tl.zeros([R, E, BH, WIDTH], REAL)  # NaN where a message is NaN, which comparisons skip
    counted = tl.zeros([R, E, BH, WIDTH], REAL)
    if KIND != SUM and KIND < LARGEST:
        middle = load_vectors(own, out_at, b, row, h, exists, WIDTH, REAL)
    if KIND == SQUARES:
        beyond = load_vectors(offset, out_at, b, row, h, exists, WIDTH, REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    next_j, next_id, next_mask = other_ends(col, edge, first, last, exists, E)
    for t in range(0, longest, E):
        j = next_j
        edge_id = next_id
        mask = next_mask
        next_j, next_id, next_mask = other_ends(col, edge, first + t + E, last, exists, E)
        messages = load_vectors(x, x_at, b, j, h, mask, WIDTH, REAL)
        if weight is not None:
            messages *= load_numbers(weight, weight_at, b, edge_id, h, mask, REAL)[:, :, :, None]
        if KIND == SUM:
            result += messages
        elif KIND < LARGEST:
            apart = messages - middle
            if KIND == SQUARES:
                apart = (apart - beyond) * (apart - beyond)
            result += tl.where(mask[:, :, :, None], apart, 0.0)
        else:
            if KIND == SMALLEST:
                messages = -messages
            bad += tl.where(messages != messages, messages, 0.0)
            messages = tl.where(mask[:, :, :, None], messages, float("-inf"))
            new_result = tl.maximum(result, messages)
            if equal is not None:
                same = (messages == new_result) & mask[:, :, :, None]
                counted = tl.where(new_result > result, 0.0, counted) + same.to(REAL)
            result = new_result
    if KIND >= LARGEST:
        highest = tl.max(result, 1)
        row_count = tl.sum(tl.where(result == highest[:, None, :, :], counted, 0.0), 1)[:, None, :, :]
        row_result = highest + tl.sum(bad, 1)
    else:
        row_result = tl.sum(result, 1)
    whole = (slot < 0)[:, :, None] & exists
    divided = (slot >= 0)[:, :, None] & exists
    if part is not None:
        store_vectors(part, part_at, b, slot, h, divided, row_result[:, None, :, :], WIDTH)
        if equal is not None:
            store_vectors(part_equal, part_at, b, slot, h, divided, row_count, WIDTH)
    degree = last - first
    row_result = normalize(row_result, degree[:, :, None], KIND, MEAN)[:, None, :, :]
    store_vectors(out, out_at, b, row, h, whole, row_result, WIDTH)
    if equal is not None:
        store_vectors(equal, out_at, b, row, h, whole, row_count, WIDTH)


@triton.jit
def normalize(result, degree, KIND: tl.constexpr, MEAN: tl.constexpr):
    """The results [R, BH, D] of rows with `degree` [R, 1, 1] edges; zeros for rows without edges."""
    if KIND == SMALLEST:
        result = -result
    if MEAN:
        return result / tl.maximum(degree, 1).to(result.dtype)
    else:
        return tl.where(degree > 0, result, 0.0)


@triton.jit
def join(
    rows, ptr, edge_ptr, part, part_equal, out, equal, part_at, out_at, count, blocks, heads, KIND: tl.constexpr,
    MEAN: tl.constexpr, BH: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Joins the parts of the `count` divided rows, always in the same order: row `rows[k]` has slots ptr[k] to
    ptr[k + 1], and edges from `edge_ptr[row]` on."""
    k = tl.program_id(0) % count
    rest = tl.program_id(0) // count
    h, b = ((rest % blocks) * BH + tl.arange(0, BH)).to(tl.int64), (rest // blocks).to(tl.int64)
    exists = (h < heads)[None, None, :]
    result = tl.zeros([1, BH, WIDTH], REAL)
    if KIND >= LARGEST:
        result = tl.full([1, BH, WIDTH], float("-inf"), REAL)
    bad = tl.zeros([1, BH, WIDTH], REAL)
    counted = tl.zeros([1, BH, WIDTH], REAL)
    for p in range(tl.load(ptr + k), tl.load(ptr + k + 1)):
        place = tl.zeros([1, 1], tl.int64) + p
        next_result = tl.sum(load_vectors(part, part_at, b, place, h, exists, WIDTH, REAL), 1)
        if KIND >= LARGEST:
            bad += tl.where(next_result != next_result, next_result, 0.0)
            new_result = tl.maximum(result, next_result)
            if equal is not None:
                more = tl.sum(load_vectors(part_equal, part_at, b, place, h, exists, WIDTH, REAL), 1)
                counted = tl.where(new_result > result, 0.0, counted) + tl.where(next_result == new_result, more, 0.0)
            result = new_result
        else:
            result += next_result
    row = tl.load(rows + k)
    degree = tl.load(edge_ptr + row + 1) - tl.load(edge_ptr + row) + tl.zeros([1, 1, 1], tl.int64)
    place = tl.zeros([1, 1], tl.int64) + row
    result = normalize(result + bad, degree, KIND, MEAN)
    store_vectors(out, out_at, b, place, h, exists, result[:, None, :, :], WIDTH)
    if equal is not None:
        store_vectors(equal, out_at, b, place, h, exists, counted[:, None, :, :], WIDTH)


@triton.jit
def segment_reduce_backward(
    units, col, edge, x, weight, d_out, compared, offset, d_x, d_weight, part, x_at, weight_at, d_out_at, d_x_at,
    d_weight_at, part_at, count, blocks, heads, KIND: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, REAL: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Gradients by source: d_x [B, N_src, H, D] of whole rows, parts of others into part [B, slots, H, D], and d_weight
    [B, E, H], if not None.

    The caller has divided d_out [B, N_dst, H, D] by the number of edges (over 2, for SQUARES), or by the number of
    messages that equal an extreme. `compared` [B, N_dst, H, D] holds the extremes. SQUARES are taken from the means
    `compared + offset`.
    """
    row, first, last, slot, h, exists, b = rows_of_program(units, count, blocks, heads, R, BH, INDEX)
    own = load_vectors(x, x_at, b, row, h, exists, WIDTH, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    next_i, next_id, next_mask = other_ends(col, edge, first, last, exists, E)
    for t in range(0, longest, E):
        i = next_i
        edge_id = next_id
        mask = next_mask
        next_i, next_id, next_mask = other_ends(col, edge, first + t + E, last, exists, E)
        d_message = load_vectors(d_out, d_out_at, b, i, h, mask, WIDTH, REAL)
        w = tl.full([1, 1, 1, 1], 1.0, REAL)
        if weight is not None:
            w = load_numbers(weight, weight_at, b, edge_id, h, mask, REAL)[:, :, :, None]
        if KIND == SQUARES:
            apart = w * own - load_vectors(compared, d_out_at, b, i, h, mask, WIDTH, REAL)
            d_message = d_message * (apart - load_vectors(offset, d_out_at, b, i, h, mask, WIDTH, REAL))
        elif KIND >= LARGEST:
            extreme = load_vectors(compared, d_out_at, b, i, h, mask, WIDTH, REAL)
            unequal = tl.where(extreme == extreme, 0.0, extreme)  # an extreme of NaN has no gradient but NaN
            d_message = tl.where(w * own == extreme, d_message, unequal)
        if d_weight is not None:
            store_numbers(d_weight, d_weight_at, b, edge_id, h, mask, tl.sum(d_message * own, 3))
        sums += w * d_message
    if d_x is not None:
        row_sums = tl.sum(sums, 1)[:, None, :, :]
        store_rows(d_x, d_x_at, part, part_at, b, row, slot, h, exists, row_sums, WIDTH)
