"""The results of a chunk of nodes without the state that enters it: one program for each chunk, head and batch entry.

    gates      from_start, to_end: of gates a head
    scores     P_ij = sum_f q_if D_ijf k_jf for i >= j     A_ij = sum_f k_if D_ijf k_jf for i > j: of gates a feature
               and q from_start, k from_start, k to_end
    solve      T = (I + A diag(beta))^-1     W = T (k from_start)     V = T v: of the delta rule

so that the delta rule's e = T (v - (k from_start) S) = V - W S with the state S [F, D] (arXiv:2406.06484; with gates a
head arXiv:2412.06464, a feature arXiv:2510.26692). T is built from the inverses of its diagonal blocks of s = 1, 2, 4,
... nodes: `T <- T - T A_s T` with the pairs A_s of that level. This is a substitution in blocks. It stays exact if all
keys are equal, where sums of powers of A do not.

Loop nest: levels of blocks of a chunk, in `scores` within blocks of features. Called by `function.py`.
"""

import triton
import triton.language as tl

from mpnn.kernels.recurrent.cuda.chunks.tiles import (
    chunk_of_program,
    decay,
    dot,
    factor,
    is_pair,
    load,
    square,
    sums_from_start,
    sums_to_end,
)


@triton.jit
def gates(
    starts, stops, chunks, blocks, heads, nodes, log_gate, from_start, to_end, C: tl.constexpr, BH: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """from_start and to_end [B, N, H] of log_gate [B, N, H]; a program takes BH heads."""
    b, _, _, block, n, stop, inside = chunk_of_program(starts, stops, chunks, blocks, 1, nodes, C)
    h = block * BH + tl.arange(0, BH)
    at = (b * nodes + n)[:, None] * heads + h[None, :]
    exists = inside[:, None] & (h < heads)[None, :]
    g = tl.load(log_gate + at, mask=exists, other=0.0).to(tl.float32)
    after = tl.load(log_gate + at + heads, mask=exists & (n < stop - 1)[:, None], other=0.0).to(tl.float32)
    tl.store(from_start + at, tl.exp(tl.cumsum(g, 0)), mask=exists)
    tl.store(to_end + at, tl.exp(tl.cumsum(after, 0, reverse=True)), mask=exists)


@triton.jit
def scores(
    starts, stops, chunks, heads, nodes, width, query, key, log_gate, P_out, A_out, early_query, early_key, late_key,
    through, LEVELS: tl.constexpr, C: tl.constexpr, FEATURES: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """P and, unless it is None, A [B, H, chunks, C, C]; q from_start, k from_start (with A) and k to_end [B, N, H, F];
    and the product of all gates [B, H, chunks, F]. `FEATURES` at a time."""
    b, c, h, _, n, stop, inside = chunk_of_program(starts, stops, chunks, 1, heads, nodes, C)
    i = tl.arange(0, C)
    P, A = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for f0 in range(0, width, FEATURES):
        f = f0 + tl.arange(0, FEATURES)
        q = load(query, b, n, h, f, inside, width).to(tl.float32)
        k = load(key, b, n, h, f, inside, width).to(tl.float32)
        P += tl.where(i[:, None] == i[None, :], tl.sum(q * k, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            share = factor(log_gate, b, n, h, f, stop, nodes, heads, width, 1 << level, C, FEATURES)
            pair = is_pair(1 << level, C)
            sent = tl.trans(k * share)
            P += tl.where(pair, dot(q * share, sent, NARROW, PRECISION), 0.0)
            if A_out is not None:
                A += tl.where(pair, dot(k * share, sent, NARROW, PRECISION), 0.0)
        at = ((b * nodes + n[:, None]) * heads + h) * width + f[None, :]
        exists = inside[:, None] & (f < width)[None, :]
        start = tl.exp(sums_from_start(log_gate, b, n, h, f, stop, nodes, heads, width, C, C, FEATURES))
        end = tl.exp(sums_to_end(log_gate, b, n, h, f, stop, nodes, heads, width, C, C, FEATURES))
        tl.store(early_query + at, q * start, mask=exists)
        tl.store(late_key + at, k * end, mask=exists)
        if A_out is not None:
            tl.store(early_key + at, k * start, mask=exists)
        whole = tl.sum(tl.where(i[:, None] == C - 1, start, 0.0), 0)
        tl.store(through + ((b * heads + h) * chunks + c) * width + f, whole, mask=f < width)
    place = square(b, c, h, chunks, heads, C)
    tl.store(P_out + place, P)
    if A_out is not None:
        tl.store(A_out + place, A)


@triton.jit
def solve(
    starts, stops, chunks, heads, nodes, width, deep, key, value, log_gate, from_start, early_key, A_in, beta, T_out, W,
    V, LEVELS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """T [B, H, chunks, C, C], W [B, N, H, F] and V [B, N, H, D]. `early_key` and `A_in` are those of `scores`, and
    `A_in` is None for gates a head or none. The inverse is computed in the precision `EXACT`."""
    b, c, h, _, n, _, inside = chunk_of_program(starts, stops, chunks, 1, heads, nodes, C)
    i, f = tl.arange(0, C), tl.arange(0, WIDTH)
    at = (b * nodes + n) * heads + h
    place = square(b, c, h, chunks, heads, C)
    if A_in is not None:
        A = tl.load(A_in + place).to(tl.float32)
        k = load(early_key, b, n, h, f, inside, width)
    else:
        k = load(key, b, n, h, f, inside, width)
        A = dot(k, tl.trans(k), NARROW, PRECISION) * decay(log_gate, at, inside, C)
        if from_start is not None:
            k = k * tl.load(from_start + at, mask=inside, other=0.0)[:, None]
    A *= tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    T = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(is_pair(1, C), A, 0.0)
    for level in tl.static_range(1, LEVELS):
        pairs = tl.where(is_pair(1 << level, C), A, 0.0)
        T -= dot(T, dot(pairs, T, None, EXACT), None, EXACT)
    tl.store(T_out + place, T)
    T = T.to(NARROW) if NARROW is not None else T
    tl.store(
        W + at[:, None] * width + f[None, :], dot(T, k, NARROW, PRECISION), mask=inside[:, None] & (f < width)[None, :]
    )
    for d0 in range(0, deep, DEEP):
        d = d0 + tl.arange(0, DEEP)
        v = load(value, b, n, h, d, inside, deep)
        tl.store(
            V + at[:, None] * deep + d[None, :],
            dot(T, v, NARROW, PRECISION),
            mask=inside[:, None] & (d < deep)[None, :],
        )
