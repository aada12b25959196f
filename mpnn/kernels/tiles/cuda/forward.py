"""Attention over the tiles of a graph, forward: logits, an online softmax and the weighted sum in one pass.

    out_i = sum_j p_ij keep_ij / (1 - p) v_j      p_ij = exp(x_ij - lse_i)      lse_i = log sum_j exp(x_ij)

    for each unit of a row of tiles:      one program for each head of each batch entry
        load the queries
        for each tile of the unit:        the full ones, then the partial ones
            for each step of the tile:    STEP keys
                x = q k^T; rescale the sums by the new maximum; add exp(x) v and exp(x)
        write the rows, or a part of them that `join` adds to the other parts

Called by `attention.attend`. The online softmax is that of FlashAttention (Dao et al. 2022).
"""

import triton
import triton.language as tl

from mpnn.kernels.tiles.cuda.pairs import (
    INTEGERS,
    LN2,
    LOWEST,
    add_dot,
    factor,
    kept,
    load_nodes,
    load_planes,
    load_rows,
    load_unit,
    load_words,
    logits,
    planes_of,
    store_rows,
    unless_dropped,
)


@triton.jit(do_not_specialize=INTEGERS)
def attend(
    query, key, value, out, lse, norm, part, part_norm, units, columns, patterns, numbers, words, edges_before,
    table, bias, dst_bias, src_bias, dst_words, src_words, stream_words, threshold, keep_scale, scale, softcap,
    copies, heads, num_dst, num_src, query_b, query_n, query_h, query_p, key_b, key_n, key_h, key_p,
    value_b, value_n, value_h, value_p, bias_b, bias_h,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out [B, N_dst, H, DV]; lse [B, H, N_dst], +inf for a row without edges; norm is lse of base 2.

    Parts of divided rows go to part [slots, B * H, ROWS, WIDTH_V] and part_norm [slots, B * H, ROWS].
    """
    STEPS: tl.constexpr = COLUMNS // STEP
    top, first, middle, last, slot, place, middle_place, pattern, copy, b, h = load_unit(units, copies, heads)
    query += b * query_b + h * query_h
    key += b * key_b + h // GROUP * key_h
    value += b * value_b + h // GROUP * value_h
    n = tl.arange(0, ROWS)
    i = top * ROWS + n
    dst = tl.zeros([ROWS], tl.float32)
    of_query = n
    if table is not None:
        table += h * (num_dst + num_src - 1) + num_src - 1
    if bias is not None:
        bias += b * bias_b + h * bias_h
    if dst_bias is not None:
        dst = load_nodes(dst_bias + tl.cast(copy, tl.int64) * num_dst, i, num_dst)
        src_bias += tl.cast(copy, tl.int64) * num_src
    if dst_words is not None:
        of_query = load_words(dst_words, i, num_dst, True) * tl.load(stream_words + copy)
    to_base_2 = factor(table, bias, dst_bias, scale, softcap)
    q, q1, q2 = load_planes(query, query_p, top * ROWS, query_n, num_dst, ROWS, D, WIDTH, True, PLANES)
    acc = tl.zeros([ROWS, WIDTH_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], LOWEST, tl.float32)
    for partial in tl.static_range(2):
        begin = first
        end = middle
        column = place
        if partial:
            begin = middle
            end = last
            column = middle_place
        for t in range(begin * STEPS, end * STEPS):
            # read ahead, so that the next tile's keys can be loaded while this one is computed
            next_column = tl.load(columns + (t + 1) // STEPS)
            offset = t % STEPS * STEP
            left = column * COLUMNS + offset
            j = left + tl.arange(0, STEP)
            k, k1, k2 = load_planes(key, key_p, left, key_n, num_src, STEP, D, WIDTH, partial, PLANES)
            src = j.to(tl.float32)
            if dst_bias is not None:
                src = load_nodes(src_bias, j, num_src)
            x, _, is_edge, _ = logits(
                q, q1, q2, k, k1, k2, i[:, None], j[None, :], dst[:, None], src[None, :], pattern, numbers + t // STEPS,
                0, offset, words, edges_before, table, bias, dst_bias, scale, softcap, num_dst, num_src,
                ROWS, COLUMNS, ROWS, STEP, partial, False, PLANES,
            )  # fmt: skip
            if partial:
                x = tl.where(is_edge, x, float("-inf"))
                pattern = tl.load(patterns + (t + 1) // STEPS)
            now = tl.maximum(most, tl.max(x, 1) * to_base_2)
            p = tl.exp2(x * to_base_2 - now[:, None])
            fade = tl.exp2(most - now)
            total = total * fade + tl.sum(p, 1)
            if dst_words is not None:
                of_key = load_words(src_words, j, num_src, partial)
                p = unless_dropped(kept(of_query[:, None], of_key[None, :], threshold), p, keep_scale)
            v, v1, v2 = load_planes(value, value_p, left, value_n, num_src, STEP, DV, WIDTH_V, partial, PLANES)
            p, p1, p2 = planes_of(p, v, PLANES)
            acc = add_dot(acc * fade[:, None], p, p1, p2, v, v1, v2, PLANES)
            most = now
            column = next_column
    if dst_words is not None:
        acc *= keep_scale
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    sums = tl.where(total > 0, most + tl.log2(total), float("inf"))
    if slot < 0:
        of_rows = tl.cast(copy, tl.int64) * num_dst + i
        store_rows(out + (b * num_dst * heads + h) * DV, acc, top * ROWS, heads * DV, num_dst, ROWS, DV, WIDTH_V)
        tl.store(norm + of_rows, sums, mask=i < num_dst)
        tl.store(lse + of_rows, sums * LN2, mask=i < num_dst)
    else:
        at = (tl.cast(slot, tl.int64) * copies + copy) * ROWS
        store_rows(part + at * WIDTH_V, acc, 0, WIDTH_V, ROWS, ROWS, WIDTH_V, WIDTH_V)
        tl.store(part_norm + at + n, sums)


@triton.jit(do_not_specialize=INTEGERS)
def join(
    part, part_norm, out, lse, norm, divided, copies, heads, num_dst,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """STEP rows of a divided row of tiles: the mean of its parts, weighted by their sums of weights."""
    steps = ROWS // STEP
    copy = tl.program_id(0) % copies
    rest = tl.program_id(0) // copies
    skipped = rest % steps * STEP
    divided += rest // steps * 3
    top = tl.load(divided) * ROWS + skipped
    first = tl.load(divided + 1)
    last = tl.load(divided + 2)
    n = tl.arange(0, STEP)
    acc, total = tl.zeros([STEP, WIDTH], tl.float32), tl.zeros([STEP], tl.float32)
    most = tl.full([STEP], LOWEST, tl.float32)
    for slot in range(first, last):
        at = (tl.cast(slot, tl.int64) * copies + copy) * ROWS + skipped
        sums = tl.load(part_norm + at + n)
        sums = tl.where(sums == float("inf"), float("-inf"), sums)  # a part without edges
        now = tl.maximum(most, sums)
        fade, weight = tl.exp2(most - now), tl.exp2(sums - now)
        rows = load_rows(part + at * WIDTH, 0, WIDTH, STEP, STEP, WIDTH, WIDTH, False)
        acc = acc * fade[:, None] + rows * weight[:, None]
        total = total * fade + weight
        most = now
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    sums = tl.where(total > 0, most + tl.log2(total), float("inf"))
    b, h = tl.cast(copy // heads, tl.int64), tl.cast(copy % heads, tl.int64)
    store_rows(out + (b * num_dst * heads + h) * D, acc, top, heads * D, num_dst, STEP, D, WIDTH)
    at = tl.cast(copy, tl.int64) * num_dst + top + n
    tl.store(norm + at, sums, mask=top + n < num_dst)
    tl.store(lse + at, sums * LN2, mask=top + n < num_dst)


@triton.jit(do_not_specialize=INTEGERS)
def split(x, planes, items, nodes, heads, x_b, x_n, x_h, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Three bfloat16 planes [3, B, N, H, D] whose sum is x [B, N, H, D]; `items` is B * N * H."""
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    mask = (row < items)[:, None] & (d < D)[None, :]
    at = row // heads // nodes * x_b + row // heads % nodes * x_n + row % heads * x_h
    rest = tl.load(x + at[:, None] + d[None, :], mask=mask, other=0.0)
    to = row[:, None] * D + d[None, :]
    for plane in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(planes + plane * tl.cast(items, tl.int64) * D + to, part, mask=mask)
        rest -= part.to(tl.float32)
