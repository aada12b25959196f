"""The result of each chunk, once its state is known, and what the results' gradients send to its values:

    outputs    out = scale ((q from_start) S + P u)      u = v, or beta e of the delta rule
    sent       scale P^T do

with P = tril(q k^T D), or as `within.scores` stored it for gates a feature.

Loop nest: none. One program for each batch entry, chunk, head and block of columns. Called by `function.py`.
"""

import triton
import triton.language as tl

from mpnn.kernels.recurrent.cuda.chunks.tiles import chunk_of_program, decay, dot, load, square


@triton.jit
def outputs(
    starts, stops, chunks, blocks, heads, nodes, scale, width, deep, query, key, value, log_gate, beta, from_start,
    P_in, states, out, C: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, D]. `value` is v, or e of the delta rule. With `P_in`, `query` is q from_start."""
    b, c, h, block, n, _, inside = chunk_of_program(starts, stops, chunks, blocks, heads, nodes, C)
    f = tl.arange(0, WIDTH)
    d = block * DEEP + tl.arange(0, DEEP)
    at = (b * nodes + n) * heads + h
    q = load(query, b, n, h, f, inside, width)
    cell = ((b * heads + h) * chunks + c) * width * deep + f[:, None] * deep + d[None, :]
    S = tl.load(states + cell, mask=(f < width)[:, None] & (d < deep)[None, :], other=0.0)
    o = dot(q, S, NARROW, PRECISION)
    if from_start is not None:
        o *= tl.load(from_start + at, mask=inside, other=0.0)[:, None]
    if P_in is not None:
        P = tl.load(P_in + square(b, c, h, chunks, heads, C))
    else:
        k = load(key, b, n, h, f, inside, width)
        P = dot(q, tl.trans(k), NARROW, PRECISION) * decay(log_gate, at, inside, C)
    u = load(value, b, n, h, d, inside, deep)
    if beta is not None:
        u = u * tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    o += dot(P, u, NARROW, PRECISION)
    tl.store(out + at[:, None] * deep + d[None, :], scale * o, mask=inside[:, None] & (d < deep)[None, :])


@triton.jit
def sent(
    starts, stops, chunks, blocks, heads, nodes, scale, width, deep, query, key, log_gate, P_in, d_out, sent_out,
    C: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sent_out [B, N, H, D]."""
    b, c, h, block, n, _, inside = chunk_of_program(starts, stops, chunks, blocks, heads, nodes, C)
    f = tl.arange(0, WIDTH)
    d = block * DEEP + tl.arange(0, DEEP)
    at = (b * nodes + n) * heads + h
    if P_in is not None:
        P = tl.load(P_in + square(b, c, h, chunks, heads, C))
    else:
        q = load(query, b, n, h, f, inside, width)
        k = load(key, b, n, h, f, inside, width)
        P = dot(q, tl.trans(k), NARROW, PRECISION) * decay(log_gate, at, inside, C)
    do = load(d_out, b, n, h, d, inside, deep)
    x = scale * dot(tl.trans(P), do, NARROW, PRECISION)
    tl.store(sent_out + at[:, None] * deep + d[None, :], x, mask=inside[:, None] & (d < deep)[None, :])
