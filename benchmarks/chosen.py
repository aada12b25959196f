"""Edges chosen by content, a bias of pairs, and FlexAttention's functions: each against what torch does for it.

Our times include building the graph of a choice, which is new in each call; the choice itself is made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as of_torch

from benchmarks import peers
from benchmarks.contest import BOTH, FORWARD, OURS, Bar, Case, Contest, Entry
from benchmarks.sizes import Sizes
from benchmarks.truth import Agreement, Sampled
from benchmarks.whole_models import torch_products
from mpnn import graphs, ops
from mpnn.flex import create_block_mask, flex_attention
from mpnn.graph.blocks import BlockMask

CAUSAL, MASKED, FLEX = "torch SDPA, causal", "torch SDPA, masked", "FlexAttention"
BARS = {"each query": (6.0, 3.5), "each block": (14.0, 8.0)}
"""Times faster than dense attention: where torch's products leave AVX-512 unused, and elsewhere."""


def cases(sizes: Sizes) -> Iterator[Case]:
    small = sizes.context < 1024
    n, size = (512, 32) if small else (16384, 128)
    for rows, chooser in ((1, "each query"), (size, f"each {size} queries")):
        name = f"top 4 of {n // size} blocks by {chooser}, N {n:,}, 4 heads of 64"
        yield Case("chosen", name, partial(_blocks, n, size, rows), (BOTH,))
    n, k = (256, 32) if small else (8192, 256)
    yield Case("chosen", f"top {k} of {n:,} tokens, 8 heads of 64, 1 of keys", partial(_tokens, n, k), (BOTH,))
    n = 16 if small else 256
    name = f"triangle attention, {n} nodes, 4 heads of 32"
    yield Case("chosen", name, partial(_triangle, n), (BOTH,))
    n = 256 if small else sizes.nodes
    for name in ("window", "documents"):
        yield Case("chosen", f"mpnn.flex, {name}, N {n:,}", partial(_flex, n, name), (FORWARD,))
    n = 512 if small else 16384
    for name in MASKS:
        yield Case("chosen", f"create_block_mask, {name}, N {n:,}", partial(_block_mask, n, name), (FORWARD,))


def _leaves(*shape: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape, requires_grad=True) for _ in range(3))


def _faster(limit: float, peer: str, direction: str = BOTH) -> Bar:
    return Bar(f"at least {limit:g}x faster than {peer}", limit, "at least", direction, peer)


def _folded(x: Tensor) -> Tensor:
    """[1, N, H, D] as the nodes of one graph, [H * N, 1, D]."""
    return x[0].transpose(0, 1).reshape(-1, 1, x.shape[-1])


def _blocks(n: int, size: int, rows: int) -> Contest:
    """MoBA: the own block and the three others whose mean key a query, or the mean of `rows` queries, likes most."""
    query, key, value = _leaves(1, n, 4, 64)
    with torch.no_grad():
        means = key.unflatten(1, (-1, size)).mean(2)
        gate = torch.einsum("bihd,bmhd->bhim", query.unflatten(1, (-1, rows)).mean(2), means)
        own, block = torch.arange(n // rows)[:, None] * rows // size, torch.arange(n // size)
        gate = gate.masked_fill(block > own, -torch.inf).masked_fill(block == own, torch.inf)
        chosen = torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, gate.topk(4, -1).indices, True) & (block <= own)

    def call() -> Tensor:
        graph = graphs.blocks(chosen, size, n, num_dst=n) & graphs.causal()
        return _folded(ops.attend(graph, query, key, value))

    graph = (graphs.blocks(chosen, size, n, num_dst=n) & graphs.causal()).folded(4)
    inputs = [_folded(x).detach() for x in (query, key, value)]
    exact = Sampled(graph, inputs, lambda part, at, q, k, v: ops.attend(part, q[at], k, v, backend="edge_list"), 64)
    entries = [
        Entry(OURS, call, (query, key, value), _folded),
        peers.dense((query[0], key[0], value[0]), CAUSAL, is_causal=True),
    ]
    limit = BARS["each query" if rows == 1 else "each block"][torch_products() != "slow, AVX-512"]
    return Contest(entries, exact, exact.description, [_faster(limit, CAUSAL)], {"edges": graph.num_edges})


def _tokens(n: int, k: int) -> Contest:
    """DeepSeek's sparse attention with a key for all heads, as top-k of random scores; torch gets a mask."""
    query, (key, value, _) = torch.randn(1, n, 8, 64, requires_grad=True), _leaves(1, n, 1, 64)
    scores = torch.randn(n, n).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    best = scores.topk(k, -1)
    indices = best.indices.masked_fill(best.values == -torch.inf, -1)[None]
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (query, key, value)]

    def masked() -> Tensor:
        mask = torch.zeros(n, n + 1, dtype=torch.bool).scatter(-1, indices[0].where(indices[0] >= 0, n), True)[:, :n]
        return F.scaled_dot_product_attention(*theirs, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def call() -> Tensor:
        return ops.attend(graphs.chosen(indices, n) & graphs.causal(), query, key, value)

    entries = [
        Entry(OURS, call, (query, key, value)),
        Entry(MASKED, masked, theirs, lambda x: x.transpose(1, 2)),
    ]
    return Contest(
        entries, Agreement(), Agreement.description, [_faster(7, MASKED)], {"edges": n * k - k * (k - 1) // 2}
    )


def _triangle(n: int) -> Contest:
    """The pair update of AlphaFold 2 (Jumper et al. 2021): n rows of n nodes share a learned bias of pairs."""
    query, key, value = _leaves(n, n, 4, 32)
    bias, graph = torch.randn(n * n, 4, requires_grad=True), graphs.complete().bind(n)

    def entry(name: str, backend: str) -> Entry:
        return Entry(
            name, lambda: ops.attend(graph, query, key, value, bias=bias, backend=backend), (query, key, value, bias)
        )

    entries = [entry(OURS, "auto"), entry("tiles", "tiles"), entry("dense", "dense")]
    bars = [Bar(f"at most 1.05 of the time of {x}", 1.05, "at most", BOTH, x) for x in ("tiles", "dense")]
    return Contest(entries, Agreement(), Agreement.description, bars, {"edges": n**3})


def _flex(n: int, name: str) -> Contest:
    """FlexAttention's functions, here and in torch, with the same mask_mod; block masks are made beforehand."""
    length = n // 16

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= length

    def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i // length == j // length

    mask = {"window": window, "documents": documents}[name]
    given = query, key, value = tuple(torch.randn(n, 12, 64) for _ in range(3))
    ours = [x.transpose(0, 1)[None].contiguous() for x in (query, key, value)]
    block_mask = create_block_mask(mask, None, None, n, n)
    call = partial(flex_attention, *ours, block_mask=block_mask)
    entries = [Entry(OURS, lambda: peers.nodes_first(call())), peers.flex(given, mask)]
    bars = [_faster(1.6, FLEX, FORWARD)]
    return Contest(entries, Agreement(), Agreement.description, bars, {"nodes": n})


MASKS = ("causal documents", "sums of bits")
"""A rule that bounds of blocks decide, and one that is computed for all pairs."""


def _rule(n: int, name: str) -> Callable[..., Tensor]:
    """A mask_mod over n tokens."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randperm(n, generator=generator)[: n // 512].sort().values
    document = torch.bucketize(torch.arange(n), ends)
    return {
        "causal documents": lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
        "sums of bits": lambda b, h, i, j: (i ^ j) & 64 == 0,
    }[name]


def _block_mask(n: int, name: str) -> Contest:
    """The block mask of a rule, here and in torch. Compared are the blocks that hold pairs, and those that hold all."""
    size = 64 if n < 1024 else 128
    rule = _rule(n, name)
    ours = partial(create_block_mask, rule, None, None, n, n)
    theirs = partial(of_torch.create_block_mask, rule, None, None, n, n, device="cpu", BLOCK_SIZE=size)

    def our_blocks() -> Tensor:
        blocks = BlockMask.of(ours().graphs[0][0].runs, size, size)
        table = torch.zeros(n // size, n // size)
        row = np.repeat(np.arange(n // size), np.diff(blocks.ptr))
        table[row, blocks.column] = 1.0 + torch.from_numpy(blocks.full)
        return table

    def their_blocks() -> Tensor:
        mask = theirs()
        full = of_torch.BlockMask.from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices).to_dense()
        return (mask.to_dense() + full)[0, 0].float()

    calls: Any = ours, theirs  # which return masks
    entries = [Entry(OURS, calls[0], answer=our_blocks), Entry(FLEX, calls[1], answer=their_blocks)]
    return Contest(entries, Agreement(), Agreement.description, [_faster(4.0, FLEX, FORWARD)], {"nodes": n})
