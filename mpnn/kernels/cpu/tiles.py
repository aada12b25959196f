"""Exact attention over structured graphs, tile by tile: block-sparse flash attention (Dao et al. 2022) on CPU.

The graph's runs say which tiles of (queries, keys) hold edges, and in which of their columns. The scores of a tile live
in a small buffer that stays in cache, turned: one row of it for each key, one column for each query, so that maxima,
exponentials and their gradients are sums down columns, and keys and values are read as they lie. A running maximum and
sum make the softmax exact (Milakov & Gimelshein 2018); where a tile is partial, the runs of its queries say which
scores are minus infinity. One microkernel does all seven matrix products.

Arrays are flat, keys and values contiguous as [batch, heads, nodes, width], widths multiples of 8. A work item is a
query tile of one head, or, backward, a segment of the key tiles of one head of keys, with all heads of queries that
share it, so that nothing is added atomically and results do not depend on the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import binding
from numba import njit

from mpnn.kernels.cpu.hashing import mix
from mpnn.kernels.cpu.vector import MATH, add_to, drop, exps, outer, softmax_gradient, tops

ROWS, COLUMNS = 32, 96
_WIDE = binding.get_host_cpu_features().get("avx512f", False)
_LANES = (0,) * (16 if _WIDE else 8)
_ACROSS = (0,) * (ROWS // len(_LANES))  # vectors of a tile's row
# Rows of accumulators: with two or three vectors a row, 24 of 32 vector registers, or 12 of 16.
_MANY, _SOME = ((0,) * 12, (0,) * 8) if _WIDE else ((0,) * 6, (0,) * 4)
_STEP = len(_MANY)
_ONE, _TWO, _THREE, _EIGHT = ((0,) * n for n in (1, 2, 3, 8))
_NARROW, _BLOCK = 2 * len(_LANES), 64  # columns that a product does before it goes on, so that B stays in cache
_LOW = -1e30


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
    for d in range(width):
        for r in range(rows):
            out[to + d * ROWS + r] = x[x_at + r * x_row + d] * scale
        for r in range(rows, ROWS):
            out[to + d * ROWS + r] = 0


@njit(fastmath=MATH, cache=True, nogil=True)
def pack(first, last, x, strides, scale, out, rows_, turned, delta, shape):  # type: ignore[no-untyped-def]
    """Each query tile of scale * x, whose strides are given for (batch, head, node): as it lies, into rows_
    [B, H, N, width], and turned, into turned [B, H, tiles, width, ROWS]. If out, of the same strides, is not empty,
    delta [B, H, N] = <x, out>."""
    _, H, nodes, width = shape
    by_batch, by_head, by_node = strides
    tiles = (nodes + ROWS - 1) // ROWS
    for item in range(first, last):
        bh, i0 = item // tiles, item % tiles * ROWS
        n = min(ROWS, nodes - i0)
        at, to = bh // H * by_batch + bh % H * by_head + i0 * by_node, bh * nodes + i0
        _turn(x, at, by_node, n, width, scale, turned, item * width * ROWS)
        for r in range(n):
            for d in range(width):
                rows_[(to + r) * width + d] = x[at + r * by_node + d] * scale
            if len(out):
                total = x.dtype.type(0)
                for d in range(width):
                    total += x[at + r * by_node + d] * out[at + r * by_node + d]
                delta[to + r] = total


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
    """Scores [j1 - j0, ROWS] of pairs that are no edges become very low."""
    ptr, start, stop, _ = runs
    for r in range(rows):
        at, run = j0, _first_run(runs, i0 + r, j0)
        while at < j1:
            more = run < ptr[i0 + r + 1]
            for j in range(at, min(start[run], j1) if more else j1):
                s[(j - j0) * ROWS + r] = _LOW
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
def _row_keys(row_keys, key, i0):  # type: ignore[no-untyped-def]
    for r in range(ROWS):
        row_keys[r] = mix(np.uint32(key ^ np.uint32(i0 + r)))


@njit(fastmath=MATH, cache=True, nogil=True)
def forward(  # type: ignore[no-untyped-def]
    first, last, q, strides, k, v, scale, table, bias, dropout, tiles, runs, out, lse, shape
):
    """out [B, num_dst, H, DV] and lse [B, H, num_dst] of the work items `first` to `last`, each (b, h, query tile).

    `strides` are those of q for (batch, head, node). `table` [H, num_dst + num_src - 1 + ROWS], if not empty, is added
    to scores by i - j + num_src - 1; `bias` [B or 1, H, E], if not empty, edge by edge. `dropout` is (keys [B * H], or
    none; threshold; growth). `tiles` are listed by query tile.
    """
    _, H, KV, num_dst, num_src, D, DV, E = shape
    tile_ptr, tile_key, tile_full, tile_low, tile_high = tiles
    keys, threshold, grow = dropout
    query_tiles = (num_dst + ROWS - 1) // ROWS
    qt = np.empty(D * ROWS, q.dtype)
    s = np.empty(ROWS * COLUMNS, q.dtype)
    o = np.empty(ROWS * DV, q.dtype)
    top, new, z = np.empty(ROWS, q.dtype), np.empty(ROWS, q.dtype), np.empty(ROWS, q.dtype)
    row_keys = np.empty(ROWS, np.uint32)
    for item in range(first, last):
        bh, i0 = item // query_tiles, item % query_tiles * ROWS
        b, h = bh // H, bh % H
        rows = min(ROWS, num_dst - i0)
        _turn(q, b * strides[0] + h * strides[1] + i0 * strides[2], strides[2], rows, D, scale, qt, 0)
        top[:] = _LOW
        z[:] = 0
        o[:] = 0
        if len(keys):
            _row_keys(row_keys, keys[bh], i0)
        for e in range(tile_ptr[item % query_tiles], tile_ptr[item % query_tiles + 1]):
            tile = tile_key[e] * COLUMNS
            low, high = _columns(tile_low[e], tile_high[e], tile, num_src)
            j0, j1 = tile + low, tile + high
            row = (b * KV + h * KV // H) * num_src + j0
            _product(k, row * D, D, 1, qt, 0, ROWS, s, 0, ROWS, j1 - j0, D, ROWS, _NARROW, False)
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
                    for c in range(DV):
                        o[r * DV + c] *= factor
            exps(s, 0, j1 - j0, new, z, _ACROSS, _LANES)
            if len(keys):
                drop(s, 0, j1 - j0, row_keys, j0, threshold, grow, _ACROSS, _LANES)
            _product(s, 0, 1, ROWS, v, row * DV, DV, o, 0, DV, ROWS, j1 - j0, DV, _BLOCK, True)
        for r in range(rows):
            heard = top[r] > _LOW or z[r] != z[r]
            factor = 1 / z[r] if heard else 0
            at = ((b * num_dst + i0 + r) * H + h) * DV
            for c in range(DV):
                out[at + c] = o[r * DV + c] * factor if heard else 0
            lse[bh * num_dst + i0 + r] = top[r] + math.log(z[r]) if heard else -_LOW


@njit(fastmath=MATH, cache=True, nogil=True)
def backward(  # type: ignore[no-untyped-def]
    first, last, features, turned, saved, table, bias, dropout, tiles, runs, gradients, shape, segments, inner
):
    """Gradients of the work items `first` to `last`, each (`inner` batch entries, head of keys, segment of key tiles).

    `features` are q (scaled), k, v and d_out; `turned` are the panels of q and of d_out; `saved` are lse and delta =
    <d_out, out>, [B, H, num_dst]. `gradients` come as zeros, nodes before heads: d_q [segments, B, num_dst, H, D], yet
    to be scaled, d_k [B, num_src, KV, D], d_v, d_table [B / inner * segments, H, ...] and d_bias. `tiles` are listed
    by key tile; `segments` says where each segment begins and the last one ends.
    """
    q, k, v, d_out = features
    q_panels, d_panels = turned
    lse, delta = saved
    d_q, d_k, d_v, d_table, d_bias = gradients
    B, H, KV, num_dst, num_src, D, DV, E = shape
    tile_ptr, tile_query, tile_full, tile_low, tile_high = tiles
    keys, threshold, grow = dropout
    count, query_tiles, group = len(segments) - 1, (num_dst + ROWS - 1) // ROWS, H // KV
    s = np.empty(ROWS * COLUMNS, q.dtype)
    g = np.empty(ROWS * COLUMNS, q.dtype)
    log_sum, product = np.empty(ROWS, q.dtype), np.zeros(ROWS, q.dtype)
    row_keys = np.empty(ROWS, np.uint32)
    for task in range(first * inner * group, last * inner * group):
        item, b, h = task // (inner * group), task // group % inner, task % group
        segment, kv = item % count, item // count % KV
        b, h = item // (count * KV) * inner + b, kv * group + h
        bh = b * H + h
        for key in range(segments[segment], segments[segment + 1]):
            for e in range(tile_ptr[key], tile_ptr[key + 1]):
                t, tile = tile_query[e], key * COLUMNS
                i0 = t * ROWS
                rows = min(ROWS, num_dst - i0)
                low, high = _columns(tile_low[e], tile_high[e], tile, num_src)
                j0, j1 = tile + low, tile + high
                n = j1 - j0
                query, panel, row = bh * num_dst + i0, (bh * query_tiles + t) * ROWS, (b * KV + kv) * num_src + j0
                _product(k, row * D, D, 1, q_panels, panel * D, ROWS, s, 0, ROWS, n, D, ROWS, _NARROW, False)
                _product(v, row * DV, DV, 1, d_panels, panel * DV, ROWS, g, 0, ROWS, n, DV, ROWS, _NARROW, False)
                if len(table):
                    _with_table(s, i0, j0, j1, table, (h + 1) * (len(table) // H) - num_dst - ROWS, False)
                if len(bias):
                    _with_bias(s, i0, rows, j0, j1, runs, bias, bh * E % len(bias), False)
                if not tile_full[e]:
                    _mask(s, i0, rows, j0, j1, runs)
                for r in range(rows):
                    log_sum[r], product[r] = lse[query + r], delta[query + r]
                for r in range(rows, ROWS):
                    log_sum[r], product[r] = -_LOW, 0
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
                to_q = ((segment * B + b) * num_dst + i0) * H + h
                to_k = (b * num_src + j0) * KV + kv
                _product(s, 0, ROWS, 1, d_out, query * DV, DV, d_v, to_k * DV, KV * DV, n, rows, DV, _BLOCK, True)
                _product(g, 0, ROWS, 1, q, query * D, D, d_k, to_k * D, KV * D, n, rows, D, _BLOCK, True)
                _product(g, 0, 1, ROWS, k, row * D, D, d_q, to_q * D, H * D, rows, n, D, _BLOCK, True)
