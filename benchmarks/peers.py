"""Other libraries' attention over sequences, each in its own layout; what is not installed raises an error that says
so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.contest import Entry, Missing
from benchmarks.machine import multiply_in_cache
from mpnn import Graph

LOOPED, PADDED = "torch SDPA, looped", "torch SDPA, padded"
IN_CACHE = "its products in cache"

PACKAGES = {
    "local_attention": "local-attention",
    "transformers": "transformers",
    "torch_geometric": "torch-geometric",
    "torch_scatter": "torch-scatter",
    "torch_sparse": "torch-sparse",
    "torch_cluster": "torch-cluster",
    "natten": "natten",
    "dgl": "dgl",
    "fla": "flash-linear-attention",
}


def unless_missing(name: str, package: str, make: Callable[[], Entry]) -> Entry | Missing:
    """The entry, or what to install for it."""
    if find_spec(package) is None:
        return Missing(name, f"{PACKAGES[package]} is not installed: pip install {PACKAGES[package]}")
    try:
        return make()
    except (ImportError, OSError, RuntimeError) as problem:  # installed, but not for this torch or machine
        return Missing(name, f"{PACKAGES[package]} does not run here: {str(problem).splitlines()[0]}")


Features = tuple[Tensor, Tensor, Tensor]


def heads_first(features: Features) -> Features:
    """Queries, keys and values [N, H, D] as leaves of their own in torch's layout, [1, H, N, D]."""
    query, key, value = (x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in features)
    return query, key, value


def nodes_first(x: Tensor) -> Tensor:
    """[1, H, N, D] as [N, H, D], without moving a number."""
    return x[0].transpose(0, 1)


def in_cache(flops: float, width: int) -> Entry:
    """The products of attention alone, of tiles that stay in the cache: the most that a kernel can reach. Backward, 2.5
    times as many as forward."""
    leaf = torch.zeros(1, requires_grad=True)
    return Entry(IN_CACHE, lambda: _Products.apply(leaf, flops, width), (leaf,), checked=False)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flops: float, width: int) -> Tensor:
        ctx.flops, ctx.width = flops, width
        multiply_in_cache(flops, width)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        multiply_in_cache(2.5 * ctx.flops, ctx.width)
        return gradient, None, None


def dense(features: Features, name: str = "torch SDPA, dense", checked: bool = False, **options: Any) -> Entry:
    """Every pair, or with `is_causal` every earlier one: the unit of sparse attention's bars."""
    query, key, value = heads_first(features)

    def call() -> Tensor:
        return nodes_first(F.scaled_dot_product_attention(query, key, value, **options))

    return Entry(name, call, (query, key, value), nodes_first, checked)


def masked(graph: Graph, features: Features) -> Entry:
    """torch's dense attention with the graph as a mask, which is made beforehand."""
    return dense(features, "torch SDPA, masked", True, attn_mask=graph.dense())


def looped(lengths: Sequence[int], features: Features) -> Entry:
    """torch's dense attention called for each document."""
    query, key, value = heads_first(features)

    def call() -> Tensor:
        parts = zip(*(x.split(list(lengths), 2) for x in (query, key, value)), strict=True)
        return nodes_first(torch.cat([F.scaled_dot_product_attention(*part) for part in parts], 2))

    return Entry(LOOPED, call, (query, key, value), nodes_first)


def padded(lengths: Sequence[int], features: Features) -> Entry:
    """torch's dense attention over a batch of documents, padded to the longest; padding and its mask are made
    beforehand, as a model does once for all of its layers."""
    longest, split = max(lengths), list(lengths)
    keep = torch.arange(longest) < torch.tensor(split)[:, None]
    query, key, value = (
        torch.nn.utils.rnn.pad_sequence(x.detach().split(split), batch_first=True).transpose(1, 2).contiguous()
        for x in features
    )
    leaves = tuple(x.requires_grad_() for x in (query, key, value))
    mask = keep[:, None, None]

    def call() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, attn_mask=mask).transpose(1, 2)[keep]

    return Entry(PADDED, call, leaves, lambda x: x.transpose(1, 2)[keep])


def flex(features: Features, mask: Callable[..., Tensor], compiled: bool = True) -> Entry:
    """FlexAttention, its block mask built beforehand. mask(batch, head, i, j): whether i attends to j."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = heads_first(features)
    block_mask = create_block_mask(mask, None, None, query.shape[-2], key.shape[-2], device=query.device)
    attention = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    only = "FlexAttention has no backward pass on CPUs" if query.device.type == "cpu" else ""

    def call() -> Tensor:
        leaves = (x.detach() for x in (query, key, value)) if only else (query, key, value)
        return nodes_first(attention(*leaves, block_mask=block_mask))

    return Entry("FlexAttention", call, (query, key, value), nodes_first, only_forward=only)


def local_attention(features: Features, radius: int, causal: bool) -> Entry | Missing:
    """lucidrains' local-attention with its exact window."""

    def make() -> Entry:
        from local_attention import LocalAttention

        layer = LocalAttention(
            window_size=radius, causal=causal, look_forward=int(not causal), exact_windowsize=True,
            autopad=True, use_rotary_pos_emb=False,
        )  # fmt: skip
        query, key, value = heads_first(features)
        return Entry("local-attention", lambda: nodes_first(layer(query, key, value)), (query, key, value), nodes_first)

    return unless_missing("local-attention", "local_attention", make)


def natten(features: Features, radius: int, causal: bool) -> Entry | Missing:
    """Neighborhood attention; where sequences end it shifts windows inwards, so its numbers are its own."""

    def make() -> Entry:
        from natten.functional import na1d

        query, key, value = (x.detach()[None].clone().requires_grad_() for x in features)

        def call() -> Tensor:
            return na1d(query, key, value, kernel_size=2 * radius + 1, is_causal=causal)[0]

        call()
        return Entry("NATTEN", call, (query, key, value), lambda x: x[0], checked=False)

    return unless_missing("NATTEN", "natten", make)
