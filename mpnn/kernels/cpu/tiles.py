"""Exact attention over structured graphs, tile by tile: block-sparse flash attention (Dao et al. 2022) on CPU.

The graph's runs say which tiles of (queries, keys) hold edges, and in which of their columns. The scores of a tile live
in a small buffer that stays in cache, turned: one row of it for each key, one column for each query, so that maxima,
exponentials and their gradients are sums down columns, and keys and values are read as they lie. A running maximum and
sum make the softmax exact (Milakov & Gimelshein 2018); where a tile is partial, the runs of its queries say which
scores are minus infinity. One microkernel does all seven matrix products.

Arrays are flat, with strides for (batch, head, node), and widths are multiples of 8. Each part keeps contiguous copies
of the tiles it is likely to meet again, each in the place of its number modulo the places there are, so that working
memory does not grow with the number of heads, nor, where edges are local, with that of nodes. A work item is a query
tile of one head, or, backward, a segment of the key tiles of one head of keys, with all heads of queries that share it,
so that nothing is added atomically and results do not depend on the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import binding

from mpnn.kernels.cpu.caching import njit
from mpnn.kernels.cpu.hashing import mix
from mpnn.kernels.cpu.vector import (
    MATH,
    add_to,
    capped,
    drop,
    exps,
    outer,
    scaled,
    softmax_gradient,
    tops,
    turned,
)

ROWS, COLUMNS = 32, 96
_WIDE = binding.get_host_cpu_features().get("avx512f", False)
_LANES = (0,) * (16 if _WIDE else 8)
_ACROSS = (0,) * (ROWS // len(_LANES))  # vectors of a tile's row
# Rows of accumulators: with two or three vectors a row, 24 of 32 vector registers, or 12 of 16.
_MANY, _SOME = ((0,) * 12, (0,) * 8) if _WIDE else ((0,) * 6, (0,) * 4)
_STEP = len(_MANY)
_ONE, _TWO, _THREE, _EIGHT = ((0,) * n for n in (1, 2, 3, 8))
_NARROW, _BLOCK = 2 * len(_LANES), 64  # columns that a product does before it goes on, so that B stays in cache
_NEVER = -math.inf


@njit(fastmath=MATH, cache=True, nogil=True, inline="never")
def _product(a, a_at, a_row, a_k, b, b_at, b_k, c, c_at, c_row, rows, depth, width, block, add):  # type: ignore[no-untyped-def]
    """C [rows, width] (+)= A [rows, depth] B [depth, width], in blocks of columns; width a multiple of 8."""
    lanes = len(_LANES)
    for begin in range(0, width, block):
        end = min(width, begin + block)
        r = 0
        while r < rows:
            high = rows - r >= len(_MANY) and rows != ROWS  # a multiple of _SOME only
            some = rows - r >= len(_SOME)
            at_a, w = a_at + r * a_row, begin
            while w < end:
                at_c = c_at + r * c_row + w
                if w + 3 * lanes <= end and some and not high:
                    outer(a, at_a, a_row, a_k, b, b_at + w, b_k, c, at_c, c_row, depth, add, _SOME, _THREE, _LANES)
                    w += 3 * lanes
                elif w + 2 * lanes <= end:
                    if high:
                        outer(a, at_a, a_row, a_k, b, b_at + w, b_k, c, at_c, c_row, depth, add, _MANY, _TWO, _LANES)
                    elif some:
                        outer(a, at_a, a_row, a_k, b, b_at + w, b_k, c, at_c, c_row, depth, add, _SOME, _TWO, _LANES)
                    else:
                        outer(a, at_a, a_row, a_k, b, b_at + w, b_k, c, at_c, c_row, depth, add, _ONE, _TWO, _LANES)
                    w += 2 * lanes
                else:
                    if high:
                        outer(a, at_a, a_row, a_k, b, b_at + w, b_k, c, at_c, c_row, depth, add, _MANY, _ONE, _EIGHT)
                    elif some:
                        outer(a, at_a, a_row, a_k, b, b_at + w, b_k, c, at_c, c_row, depth, add, _SOME, _ONE, _EIGHT)
                    else:
                        outer(a, at_a, a_row, a_k, b, b_at + w, b_k, c, at_c, c_row, depth, add, _ONE, _ONE, _EIGHT)
                    w += 8
            r += len(_MANY) if high else len(_SOME) if some else 1


@njit(inline="always")
def _turn(x, x_at, x_row, rows, width, scale, out, to):  # type: ignore[no-untyped-def]
    """out [width, ROWS] = scale * x [rows, width] turned, zeros behind the last row."""
    squares = rows // len(_EIGHT) * len(_EIGHT)
    for r in range(0, squares, len(_EIGHT)):
        for d in range(0, width, len(_EIGHT)):
            turned(x, x_at + r * x_row + d, x_row, scale, out, to + d * ROWS + r, ROWS, _EIGHT)
    for r in range(squares, ROWS):
        for d in range(width):
            out[to + d * ROWS + r] = x[x_at + r * x_row + d] * scale if r < rows else 0


@njit(inline="always")
def _copy(x, x_at, x_row, rows, width, scale, out, to):  # type: ignore[no-untyped-def]
    """out [rows, width] = scale * x [rows, width]."""
    for r in range(rows):
        scaled(x, x_at + r * x_row, scale, out, to + r * width, width // 8, _EIGHT)


@njit(inline="always")
def _inner(x, x_at, x_row, y, y_at, y_row, rows, width, out, to):  # type: ignore[no-untyped-def]
    """out [ROWS] = <x_r, y_r>, zeros behind the last row."""
    for r in range(rows):
        left, right = x[x_at + r * x_row :][:width], y[y_at + r * y_row :][:width]
        total = x.dtype.type(0)
        for d in range(width):
            total += left[d] * right[d]
        out[to + r] = total
    for r in range(rows, ROWS):
        out[to + r] = 0


@njit(inline="always")
def _columns(low, high, j0, num_src):  # type: ignore[no-untyped-def]
    """The keys low .. high of a tile, widened to whole steps of the microkernel where there are so many."""
    return low // _STEP * _STEP, min((high + _STEP - 1) // _STEP * _STEP, num_src - j0)


@njit(inline="always")
def _first_run(runs, i, j):  # type: ignore[no-untyped-def]
    """The first run of row i that ends behind j."""
    ptr, _, stop, _ = runs
    here, until = ptr[i], ptr[i + 1]
    while here < until:
        middle = (here + until) // 2
        if stop[middle] <= j:
            here = middle + 1
        else:
            until = middle
    return here


@njit(inline="always")
def _mask(s, i0, rows, j0, j1, runs):  # type: ignore[no-untyped-def]
    """Scores [j1 - j0, ROWS] of pairs that are no edges become minus infinity."""
    ptr, start, stop, _ = runs
    for r in range(rows):
        at, run = j0, _first_run(runs, i0 + r, j0)
        while at < j1:
            more = run < ptr[i0 + r + 1]
            for j in range(at, min(start[run], j1) if more else j1):
                s[(j - j0) * ROWS + r] = _NEVER
            at = stop[run] if more else j1
            run += 1


@njit(inline="always")
def _with_bias(s, i0, rows, j0, j1, runs, bias, begin, back):  # type: ignore[no-untyped-def]
    """Adds `bias[begin + edge]` to the scores [j1 - j0, ROWS] of edges, or, `back`, these to it."""
    ptr, start, stop, edge = runs
    for r in range(rows):
        run = _first_run(runs, i0 + r, j0)
        while run < ptr[i0 + r + 1] and start[run] < j1:
            at = begin + edge[run] - start[run]
            for j in range(max(start[run], j0), min(stop[run], j1)):
                if back:
                    bias[at + j] += s[(j - j0) * ROWS + r]
                else:
                    s[(j - j0) * ROWS + r] += bias[at + j]
            run += 1


@njit(inline="always")
def _with_table(s, i0, j0, j1, table, begin, back):  # type: ignore[no-untyped-def]
    """Adds `table[begin + i - j]` to the scores [j1 - j0, ROWS], or, `back`, these to it."""
    for c in range(j1 - j0):
        if back:
            add_to(table, begin + i0 - j0 - c, s, c * ROWS, _ACROSS, _LANES)
        else:
            add_to(s, c * ROWS, table, begin + i0 - j0 - c, _ACROSS, _LANES)


@njit(inline="always")
def _is_finite(x, count):  # type: ignore[no-untyped-def]
    total = x.dtype.type(0)
    for k in range(count):
        total += x[k] * 0
    return total == 0


@njit(fastmath=MATH, cache=True, nogil=True, inline="never")
def _over_edges(s, i0, rows, j0, j1, runs, v, v_at, width, o):  # type: ignore[no-untyped-def]
    """o [rows, width] += weights s [j1 - j0, ROWS] times v [j1 - j0, width], edge by edge: a pair that is no edge has
    weight zero, and zero times NaN would be NaN."""
    ptr, start, stop, _ = runs
    for r in range(rows):
        run = _first_run(runs, i0 + r, j0)
        while run < ptr[i0 + r + 1] and start[run] < j1:
            for j in range(max(start[run], j0), min(stop[run], j1)):
                weight, at = s[(j - j0) * ROWS + r], v_at + (j - j0) * width
                for d in range(width):
                    o[r * width + d] += weight * v[at + d]
            run += 1


@njit(inline="always")
def _row_keys(row_keys, key, i0):  # type: ignore[no-untyped-def]
    for r in range(ROWS):
        row_keys[r] = mix(np.uint32(key ^ np.uint32(i0 + r)))


@njit(inline="always")
def _at(strides, b, h, node):  # type: ignore[no-untyped-def]
    return b * strides[0] + h * strides[1] + node * strides[2]


@njit(fastmath=MATH, cache=True, nogil=True)
def forward(  # type: ignore[no-untyped-def]
    first, last, features, strides, scale, cap, table, bias, dropout, tiles, runs, room, out, lse, shape
):
    """out [B, num_dst, H, DV] and lse [B, H, num_dst] of the work items `first` to `last`, each (b, h, query tile).

    `features` are q, k and v, and `strides` those of each for (batch, head, node). Scores are soft-capped at
    `cap`, if that is not 0. `table` [H, num_dst + num_src - 1 +
    ROWS], if not empty, is added to scores by i - j + num_src - 1; `bias` [B or 1, H, E], if not empty, edge by edge.
    `dropout` is (keys [B * H], or none; threshold; growth). `tiles` are listed by query tile. So many key tiles as
    there is `room` for are kept as contiguous copies, since rows that lie a power of two apart push one another out of
    the cache.
    """
    q, k, v = features
    of_q, of_k, of_v = strides
    _, H, KV, num_dst, num_src, D, DV, E = shape
    tile_ptr, tile_key, tile_full, tile_low, tile_high = tiles
    keys, threshold, grow = dropout
    query_tiles, key_tiles = (num_dst + ROWS - 1) // ROWS, (num_src + COLUMNS - 1) // COLUMNS
    one = q.dtype.type(1)
    qt = np.empty(D * ROWS, q.dtype)
    kept_k, kept_v = np.empty(room * COLUMNS * D, q.dtype), np.empty(room * COLUMNS * DV, q.dtype)
    kept = np.full(room, -1, np.int64)
    s, slope = np.empty(ROWS * COLUMNS, q.dtype), np.empty(ROWS * COLUMNS, q.dtype)
    o = np.empty(ROWS * DV, q.dtype)
    top, new, z = np.empty(ROWS, q.dtype), np.empty(ROWS, q.dtype), np.empty(ROWS, q.dtype)
    shift = np.empty(ROWS, q.dtype)
    row_keys = np.empty(ROWS, np.uint32)
    for item in range(first, last):
        bh, i0 = item // query_tiles, item % query_tiles * ROWS
        b, h = bh // H, bh % H
        kv = h * KV // H
        rows = min(ROWS, num_dst - i0)
        _turn(q, _at(of_q, b, h, i0), of_q[2], rows, D, scale, qt, 0)
        if len(keys):
            _row_keys(row_keys, keys[bh], i0)
        for by_edges in (False, True):
            top[:] = _NEVER
            z[:] = 0
            o[:] = 0
            for e in range(tile_ptr[item % query_tiles], tile_ptr[item % query_tiles + 1]):
                key, place = tile_key[e], tile_key[e] % room
                tile = key * COLUMNS
                low, high = _columns(tile_low[e], tile_high[e], tile, num_src)
                j0, j1 = tile + low, tile + high
                if kept[place] != (b * KV + kv) * key_tiles + key:
                    kept[place] = (b * KV + kv) * key_tiles + key
                    n = min(COLUMNS, num_src - tile)
                    _copy(k, _at(of_k, b, kv, tile), of_k[2], n, D, one, kept_k, place * COLUMNS * D)
                    _copy(v, _at(of_v, b, kv, tile), of_v[2], n, DV, one, kept_v, place * COLUMNS * DV)
                row = place * COLUMNS + low
                _product(kept_k, row * D, D, 1, qt, 0, ROWS, s, 0, ROWS, j1 - j0, D, ROWS, _NARROW, False)
                if cap:
                    capped(s, 0, j1 - j0, cap, slope, _ACROSS, _LANES)
                if len(table):
                    _with_table(s, i0, j0, j1, table, (h + 1) * (len(table) // H) - num_dst - ROWS, False)
                if len(bias):
                    _with_bias(s, i0, rows, j0, j1, runs, bias, bh * E % len(bias), False)
                if not tile_full[e]:
                    _mask(s, i0, rows, j0, j1, runs)
                new[:] = top
                tops(s, 0, j1 - j0, new, _ACROSS, _LANES)
                for r in range(rows):
                    if new[r] > top[r]:
                        factor = math.exp(top[r] - new[r])
                        top[r] = new[r]
                        z[r] *= factor
                        scaled(o, r * DV, factor, o, r * DV, DV // 8, _EIGHT)
                for r in range(ROWS):
                    shift[r] = new[r] if new[r] > _NEVER else 0
                exps(s, 0, j1 - j0, shift, z, _ACROSS, _LANES)
                if len(keys):
                    drop(s, 0, j1 - j0, row_keys, j0, threshold, grow, _ACROSS, _LANES)
                if by_edges and not tile_full[e]:
                    _over_edges(s, i0, rows, j0, j1, runs, kept_v, row * DV, DV, o)
                else:
                    _product(s, 0, 1, ROWS, kept_v, row * DV, DV, o, 0, DV, ROWS, j1 - j0, DV, _BLOCK, True)
            if _is_finite(o, rows * DV):
                break  # else once more, so that NaN and infinities of sources reach only rows that attend to them
        for r in range(rows):
            heard = top[r] > _NEVER or z[r] != z[r]
            at = ((b * num_dst + i0 + r) * H + h) * DV
            if heard:
                scaled(o, r * DV, 1 / z[r], out, at, DV // 8, _EIGHT)
            else:
                out[at : at + DV] = 0
            lse[bh * num_dst + i0 + r] = top[r] + math.log(z[r]) if heard else -_NEVER


@njit(fastmath=MATH, cache=True, nogil=True)
def backward(  # type: ignore[no-untyped-def]
    first,
    last,
    features,
    strides,
    scale,
    cap,
    saved,
    table,
    bias,
    dropout,
    tiles,
    runs,
    room,
    gradients,
    shape,
    segments,
    inner,
):
    """Gradients of the work items `first` to `last`, each (`inner` batch entries, head of keys, segment of key tiles).

    `features` are q, k, v and d_out, and `strides` those of each for (batch, head, node); `saved` are out and lse.
    `gradients` come as zeros, nodes before heads: d_q [segments, B, num_dst, H, D], d_k [B, num_src, KV, D], d_v,
    d_table [B / inner * segments, H, ...] and d_bias. `tiles` are listed by key tile; `segments` says where each
    segment begins and the last one ends. So many query tiles as there is `room` for are kept, as they lie and turned.
    """
    q, k, v, d_out = features
    of_q, of_k, of_v, of_d = strides
    out, lse = saved
    d_q, d_k, d_v, d_table, d_bias = gradients
    B, H, KV, num_dst, num_src, D, DV, E = shape
    of_out = num_dst * H * DV, DV, H * DV
    tile_ptr, tile_query, tile_full, tile_low, tile_high = tiles
    keys, threshold, grow = dropout
    count, query_tiles, group = len(segments) - 1, (num_dst + ROWS - 1) // ROWS, H // KV
    one = q.dtype.type(1)
    k_tile, v_tile = np.empty(COLUMNS * D, q.dtype), np.empty(COLUMNS * DV, q.dtype)
    packed, length = np.empty(room * 2 * ROWS * (D + DV + 1), q.dtype), 2 * ROWS * (D + DV + 1)
    kept = np.full(room, -1, np.int64)
    s, slope, g = (
        np.empty(ROWS * COLUMNS, q.dtype),
        np.empty(ROWS * COLUMNS, q.dtype),
        np.empty(ROWS * COLUMNS, q.dtype),
    )
    log_sum, product = np.empty(ROWS, q.dtype), np.zeros(ROWS, q.dtype)
    row_keys = np.empty(ROWS, np.uint32)
    for task in range(first * inner * group, last * inner * group):
        item, b, h = task // (inner * group), task // group % inner, task % group
        segment, kv = item % count, item // count % KV
        b, h = item // (count * KV) * inner + b, kv * group + h
        bh = b * H + h
        for key in range(segments[segment], segments[segment + 1]):
            tile = key * COLUMNS
            n = min(COLUMNS, num_src - tile)
            _copy(k, _at(of_k, b, kv, tile), of_k[2], n, D, scale, k_tile, 0)
            _copy(v, _at(of_v, b, kv, tile), of_v[2], n, DV, one, v_tile, 0)
            for e in range(tile_ptr[key], tile_ptr[key + 1]):
                t = tile_query[e]
                i0, place = t * ROWS, t % room
                rows = min(ROWS, num_dst - i0)
                q_rows = place * length
                q_turned, d_rows = q_rows + ROWS * D, q_rows + 2 * ROWS * D
                d_turned, delta = d_rows + ROWS * DV, d_rows + 2 * ROWS * DV
                if kept[place] != bh * query_tiles + t:
                    kept[place] = bh * query_tiles + t
                    _copy(q, _at(of_q, b, h, i0), of_q[2], rows, D, scale, packed, q_rows)
                    _turn(q, _at(of_q, b, h, i0), of_q[2], rows, D, one, packed, q_turned)
                    _copy(d_out, _at(of_d, b, h, i0), of_d[2], rows, DV, one, packed, d_rows)
                    _turn(d_out, _at(of_d, b, h, i0), of_d[2], rows, DV, one, packed, d_turned)
                    _inner(packed, d_rows, DV, out, _at(of_out, b, h, i0), of_out[2], rows, DV, packed, delta)
                low, high = _columns(tile_low[e], tile_high[e], tile, num_src)
                j0, j1 = tile + low, tile + high
                n = j1 - j0
                _product(k_tile, low * D, D, 1, packed, q_turned, ROWS, s, 0, ROWS, n, D, ROWS, _NARROW, False)
                if cap:
                    capped(s, 0, n, cap, slope, _ACROSS, _LANES)
                _product(v_tile, low * DV, DV, 1, packed, d_turned, ROWS, g, 0, ROWS, n, DV, ROWS, _NARROW, False)
                if len(table):
                    _with_table(s, i0, j0, j1, table, (h + 1) * (len(table) // H) - num_dst - ROWS, False)
                if len(bias):
                    _with_bias(s, i0, rows, j0, j1, runs, bias, bh * E % len(bias), False)
                if not tile_full[e]:
                    _mask(s, i0, rows, j0, j1, runs)
                for r in range(rows):
                    log_sum[r] = lse[bh * num_dst + i0 + r]
                for r in range(rows, ROWS):
                    log_sum[r] = -_NEVER
                for r in range(ROWS):
                    product[r] = packed[delta + r]
                if len(keys):
                    _row_keys(row_keys, keys[bh], i0)
                    drop(g, 0, n, row_keys, j0, threshold, grow, _ACROSS, _LANES)
                softmax_gradient(s, g, 0, n, log_sum, product, _ACROSS, _LANES)
                if len(keys):
                    drop(s, 0, n, row_keys, j0, threshold, grow, _ACROSS, _LANES)
                if len(d_table):
                    part = (item // (count * KV) * count + segment) * len(table)
                    _with_table(g, i0, j0, j1, d_table, part + (h + 1) * (len(table) // H) - num_dst - ROWS, True)
                if len(d_bias):
                    _with_bias(g, i0, rows, j0, j1, runs, d_bias, bh * E % len(bias), True)
                if cap:
                    for c in range(n * ROWS):
                        g[c] *= slope[c]
                to_q = ((segment * B + b) * num_dst + i0) * H + h
                to_k = (b * num_src + j0) * KV + kv
                _product(s, 0, ROWS, 1, packed, d_rows, DV, d_v, to_k * DV, KV * DV, n, rows, DV, _BLOCK, True)
                _product(g, 0, ROWS, 1, packed, q_rows, D, d_k, to_k * D, KV * D, n, rows, D, _BLOCK, True)
                _product(g, 0, 1, ROWS, k_tile, low * D, D, d_q, to_q * D, H * D, rows, n, D, _BLOCK, True)
