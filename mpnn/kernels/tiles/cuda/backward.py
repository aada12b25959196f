"""Attention over the tiles of a graph, backward. Weights are computed again from the logits and `lse`.

    p_ij   = exp(x_ij - lse_i)          w_ij = p_ij keep_ij / (1 - p)          dw_ij = <g_i, v_j> keep_ij / (1 - p)
    dx_ij  = p_ij (dw_ij - delta_i)     delta_i = <g_i, out_i> - d_lse_i
    d_v_j  = sum_i w_ij g_i             d_bias_ij = dx_ij         d_table[offset] = sum of dx_ij with i - j = offset
    d_q_i  = scale sum_j dx_ij (1 - tanh_ij^2) k_j                d_k_j  = scale sum_i dx_ij (1 - tanh_ij^2) q_i

    deltas:         delta of each row, next to its log-sum-exp
    by_query:       d_q and d_bias; for each unit of a row of tiles, for each step of its tiles: STEP keys
    by_key:         d_k, d_v and d_src; for each unit of a column of tiles, for each head that shares the keys, for
                    each step of its tiles: STEP queries
    by_offset:      dx of all tiles of a part of a diagonal and of all batch entries, added up as a tile
    add_diagonals:  d_table, from these tiles
    add_parts:      rows that several units share

Each number is added up in a fixed order, without atomics: the results have the same bits in each run. Called by
`attention.attend`.
"""

import triton
import triton.language as tl

from mpnn.kernels.tiles.cuda.pairs import (
    INTEGERS,
    add_dot,
    gradients,
    load_nodes,
    load_planes,
    load_rows,
    load_unit,
    load_words,
    planes_of,
    store_rows,
)


@triton.jit(do_not_specialize=INTEGERS)
def deltas(
    out, d_out, norm, d_lse, stats, copies, heads, num_dst, d_out_b, d_out_n, d_out_h,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """stats [B, H, N_dst, 2]: the log-sum-exp of each row (base 2), and delta."""
    copy = tl.program_id(0) % copies
    first = tl.program_id(0) // copies * ROWS
    b, h = tl.cast(copy // heads, tl.int64), tl.cast(copy % heads, tl.int64)
    o = load_rows(out + (b * num_dst * heads + h) * D, first, heads * D, num_dst, ROWS, D, WIDTH, True)
    g = load_rows(d_out + b * d_out_b + h * d_out_h, first, d_out_n, num_dst, ROWS, D, WIDTH, True)
    i = first + tl.arange(0, ROWS)
    at = tl.cast(copy, tl.int64) * num_dst + i
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + at, mask=i < num_dst, other=0.0)
    tl.store(stats + at * 2, tl.load(norm + at, mask=i < num_dst, other=0.0), mask=i < num_dst)
    tl.store(stats + at * 2 + 1, delta, mask=i < num_dst)


@triton.jit(do_not_specialize=INTEGERS)
def by_query(
    query, key, value, d_out, stats, d_query, d_bias, part, units, columns, patterns, numbers, words, edges_before,
    table, bias, dst_bias, src_bias, dst_words, src_words, stream_words, threshold, keep_scale, scale, softcap,
    copies, heads, num_dst, num_src, query_b, query_n, query_h, query_p, key_b, key_n, key_h, key_p,
    value_b, value_n, value_h, value_p, d_out_b, d_out_n, d_out_h, d_out_p, bias_b, bias_h, d_bias_h,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """d_query [B, N_dst, H, D], parts of divided rows to part [slots, B * H, ROWS, WIDTH]; d_bias [B, H, edges]."""
    STEPS: tl.constexpr = COLUMNS // STEP
    top, first, middle, last, slot, place, middle_place, pattern, copy, b, h = load_unit(units, copies, heads)
    query += b * query_b + h * query_h
    key += b * key_b + h // GROUP * key_h
    value += b * value_b + h // GROUP * value_h
    d_out += b * d_out_b + h * d_out_h
    i = top * ROWS + tl.arange(0, ROWS)
    dst = tl.zeros([ROWS], tl.float32)
    of_query = i
    if table is not None:
        table += h * (num_dst + num_src - 1) + num_src - 1
    if bias is not None:
        bias += b * bias_b + h * bias_h
    if d_bias is not None:
        d_bias += tl.cast(copy, tl.int64) * d_bias_h
    if dst_bias is not None:
        dst = load_nodes(dst_bias + tl.cast(copy, tl.int64) * num_dst, i, num_dst)
        src_bias += tl.cast(copy, tl.int64) * num_src
    if dst_words is not None:
        of_query = load_words(dst_words, i, num_dst, True) * tl.load(stream_words + copy)
    q, q1, q2 = load_planes(query, query_p, top * ROWS, query_n, num_dst, ROWS, D, WIDTH, True, PLANES)
    g, g1, g2 = load_planes(d_out, d_out_p, top * ROWS, d_out_n, num_dst, ROWS, DV, WIDTH_V, True, PLANES)
    stats += (tl.cast(copy, tl.int64) * num_dst + i) * 2
    norm = tl.load(stats, mask=i < num_dst, other=float("inf"))
    delta = tl.load(stats + 1, mask=i < num_dst, other=0.0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for partial in tl.static_range(2):
        begin = first
        end = middle
        column = place
        if partial:
            begin = middle
            end = last
            column = middle_place
        for t in range(begin * STEPS, end * STEPS):
            next_column = tl.load(columns + (t + 1) // STEPS)
            offset = t % STEPS * STEP
            left = column * COLUMNS + offset
            j = left + tl.arange(0, STEP)
            k, k1, k2 = load_planes(key, key_p, left, key_n, num_src, STEP, D, WIDTH, partial, PLANES)
            v, v1, v2 = load_planes(value, value_p, left, value_n, num_src, STEP, DV, WIDTH_V, partial, PLANES)
            src = j.to(tl.float32)
            of_key = j
            if dst_bias is not None:
                src = load_nodes(src_bias, j, num_src)
            if dst_words is not None:
                of_key = load_words(src_words, j, num_src, partial)
            _, dx, ds, is_edge, edge = gradients(
                q, q1, q2, k, k1, k2, g, g1, g2, v, v1, v2, i[:, None], j[None, :], dst[:, None], src[None, :],
                of_query[:, None], of_key[None, :], norm[:, None], delta[:, None], pattern, numbers + t // STEPS,
                0, offset, words, edges_before, table, bias, dst_bias, dst_words, threshold, keep_scale, scale,
                softcap, num_dst, num_src, ROWS, COLUMNS, ROWS, STEP, partial, False, PLANES,
            )  # fmt: skip
            if partial:
                pattern = tl.load(patterns + (t + 1) // STEPS)
            if d_bias is not None:
                tl.store(d_bias + edge, dx, mask=is_edge)
            ds, ds1, ds2 = planes_of(ds, k, PLANES)
            acc = add_dot(acc, ds, ds1, ds2, k, k1, k2, PLANES)
            column = next_column
    acc *= scale
    if slot < 0:
        store_rows(d_query + (b * num_dst * heads + h) * D, acc, top * ROWS, heads * D, num_dst, ROWS, D, WIDTH)
    else:
        at = (tl.cast(slot, tl.int64) * copies + copy) * ROWS
        store_rows(part + at * WIDTH, acc, 0, WIDTH, ROWS, ROWS, WIDTH, WIDTH)


@triton.jit(do_not_specialize=INTEGERS)
def by_key(
    query, key, value, d_out, stats, d_key, d_value, d_src, part, part_value, part_src, units, rows, patterns, numbers,
    words, edges_before, table, bias, dst_bias, src_bias, dst_words, src_words, stream_words, threshold, keep_scale,
    scale, softcap, copies, heads, num_dst, num_src, query_b, query_n, query_h, query_p, key_b, key_n, key_h, key_p,
    value_b, value_n, value_h, value_p, d_out_b, d_out_n, d_out_h, d_out_p, bias_b, bias_h,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """d_key [B, N_src, H / GROUP, D], d_value and d_src [B, H, N_src]; parts of divided columns to part, part_value
    [slots, B * H / GROUP, COLUMNS, width] and part_src [slots, B * H, COLUMNS]."""
    STEPS: tl.constexpr = ROWS // STEP
    left, first, middle, last, slot, place, middle_place, middle_pattern, copy, b, key_head = load_unit(
        units, copies, heads // GROUP
    )
    key += b * key_b + key_head * key_h
    value += b * value_b + key_head * value_h
    j = left * COLUMNS + tl.arange(0, COLUMNS)
    k, k1, k2 = load_planes(key, key_p, left * COLUMNS, key_n, num_src, COLUMNS, D, WIDTH, True, PLANES)
    v, v1, v2 = load_planes(value, value_p, left * COLUMNS, value_n, num_src, COLUMNS, DV, WIDTH_V, True, PLANES)
    acc = tl.zeros([COLUMNS, WIDTH], tl.float32)
    acc_value = tl.zeros([COLUMNS, WIDTH_V], tl.float32)
    for member in range(GROUP):
        h = key_head * GROUP + member
        of_head = b * heads + h
        queries = query + b * query_b + h * query_h
        upstream = d_out + b * d_out_b + h * d_out_h
        of_row = stats + of_head * num_dst * 2
        head_table = table
        head_bias = bias
        dst_at = dst_bias
        of_key = j
        src = tl.zeros([COLUMNS], tl.float32)
        acc_src = tl.zeros([COLUMNS], tl.float32)
        if table is not None:
            head_table = table + h * (num_dst + num_src - 1) + num_src - 1
        if bias is not None:
            head_bias = bias + b * bias_b + h * bias_h
        if dst_bias is not None:
            src = load_nodes(src_bias + of_head * num_src, j, num_src)
            dst_at = dst_bias + of_head * num_dst
        if dst_words is not None:
            of_key = load_words(src_words, j, num_src, True) * tl.load(stream_words + of_head)
        for partial in tl.static_range(2):
            begin = first
            end = middle
            row = place
            pattern = middle_pattern
            if partial:
                begin = middle
                end = last
                row = middle_place
            for t in range(begin * STEPS, end * STEPS):
                next_row = tl.load(rows + (t + 1) // STEPS)
                offset = t % STEPS * STEP
                top = row * ROWS + offset
                i = top + tl.arange(0, STEP)
                q, q1, q2 = load_planes(queries, query_p, top, query_n, num_dst, STEP, D, WIDTH, partial, PLANES)
                g, g1, g2 = load_planes(upstream, d_out_p, top, d_out_n, num_dst, STEP, DV, WIDTH_V, partial, PLANES)
                two = of_row + i[:, None].to(tl.int64) * 2 + tl.arange(0, 2)[None, :]
                if partial:
                    norm, delta = tl.split(tl.load(two, mask=(i < num_dst)[:, None], other=0.0))
                else:
                    norm, delta = tl.split(tl.load(two))
                dst = i.to(tl.float32)
                of_query = i
                if dst_bias is not None:
                    dst = load_nodes(dst_at, i, num_dst)
                if dst_words is not None:
                    of_query = load_words(dst_words, i, num_dst, partial)
                w, dx, ds, _, _ = gradients(
                    k, k1, k2, q, q1, q2, v, v1, v2, g, g1, g2, i[None, :], j[:, None], dst[None, :], src[:, None],
                    of_query[None, :], of_key[:, None], norm[None, :], delta[None, :], pattern, numbers + t // STEPS,
                    offset, 0, words, edges_before, head_table, head_bias, dst_bias, dst_words, threshold,
                    keep_scale, scale, softcap, num_dst, num_src, ROWS, COLUMNS, STEP, COLUMNS, partial, True, PLANES,
                )  # fmt: skip
                if partial:
                    pattern = tl.load(patterns + (t + 1) // STEPS)
                if d_src is not None:
                    acc_src += tl.sum(dx, 1)
                w, w1, w2 = planes_of(w, g, PLANES)
                acc_value = add_dot(acc_value, w, w1, w2, g, g1, g2, PLANES)
                ds, ds1, ds2 = planes_of(ds, q, PLANES)
                acc = add_dot(acc, ds, ds1, ds2, q, q1, q2, PLANES)
                row = next_row
        if d_src is not None:
            if slot < 0:
                tl.store(d_src + of_head * num_src + j, acc_src, mask=j < num_src)
            else:
                at = (tl.cast(slot, tl.int64) * copies * GROUP + of_head) * COLUMNS
                tl.store(part_src + at + tl.arange(0, COLUMNS), acc_src)
    acc *= scale
    if slot < 0:
        at = b * num_src * (heads // GROUP) + key_head
        of_keys = heads // GROUP
        store_rows(d_key + at * D, acc, left * COLUMNS, of_keys * D, num_src, COLUMNS, D, WIDTH)
        store_rows(d_value + at * DV, acc_value, left * COLUMNS, of_keys * DV, num_src, COLUMNS, DV, WIDTH_V)
    else:
        at = (tl.cast(slot, tl.int64) * copies + copy) * COLUMNS
        store_rows(part + at * WIDTH, acc, 0, WIDTH, COLUMNS, COLUMNS, WIDTH, WIDTH)
        store_rows(part_value + at * WIDTH_V, acc_value, 0, WIDTH_V, COLUMNS, COLUMNS, WIDTH_V, WIDTH_V)


@triton.jit(do_not_specialize=INTEGERS)
def by_offset(
    query, key, value, d_out, stats, sums, units, rows, columns, patterns, numbers, words, edges_before,
    table, bias, dst_bias, src_bias, dst_words, src_words, stream_words, threshold, keep_scale, scale, softcap,
    copies, heads, num_dst, num_src, query_b, query_n, query_h, query_p, key_b, key_n, key_h, key_p,
    value_b, value_n, value_h, value_p, d_out_b, d_out_n, d_out_h, d_out_p, bias_b, bias_h,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """sums [slots, H, ROWS, COLUMNS]: dx of a unit's tiles, added up over all `copies // heads` entries of the batch.
    A unit has tiles of one diagonal. A program takes a head and a step of each tile."""
    STEPS: tl.constexpr = COLUMNS // STEP
    _row, first, middle, last, slot, _first, _middle, _pattern, _copy, h, step = load_unit(units, heads * STEPS, STEPS)
    offset = step.to(tl.int32) * STEP
    n, m = tl.arange(0, ROWS), tl.arange(0, STEP)
    table += h * (num_dst + num_src - 1) + num_src - 1
    acc = tl.zeros([ROWS, STEP], tl.float32)
    for entry in range(copies // heads):
        b = tl.cast(entry, tl.int64)
        of_head = b * heads + h
        queries = query + b * query_b + h * query_h
        upstream = d_out + b * d_out_b + h * d_out_h
        keys = key + b * key_b + h // GROUP * key_h
        values = value + b * value_b + h // GROUP * value_h
        head_bias = bias
        if bias is not None:
            head_bias = bias + b * bias_b + h * bias_h
        for partial in tl.static_range(2):
            begin = first
            end = middle
            if partial:
                begin = middle
                end = last
            for t in range(begin, end):
                top = tl.load(rows + t) * ROWS
                left = tl.load(columns + t) * COLUMNS + offset
                i = top + n
                j = left + m
                q, q1, q2 = load_planes(queries, query_p, top, query_n, num_dst, ROWS, D, WIDTH, partial, PLANES)
                g, g1, g2 = load_planes(upstream, d_out_p, top, d_out_n, num_dst, ROWS, DV, WIDTH_V, partial, PLANES)
                k, k1, k2 = load_planes(keys, key_p, left, key_n, num_src, STEP, D, WIDTH, partial, PLANES)
                v, v1, v2 = load_planes(values, value_p, left, value_n, num_src, STEP, DV, WIDTH_V, partial, PLANES)
                row = stats + (of_head * num_dst + i) * 2
                norm = tl.load(row, mask=i < num_dst, other=float("inf"))
                delta = tl.load(row + 1, mask=i < num_dst, other=0.0)
                dst = n.to(tl.float32)
                src = m.to(tl.float32)
                of_query = i
                of_key = j
                if dst_bias is not None:
                    dst = load_nodes(dst_bias + of_head * num_dst, i, num_dst)
                    src = load_nodes(src_bias + of_head * num_src, j, num_src)
                if dst_words is not None:
                    of_query = load_words(dst_words, i, num_dst, partial) * tl.load(stream_words + of_head)
                    of_key = load_words(src_words, j, num_src, partial)
                _, dx, _, _, _ = gradients(
                    q, q1, q2, k, k1, k2, g, g1, g2, v, v1, v2, i[:, None], j[None, :], dst[:, None], src[None, :],
                    of_query[:, None], of_key[None, :], norm[:, None], delta[:, None], tl.load(patterns + t),
                    numbers + t, 0, offset, words, edges_before, table, head_bias, dst_bias, dst_words, threshold,
                    keep_scale, scale, softcap, num_dst, num_src, ROWS, COLUMNS, ROWS, STEP, partial, False, PLANES,
                )  # fmt: skip
                acc += dx
    at = (tl.cast(slot, tl.int64) * heads + h) * (ROWS * COLUMNS)
    tl.store(sums + at + n[:, None] * COLUMNS + offset + m[None, :], acc)


@triton.jit(do_not_specialize=INTEGERS)
def add_diagonals(
    sums, first, ranges, d_table, heads, num_dst, num_src, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OFFSETS: tl.constexpr,
):  # fmt: skip
    """d_table [H, N_dst + N_src - 1]: `sums` of `by_offset` along the lines i - j, OFFSETS of them a program."""
    h = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    offset = block * OFFSETS + tl.arange(0, OFFSETS)
    acc = tl.zeros([OFFSETS], tl.float32)
    for slot in range(tl.load(ranges + block * 2), tl.load(ranges + block * 2 + 1)):
        tile = sums + (tl.cast(slot, tl.int64) * heads + h) * (ROWS * COLUMNS)
        zero = tl.load(first + slot)
        for i in range(ROWS):
            j = zero + i - offset
            acc += tl.load(tile + i * COLUMNS + j, mask=(j >= 0) & (j < COLUMNS), other=0.0)
    count = num_dst + num_src - 1
    tl.store(d_table + tl.cast(h, tl.int64) * count + offset, acc, mask=offset < count)


@triton.jit(do_not_specialize=INTEGERS)
def add_parts(
    part, out, divided, copies, heads, num_rows, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """STEP rows of a divided row of tiles of out [B, N, heads, D]: the sum of its parts."""
    STEPS: tl.constexpr = ROWS // STEP
    copy = tl.program_id(0) % copies
    rest = tl.program_id(0) // copies
    skipped = rest % STEPS * STEP
    divided += rest // STEPS * 3
    row = tl.load(divided) * ROWS + skipped
    first = tl.load(divided + 1)
    last = tl.load(divided + 2)
    acc = tl.zeros([STEP, WIDTH], tl.float32)
    for slot in range(first, last):
        at = (tl.cast(slot, tl.int64) * copies + copy) * ROWS + skipped
        acc += load_rows(part + at * WIDTH, 0, WIDTH, STEP, STEP, WIDTH, WIDTH, False)
    b, h = tl.cast(copy // heads, tl.int64), tl.cast(copy % heads, tl.int64)
    store_rows(out + (b * num_rows * heads + h) * D, acc, row, heads * D, num_rows, STEP, D, WIDTH)
