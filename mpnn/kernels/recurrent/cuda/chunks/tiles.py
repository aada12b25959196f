"""Shared by the kernels of chunks: tiles of nodes, products, and the gates between the nodes of a chunk.

    from_start_i = gate_first ... gate_i      to_end_i = gate_(i+1) ... gate_last      D_ij = gate_(j+1) ... gate_i

Each is the exponential of a sum of logarithms over the gates that it names, never of a difference of two sums. So it is
exact for any gates, those of 0 included, and none overflows while gates are at most 1.

With a gate for each feature, D_ij differs from feature to feature, and `sum_f q_if D_ijf k_jf` must become products of
matrices. Pairs i > j belong to the level s (1, 2, 4, ..., C/2) at which i is in an odd block of s nodes and j in the
even block before it. Then D_ij is the product of the gates from the start of i's block to i, times that of the gates
after j in its own block: one number of i and one of j, neither above 1. So a chunk takes log2(C) products of matrices.

A node is a row of a tile [C, width]; rows past the end of the document are zeros, with gates of 1.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """x [B, N, heads, width] with contiguous rows: its strides, and the states that share one of its heads."""

    data: Any
    batch: int
    node: int
    head: int
    shared: int


def rows(x: Tensor, heads: int) -> Rows:
    """x as an argument of a kernel, for states of this number of heads."""
    batch, node, head = x.stride()[:3]
    return Rows(x, batch, node, head, heads // x.shape[2])


class Chunks(NamedTuple):
    """The first node of each chunk, and the node after its last; and the first chunk of each document."""

    starts: Tensor | None
    stops: Tensor | None
    first: Tensor | None


@lru_cache(maxsize=64)
def chunks_of(ends: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    """The chunks of documents that end there; none for a single one. Cached, so that no later call copies anything to
    the device."""
    if len(ends) == 1:
        return Chunks(None, None, None)
    starts: list[int] = []
    stops: list[int] = []
    first = [0]
    for begin, end in zip((0, *ends), ends, strict=False):
        starts += range(begin, end, size)
        stops += [min(start + size, end) for start in range(begin, end, size)]
        first.append(len(starts))
    return Chunks(*(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (starts, stops, first)))


def count_chunks(ends: Sequence[int], size: int) -> int:
    return sum(-(-(end - begin) // size) for begin, end in zip((0, *ends), ends, strict=False))


@triton.jit
def load(x, b, n, h, d, inside, width):
    """x[b, n, h, d] [C, D] as it is stored, zeros where masked."""
    at = b * x.batch + n.to(tl.int64)[:, None] * x.node + h // x.shared * x.head + d[None, :]
    return tl.load(x.data + at, mask=inside[:, None] & (d < width)[None, :], other=0.0)


@triton.jit
def dot(x, y, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """x @ y in float32. `NARROW` is the 16-bit type that both are rounded to, or None."""
    if NARROW is not None:
        return tl.dot(x.to(NARROW), y.to(NARROW))
    else:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)


@triton.jit
def of_document(document, which, inside):
    """The mask `inside` in the programs of the document `which`. The condition is a tile, because the interpreter of
    Triton 3.9 takes no mask that is a tile & a number."""
    return inside & (tl.full(inside.shape, document, tl.int32) == which)


@triton.jit
def chunk_of_program(starts, stops, chunks, blocks, heads, nodes, C: tl.constexpr):
    """The share of a program in a grid of batch entries, chunks, heads and blocks of columns, the last the fastest: its
    entry, chunk, head and block, the nodes of the chunk [C], the node after its last, and which nodes exist. A single
    document has no tables of `starts` and `stops`."""
    share = tl.program_id(0)
    block = share % blocks
    h = share // blocks % heads
    c = share // blocks // heads % chunks
    b = share // blocks // heads // chunks
    first = c * C
    stop = tl.minimum(first + C, nodes)
    if starts is not None:
        first = tl.load(starts + c)
        stop = tl.load(stops + c)
    n = first + tl.arange(0, C)
    return b.to(tl.int64), c, h.to(tl.int64), block, n, stop, n < stop


@triton.jit
def square(b, c, h, chunks, heads, C: tl.constexpr):
    """Where the matrix [C, C] of a chunk is in [B, H, chunks, C, C]."""
    i = tl.arange(0, C)
    return ((b * heads + h) * chunks + c) * (C * C) + i[:, None] * C + i[None, :]


@triton.jit
def decay(log_gate, at, inside, C: tl.constexpr):
    """D [C, C] of gates a head, 0 above the diagonal."""
    i = tl.arange(0, C)
    D = tl.where(i[:, None] >= i[None, :], 1.0, 0.0)
    if log_gate is not None:
        g = tl.load(log_gate + at, mask=inside, other=0.0).to(tl.float32)
        later = tl.where(i[:, None] > i[None, :], g[:, None], 0.0)
        D = D * tl.exp(tl.cumsum(later, 0))
    return D


@triton.jit
def is_pair(s: tl.constexpr, C: tl.constexpr):
    """Which pairs of nodes [C, C] belong to the level of blocks of s nodes."""
    i = tl.arange(0, C)
    together = (i // (2 * s))[:, None] == (i // (2 * s))[None, :]
    return together & (i // s % 2 == 1)[:, None] & (i // s % 2 == 0)[None, :]


@triton.jit
def sums_from_start(log_gate, b, n, h, f, stop, nodes, heads, width, s: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """Sums of log_gate from the start of a node's block of s nodes to the node itself, [C, F]."""
    node = tl.reshape(n, [C // s, s])[:, :, None]
    at = ((b * nodes + node) * heads + h) * width + f[None, None, :]
    g = tl.load(log_gate + at, mask=(node < stop) & (f < width)[None, None, :], other=0.0).to(tl.float32)
    if s > 1:
        g = tl.cumsum(g, 1)
    return tl.reshape(g, [C, F])


@triton.jit
def sums_to_end(log_gate, b, n, h, f, stop, nodes, heads, width, s: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """Sums of log_gate over the nodes after a node in its block of s nodes, [C, F]."""
    if s == 1:
        return tl.zeros([C, F], tl.float32)
    else:
        node = tl.reshape(n + 1, [C // s, s])[:, :, None]
        follows = (tl.arange(0, s) < s - 1)[None, :, None] & (node < stop)
        at = ((b * nodes + node) * heads + h) * width + f[None, None, :]
        g = tl.load(log_gate + at, mask=follows & (f < width)[None, None, :], other=0.0).to(tl.float32)
        return tl.reshape(tl.cumsum(g, 1, reverse=True), [C, F])


@triton.jit
def factor(log_gate, b, n, h, f, stop, nodes, heads, width, s: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """The share of a node in D at the level of blocks of s nodes, [C, F]: in odd blocks that of i, in even ones j's."""
    odd = (tl.arange(0, C) // s % 2 == 1)[:, None]
    to_i = sums_from_start(log_gate, b, n, h, f, stop, nodes, heads, width, s, C, F)
    after_j = sums_to_end(log_gate, b, n, h, f, stop, nodes, heads, width, s, C, F)
    return tl.exp(tl.where(odd, to_i, after_j))
