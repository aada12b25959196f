"""Attention layers of Hugging Face's models for long texts against ours of the same shape, in training mode.

Theirs are the self-attention modules: three linear maps and the attention. Ours has a fourth map, which is against us;
so is dropout compared with BigBird's, which drops no weights. Weights and random blocks differ, so ours alone is
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.contest import BOTH, OURS, Bar, Case, Contest, Entry, Missing
from benchmarks.peers import unless_missing
from benchmarks.sizes import Sizes
from benchmarks.truth import of_layer
from mpnn import MessagePassing, Topology, graphs
from mpnn.attention import DotProduct

GLOBALS = 4
LONGFORMER, BIGBIRD, BERT = "HF LongformerSelfAttention", "HF BigBirdBlockSparseAttention", "HF BertSelfAttention"

Rival = Callable[[Tensor, int, float], tuple[nn.Module, tuple[object, ...]]]
"""Made from features [N, dim], heads and dropout: the module, and what it takes after the features."""


def cases(sizes: Sizes, backend: str) -> Iterator[Case]:
    n = sizes.nodes
    for dropout in (0.1, 0.0):
        for name, topology, peer, rival, times in (
            (f"Longformer({n // 8}, {GLOBALS})", graphs.longformer(n // 8, globals=GLOBALS), LONGFORMER, longformer, 8),
            ("BigBird(64)", graphs.bigbird(), BIGBIRD, bigbird, 8),
            ("BERT", graphs.complete(), BERT, bert, None),
        ):
            bars = []
            if times is not None and dropout:
                bars.append(Bar(f"at least {times}x faster than {peer}", times, "at least", BOTH, peer))
            make = partial(_contest, sizes, topology, peer, rival, dropout, bars, backend)
            yield Case("layers", f"{name}, N {n}, dropout {dropout}", make)


def _contest(
    sizes: Sizes, topology: Topology, peer: str, rival: Rival, dropout: float, bars: list[Bar], backend: str
) -> Contest:
    dim, n = sizes.heads * sizes.width, sizes.nodes
    x, graph = torch.randn(n, dim).requires_grad_(), topology.bind(n)
    op = MessagePassing(topology, "sum", None, DotProduct(dim, sizes.heads, dropout=dropout), backend=backend)
    ours = Entry(OURS, lambda: op(x), (x, *op.parameters()), module=op)

    def make() -> Entry:
        module, rest = rival(x, sizes.heads, dropout)
        module.train()
        return Entry(peer, lambda: module(x[None], *rest)[0], (x, *module.parameters()), checked=False)

    exact = of_layer(op, graph, x, dim)
    facts = {"nodes": n, "edges": graph.num_edges, "heads": sizes.heads, "width": sizes.width}
    theirs: Entry | Missing = unless_missing(peer, "transformers", make)
    return Contest([ours, theirs], exact, exact.description, bars, facts)


def longformer(x: Tensor, heads: int, dropout: float) -> tuple[nn.Module, tuple[object, ...]]:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    n, dim = x.shape
    config = LongformerConfig(
        hidden_size=dim, num_attention_heads=heads, attention_window=[n // 8], attention_probs_dropout_prob=dropout
    )
    mask = torch.zeros(1, n)
    mask[:, :GLOBALS] = 10_000.0  # above zero marks a global node
    return LongformerSelfAttention(config, 0), (mask, mask < 0, mask > 0, True)


def bigbird(x: Tensor, heads: int, dropout: float) -> tuple[nn.Module, tuple[object, ...]]:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    n, dim = x.shape
    config = BigBirdConfig(hidden_size=dim, num_attention_heads=heads, max_position_embeddings=n)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, n), config.block_size)
    return BigBirdBlockSparseAttention(config, seed=0), (band, rows, columns, blocked, blocked)


def bert(x: Tensor, heads: int, dropout: float) -> tuple[nn.Module, tuple[object, ...]]:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(
        hidden_size=x.shape[-1],
        num_attention_heads=heads,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )
    return BertSelfAttention(config), ()
