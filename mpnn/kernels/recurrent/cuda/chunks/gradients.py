"""The gradients of a chunk, from the state S before it, the gradient Z of the state after it, and do:

    values    du = to_end (k Z) + scale P^T do         dv = du, or of the delta rule dv = T^T (beta du), and
              d_beta = e . (du - A^T dv)               R = tril(scale do u^T D)     M = stril(dv u^T D)
    keys      dq = from_start X + R k                  X = scale do S^T     Y = u Z^T     N = dv S^T
              dk = to_end Y + R^T q - from_start N - M k - M^T k

gate_m decays the edges j -> i with j < m <= i, and the gradient of log_gate_m is the sum over them: those through the
chunk, `through S . Z`; those that begin before m and leave the chunk; those that enter it and end at m or later; and
those inside, which end at m or later and do not begin there. No sum holds edges of other chunks, so that nothing large
cancels and gates of 0 have gradients of 0.

Loop nest: blocks of the columns of the values; then in `keys`, for gates a feature, the levels of `tiles`. One program
for each batch entry, chunk, head, and in `keys` block of features. Called by `function.py`.
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
def values(
    starts, stops, chunks, heads, nodes, scale, width, deep, query, key, value, log_gate, beta, to_end, P_in, A_in,
    T_in, sent, d_out, d_states, d_value, d_beta, R_out, M_out, C: tl.constexpr, WIDTH: tl.constexpr,
    DEEP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_value [B, N, H, D], d_beta [B, N, H], and R and M [B, H, chunks, C, C], with gates a feature without D. `value`
    is v, or e of the delta rule, which reads `sent`. With gates a feature `key` is k to_end, and `P_in` and `A_in` are
    those of `scores`."""
    b, c, h, _, n, _, inside = chunk_of_program(starts, stops, chunks, 1, heads, nodes, C)
    i, f = tl.arange(0, C), tl.arange(0, WIDTH)
    at = (b * nodes + n) * heads + h
    chunk = square(b, c, h, chunks, heads, C)
    earlier = i[:, None] > i[None, :]
    k = load(key, b, n, h, f, inside, width)
    D = decay(log_gate, at, inside, C) if P_in is None else tl.where(i[:, None] >= i[None, :], 1.0, 0.0)
    if T_in is not None:
        factors = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        T = tl.load(T_in + chunk)
        if A_in is not None:
            A = tl.load(A_in + chunk)
        else:
            A = tl.where(earlier, dot(k, tl.trans(k), NARROW, PRECISION) * D, 0.0)
    elif P_in is not None:
        P = tl.load(P_in + chunk)
    else:
        P = dot(load(query, b, n, h, f, inside, width), tl.trans(k), NARROW, PRECISION) * D
    R, M, to_beta = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    for d0 in range(0, deep, DEEP):
        d = d0 + tl.arange(0, DEEP)
        place = at[:, None] * deep + d[None, :]
        exists = inside[:, None] & (d < deep)[None, :]
        cell = ((b * heads + h) * chunks + c) * width * deep + f[:, None] * deep + d[None, :]
        Z = tl.load(d_states + cell, mask=(f < width)[:, None] & (d < deep)[None, :], other=0.0)
        do = load(d_out, b, n, h, d, inside, deep)
        u = load(value, b, n, h, d, inside, deep)
        du = dot(k, Z, NARROW, PRECISION)
        if to_end is not None:
            du *= tl.load(to_end + at, mask=inside, other=0.0)[:, None]
        if T_in is not None:
            du += tl.load(sent + place, mask=exists, other=0.0).to(tl.float32)
            dv = dot(tl.trans(T), du * factors, NARROW, PRECISION)
            du -= dot(tl.trans(A), dv, NARROW, PRECISION)
            to_beta += tl.sum(du * u.to(tl.float32), 1)
            u = u * factors
            M += dot(dv, tl.trans(u), NARROW, PRECISION)
        else:
            dv = du + scale * dot(tl.trans(P), do, NARROW, PRECISION)
        tl.store(d_value + place, dv, mask=exists)
        R += dot(do, tl.trans(u), NARROW, PRECISION)
    tl.store(R_out + chunk, scale * R * D)
    if T_in is not None:
        tl.store(M_out + chunk, tl.where(earlier, M * D, 0.0))
        tl.store(d_beta + at, to_beta, mask=inside)


@triton.jit
def keys(
    starts, stops, chunks, blocks, heads, nodes, scale, width, deep, query, key, value, log_gate, beta, from_start,
    to_end, R_in, M_in, d_out, d_value, states, d_states, d_query, d_key, d_log_gate, LEVELS: tl.constexpr,
    C: tl.constexpr, FEATURES: tl.constexpr, DEEP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
    BY_FEATURE: tl.constexpr,
):  # fmt: skip
    """d_query and d_key [B, N, H, F], and unless it is None d_log_gate: [B, N, H, F], or of each block of features [B,
    blocks, N, H]. `value` is v, or e of the delta rule."""
    b, c, h, block, n, stop, inside = chunk_of_program(starts, stops, chunks, blocks, heads, nodes, C)
    i = tl.arange(0, C)
    f = block * FEATURES + tl.arange(0, FEATURES)
    at = (b * nodes + n) * heads + h
    X, Y = tl.zeros([C, FEATURES], tl.float32), tl.zeros([C, FEATURES], tl.float32)
    N, passing = tl.zeros([C, FEATURES], tl.float32), tl.zeros([FEATURES], tl.float32)
    for d0 in range(0, deep, DEEP):
        d = d0 + tl.arange(0, DEEP)
        cell = ((b * heads + h) * chunks + c) * width * deep + f[:, None] * deep + d[None, :]
        exists = (f < width)[:, None] & (d < deep)[None, :]
        S = tl.load(states + cell, mask=exists, other=0.0)
        Z = tl.load(d_states + cell, mask=exists, other=0.0)
        do = load(d_out, b, n, h, d, inside, deep)
        u = load(value, b, n, h, d, inside, deep)
        if beta is not None:
            u = u * tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)[:, None]
            place = at[:, None] * deep + d[None, :]
            dv = tl.load(d_value + place, mask=inside[:, None] & (d < deep)[None, :], other=0.0)
            N += dot(dv, tl.trans(S), NARROW, PRECISION)
        X += dot(do, tl.trans(S), NARROW, PRECISION)
        Y += dot(u, tl.trans(Z), NARROW, PRECISION)
        if log_gate is not None:
            passing += tl.sum(S.to(tl.float32) * Z.to(tl.float32), 1)
    R = tl.load(R_in + square(b, c, h, chunks, heads, C))
    if beta is not None:
        M = tl.load(M_in + square(b, c, h, chunks, heads, C))
    X *= scale
    q = load(query, b, n, h, f, inside, width).to(tl.float32)
    k = load(key, b, n, h, f, inside, width).to(tl.float32)
    rows = at[:, None] * width + f[None, :]
    exists = inside[:, None] & (f < width)[None, :]
    if BY_FEATURE:
        start = tl.exp(sums_from_start(log_gate, b, n, h, f, stop, nodes, heads, width, C, C, FEATURES))
        whole = tl.sum(tl.where(i[:, None] == C - 1, start, 0.0), 0)
        to_q = start * X
        to_i = -start * N
        to_j = tl.zeros([C, FEATURES], tl.float32)
        Y = Y * tl.exp(sums_to_end(log_gate, b, n, h, f, stop, nodes, heads, width, C, C, FEATURES))
        for level in tl.static_range(LEVELS):
            share = factor(log_gate, b, n, h, f, stop, nodes, heads, width, 2**level, C, FEATURES)
            odd = (i // 2**level % 2 == 1)[:, None]
            sends, asks = tl.where(odd, 0.0, k * share), tl.where(odd, q * share, 0.0)
            pairs = tl.where(is_pair(2**level, C), R, 0.0)
            to_q += share * dot(pairs, sends, NARROW, PRECISION)
            to_j += share * dot(tl.trans(pairs), asks, NARROW, PRECISION)
            if beta is not None:
                pairs = tl.where(is_pair(2**level, C), M, 0.0)
                to_i -= share * dot(pairs, sends, NARROW, PRECISION)
                to_j -= share * dot(tl.trans(pairs), tl.where(odd, k * share, 0.0), NARROW, PRECISION)
        entered = q * to_q + k * (to_i - to_j)
        left = k * Y
        earlier = tl.where(i[:, None] > i[None, :], 1.0, 0.0)
        crossing = tl.cumsum(entered, 0, reverse=True) + dot(earlier, left, NARROW, PRECISION)
        crossing += (whole * passing)[None, :]
        tl.store(d_log_gate + rows, crossing, mask=exists)
        itself = tl.sum(tl.where(i[:, None] == i[None, :], R.to(tl.float32), 0.0), 1)[:, None]
        tl.store(d_query + rows, to_q + itself * k, mask=exists)
        tl.store(d_key + rows, Y + to_j + to_i + itself * q, mask=exists)
    else:
        earlier = i[:, None] > i[None, :]
        if log_gate is not None:
            a = tl.load(from_start + at, mask=inside, other=0.0)[:, None]
            X = a * X
            N = a * N
            Y = Y * tl.load(to_end + at, mask=inside, other=0.0)[:, None]
        sent = tl.trans(k)
        received = dot(R, k, NARROW, PRECISION)
        if log_gate is not None:
            whole = tl.load(from_start + (b * nodes + stop - 1) * heads + h)
            edges = tl.where(earlier, dot(q, sent, NARROW, PRECISION) * R, 0.0)
            if beta is not None:
                edges -= dot(k, sent, NARROW, PRECISION) * M
            entered = tl.sum(q * X - k * N, 1) + tl.sum(edges, 1) - tl.sum(edges, 0)
            left = tl.sum(k * Y, 1)
            crossing = tl.cumsum(entered, 0, reverse=True) + tl.sum(tl.where(earlier, left[None, :], 0.0), 1)
            part = ((b * blocks + block) * nodes + n) * heads + h
            tl.store(d_log_gate + part, crossing + whole * tl.sum(passing, 0), mask=inside)
        dk = Y + dot(tl.trans(R), q, NARROW, PRECISION)
        if beta is not None:
            dk -= N + dot(M, k, NARROW, PRECISION) + dot(tl.trans(M), k, NARROW, PRECISION)
        tl.store(d_query + rows, X + received, mask=exists)
        tl.store(d_key + rows, dk, mask=exists)
