"""Sums, means, extremes and spreads along the rows of a sparse graph, and their gradients: one pass, nothing of E x D.

Rows are shared out as those of attention are. Gradients of sources go over the transposed graph.
"""

import triton
import triton.language as tl

from mpnn.kernels.cuda.tensors import assigned, ends, numbers, put_numbers, put_vectors, vectors

SUM, SQUARES, LARGEST, SMALLEST = (tl.constexpr(kind) for kind in range(4))  # the last two are extremes


@triton.jit
def fold(
    units, edges, ptr, blocks, heads, x, weight, own, out, equal, part, part_equal, KIND: tl.constexpr,
    MEAN: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """What `KIND` says of the messages `weight_e * x_j` into out [B, rows, H, D], and how many equal an extreme into
    `equal` if that is given. SQUARES are about `own` [B, rows, H, D]. `MEAN`: divided by the number of edges.

    Parts of divided rows go to their slots of part and part_equal [B, slots, H, D].
    """
    row, first, last, slot, h, there, b = assigned(units, blocks, heads, R, BH)
    result = tl.zeros([R, E, BH, WIDTH], REAL)  # of each place of the tile, put together at the end
    if KIND >= LARGEST:
        result = tl.full([R, E, BH, WIDTH], float("-inf"), REAL)
    bad = tl.zeros([R, E, BH, WIDTH], REAL)  # NaN where a message is: comparisons pass NaN by
    count = tl.zeros([R, E, BH, WIDTH], REAL)
    if KIND == SQUARES:
        middle = vectors(own, b, row, h, there, WIDTH, REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        j, number = ends(edges, e, is_edge)
        on = is_edge[:, :, None] & there
        messages = vectors(x, b, j, h, on, WIDTH, REAL)
        if weight is not None:
            messages *= numbers(weight, b, number, h, on, REAL)[:, :, :, None]
        if KIND == SUM:
            result += messages
        elif KIND == SQUARES:
            apart = tl.where(on[:, :, :, None], messages - middle, 0.0)
            result += apart * apart
        else:
            if KIND == SMALLEST:
                messages = -messages
            bad += tl.where(messages != messages, messages, 0.0)
            messages = tl.where(on[:, :, :, None], messages, float("-inf"))
            higher = tl.maximum(result, messages)
            if equal is not None:
                same = (messages == higher) & on[:, :, :, None]
                count = tl.where(higher > result, 0.0, count) + same.to(REAL)
            result = higher
    if KIND >= LARGEST:
        highest = tl.max(result, 1)
        row_count = tl.sum(tl.where(result == highest[:, None, :, :], count, 0.0), 1)[:, None, :, :]
        row_result = highest + tl.sum(bad, 1)
    else:
        row_result = tl.sum(result, 1)
    here, elsewhere = (slot < 0)[:, :, None] & there, (slot >= 0)[:, :, None] & there
    if part is not None:
        put_vectors(part, b, slot, h, elsewhere, row_result[:, None, :, :], WIDTH)
        if equal is not None:
            put_vectors(part_equal, b, slot, h, elsewhere, row_count, WIDTH)
    degree = last - first
    put_vectors(out, b, row, h, here, finished(row_result, degree[:, :, None], KIND, MEAN)[:, None, :, :], WIDTH)
    if equal is not None:
        put_vectors(equal, b, row, h, here, row_count, WIDTH)


@triton.jit
def finished(result, degree, KIND: tl.constexpr, MEAN: tl.constexpr):
    """Results [R, BH, D] of rows that have so many edges, [R, 1, 1]; zeros for rows without any."""
    if KIND == SMALLEST:
        result = -result
    if MEAN:
        return result / tl.maximum(degree, 1).to(result.dtype)
    else:
        return tl.where(degree > 0, result, 0.0)


@triton.jit
def join(
    divided, ptr, blocks, heads, part, part_equal, out, equal, KIND: tl.constexpr, MEAN: tl.constexpr,
    BH: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Puts the parts of divided rows together, always in the same order."""
    k, rest = tl.program_id(0) % divided.count, tl.program_id(0) // divided.count
    h, b = ((rest % blocks) * BH + tl.arange(0, BH)).to(tl.int64), (rest // blocks).to(tl.int64)
    there = (h < heads)[None, None, :]
    result = tl.zeros([1, BH, WIDTH], REAL)
    if KIND >= LARGEST:
        result = tl.full([1, BH, WIDTH], float("-inf"), REAL)
    bad = tl.zeros([1, BH, WIDTH], REAL)
    count = tl.zeros([1, BH, WIDTH], REAL)
    for p in range(tl.load(divided.ptr + k), tl.load(divided.ptr + k + 1)):
        place = tl.zeros([1, 1], tl.int64) + p
        found = tl.sum(vectors(part, b, place, h, there, WIDTH, REAL), 1)
        if KIND >= LARGEST:
            bad += tl.where(found != found, found, 0.0)
            higher = tl.maximum(result, found)
            if equal is not None:
                more = tl.sum(vectors(part_equal, b, place, h, there, WIDTH, REAL), 1)
                count = tl.where(higher > result, 0.0, count) + tl.where(found == higher, more, 0.0)
            result = higher
        else:
            result += found
    row = tl.load(divided.row + k)
    degree = tl.load(ptr + row + 1) - tl.load(ptr + row) + tl.zeros([1, 1, 1], tl.int64)
    place = tl.zeros([1, 1], tl.int64) + row
    put_vectors(out, b, place, h, there, finished(result + bad, degree, KIND, MEAN)[:, None, :, :], WIDTH)
    if equal is not None:
        put_vectors(equal, b, place, h, there, count[:, None, :, :], WIDTH)


@triton.jit
def spread(
    units, edges, blocks, heads, x, weight, d_out, compared, d_x, d_weight, part, KIND: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Gradients by source: d_x [B, N_src, H, D] of whole rows, parts of others into part [B, slots, H, D], and d_weight
    [B, E, H] if it is given.

    d_out [B, N_dst, H, D] is divided already by what it is shared among: the number of edges (over 2, for SQUARES), or
    of messages that equal an extreme. `compared` [B, N_dst, H, D] are the extremes, or what SQUARES are about.
    """
    row, first, last, slot, h, there, b = assigned(units, blocks, heads, R, BH)
    own = vectors(x, b, row, h, there, WIDTH, REAL)
    sums = tl.zeros([R, E, BH, WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        i, number = ends(edges, e, is_edge)
        on = is_edge[:, :, None] & there
        pull = vectors(d_out, b, i, h, on, WIDTH, REAL)
        w = tl.full([1, 1, 1, 1], 1.0, REAL)
        if weight is not None:
            w = numbers(weight, b, number, h, on, REAL)[:, :, :, None]
        if KIND == SQUARES:
            pull = pull * (w * own - vectors(compared, b, i, h, on, WIDTH, REAL))
        elif KIND >= LARGEST:
            pull = tl.where(w * own == vectors(compared, b, i, h, on, WIDTH, REAL), pull, 0.0)
        if d_weight is not None:
            put_numbers(d_weight, b, number, h, on, tl.sum(pull * own, 3))
        sums += w * pull
    if d_x is not None:
        row_sums = tl.sum(sums, 1)[:, None, :, :]
        put_vectors(d_x, b, row, h, (slot < 0)[:, :, None] & there, row_sums, WIDTH)
        if part is not None:
            put_vectors(part, b, slot, h, (slot >= 0)[:, :, None] & there, row_sums, WIDTH)
