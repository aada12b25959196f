"""Attention along the rows of a sparse graph: scores, normaliser and weighted sum in one pass."""

import triton
import triton.language as tl

from mpnn.kernels.cuda.hashing import kept
from mpnn.kernels.cuda.scores import ACTIVATED, CONSTANT, SOFTMAX, scores, weights
from mpnn.kernels.cuda.tensors import assigned, ends, numbers, put_numbers, put_vectors, vectors


@triton.jit
def attend(
    units, edges, blocks, heads, dst, src, value, vector, given, keys, threshold, grow: tl.float64,
    scale: tl.float64, cap: tl.float64, slope: tl.float64, out, norm, written, part, part_top, part_sum,
    GROUP: tl.constexpr, KIND: tl.constexpr, NORMALIZE: tl.constexpr, TANH: tl.constexpr, CAPPED: tl.constexpr,
    DROPS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BH: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """out [B, N_dst, H, DV] and norm [B, N_dst, H], the logarithm of what softmax divides by, of whole rows.

    Parts of divided rows go to their slots of part [B, slots, H, DV], part_top and part_sum [B, slots, H]. `written`
    [B, E, H] gets scores (weights without softmax) if it is given. `GROUP` heads share one of keys and values.
    """
    row, first, last, slot, h, there, b = assigned(units, blocks, heads, R, BH)
    of_dst = tl.zeros([1, 1, 1, 1], REAL)
    weighed = of_dst
    if KIND != CONSTANT:
        of_dst = vectors(dst, b, row, h, there, WIDTH, REAL)
    if KIND == ACTIVATED:
        d = tl.arange(0, WIDTH)
        mask = (h < heads)[:, None] & (d < dst.width)
        weighed = tl.load(vector + h[:, None] * dst.width + d, mask=mask, other=0.0).to(REAL)
    if DROPS:
        key = tl.load(keys + b * heads + h, mask=h < heads, other=0)
        grow = tl.full([], grow, REAL)
    scale, cap, slope = tl.full([], scale, REAL), tl.full([], cap, REAL), tl.full([], slope, REAL)
    # one online softmax for each place of the tile, put together at the end: a loop without waiting for other warps
    top = tl.full([R, E, BH], float("-inf"), REAL)
    total = tl.zeros([R, E, BH], REAL)
    sums = tl.zeros([R, E, BH, VALUE_WIDTH], REAL)
    longest = tl.max(tl.max(last - first, 1), 0)
    for t in range(0, longest, E):
        e = first + t + tl.arange(0, E)[None, :]
        is_edge = e < last
        j, number = ends(edges, e, is_edge)
        on = is_edge[:, :, None] & there
        of_src = of_dst if KIND == CONSTANT else vectors(src, b, j, h // GROUP, on, WIDTH, REAL)
        s, _, _ = scores(
            of_dst, of_src, weighed, given, number, b, h, on, scale, cap, slope, KIND, TANH, CAPPED, WIDTH, REAL
        )
        if NORMALIZE == SOFTMAX:
            if written is not None:
                put_numbers(written, b, number, h, on, s)
            s = tl.where(on, s, float("-inf"))
            higher = tl.maximum(top, s)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            w = tl.exp(s - shift)
            shrunk = tl.exp(top - shift)
            top = higher
            total = total * shrunk + w
            sums = sums * shrunk[:, :, :, None]
        else:
            w = weights(s, s, on, NORMALIZE)
            if written is not None:
                put_numbers(written, b, number, h, on, w)
        if DROPS:
            w = tl.where(kept(key, row, j, threshold), w * grow, 0.0)
        messages = vectors(value, b, j, h // GROUP, on, VALUE_WIDTH, REAL)
        if given.edge_value is not None:
            messages += vectors(given.edge_value, b, number, h, on, VALUE_WIDTH, REAL)
        sums += w[:, :, :, None] * messages
    if NORMALIZE == SOFTMAX:
        highest = tl.max(top, 1)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        shrunk = tl.exp(top - shift[:, None, :])
        row_total = tl.sum(total * shrunk, 1)
        sums = sums * shrunk[:, :, :, None]
    row_sums = tl.sum(sums, 1)
    here = (slot < 0)[:, :, None] & there
    if part is not None:
        elsewhere = (slot >= 0)[:, :, None] & there
        put_vectors(part, b, slot, h, elsewhere, row_sums[:, None, :, :], VALUE_WIDTH)
        if NORMALIZE == SOFTMAX:
            put_numbers(part_top, b, slot, h, elsewhere, highest[:, None, :])
            put_numbers(part_sum, b, slot, h, elsewhere, row_total[:, None, :])
    if NORMALIZE == SOFTMAX:
        row_sums, normed = finished(row_sums, highest, row_total)
        put_numbers(norm, b, row, h, here, normed[:, None, :])
    put_vectors(out, b, row, h, here, row_sums[:, None, :, :], VALUE_WIDTH)


@triton.jit
def finished(sums, top, total):
    """Weighted sums [R, BH, D] divided by the sums of their weights, and the logarithms of these; zeros for rows that
    hear nobody, or all of whose scores are -inf."""
    silent = total == 0.0
    sums = sums / tl.where(silent, 1.0, total)[:, :, None]
    return sums, tl.where(silent, 0.0, top + tl.log(tl.where(silent, 1.0, total)))


@triton.jit
def join(
    divided, blocks, heads, part, part_top, part_sum, out, norm, NORMALIZE: tl.constexpr, BH: tl.constexpr,
    WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Puts the parts of divided rows together, always in the same order."""
    k, rest = tl.program_id(0) % divided.count, tl.program_id(0) // divided.count
    h, b = ((rest % blocks) * BH + tl.arange(0, BH)).to(tl.int64), (rest // blocks).to(tl.int64)
    there = (h < heads)[None, None, :]
    top = tl.full([1, BH], float("-inf"), REAL)
    total = tl.zeros([1, BH], REAL)
    sums = tl.zeros([1, BH, WIDTH], REAL)
    for p in range(tl.load(divided.ptr + k), tl.load(divided.ptr + k + 1)):
        place = tl.zeros([1, 1], tl.int64) + p
        found = tl.sum(vectors(part, b, place, h, there, WIDTH, REAL), 1)
        if NORMALIZE == SOFTMAX:
            found_top = tl.sum(numbers(part_top, b, place, h, there, REAL), 1)
            found_total = tl.sum(numbers(part_sum, b, place, h, there, REAL), 1)
            higher = tl.maximum(top, found_top)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            ours, theirs = tl.exp(top - shift), tl.exp(found_top - shift)
            total = total * ours + found_total * theirs
            sums = sums * ours[:, :, None] + found * theirs[:, :, None]
            top = higher
        else:
            sums += found
    row = tl.zeros([1, 1], tl.int64) + tl.load(divided.row + k)
    if NORMALIZE == SOFTMAX:
        sums, normed = finished(sums, top, total)
        put_numbers(norm, b, row, h, there, normed[:, None, :])
    put_vectors(out, b, row, h, there, sums[:, None, :, :], WIDTH)
