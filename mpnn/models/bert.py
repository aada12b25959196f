"""BERT (Devlin et al. 2019): every token of a sentence hears every other.

topology   complete()                              or any other: causal(), window(16), longformer(32, globals=1), ...
attention  DotProduct(dim, heads)                  w_ij = softmax_j( <W_Q x_i, W_K x_j> / sqrt(D) )
aggregate  "sum"                                   m_i  = W_O || _h sum_j w_ij W_V x_j
update     PostNorm(dim, FeedForward(dim))         z    = norm(x + m),  y = norm'(z + ffn(z))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.attention import DotProduct
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import Embeddings, begin_small, one_each, updated_by
from mpnn.models.parts.packing import Packing
from mpnn.models.parts.rounds import through
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import PostNorm


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT; the defaults are BERT-base's.

    vocabulary, types: numbers of tokens and of token types. dim, hidden: widths of the model and of its feed-forward
    network. context: number of learned positions, the longest sentence. pad: the token whose embedding is not trained,
    or None. after_pad: positions count the tokens that are no pads, from pad + 1 on (RoBERTa, Liu et al. 2019).
    activation: a name in `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm.
    """

    vocabulary: int = 30522
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    context: int = 512
    types: int = 2
    pad: int | None = 0
    activation: str = "gelu"
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    after_pad: bool = False

    @property
    def first_position(self) -> int:
        """The row of the first token in the table of positions."""
        if self.after_pad and self.pad is None:
            raise ValueError("after_pad counts positions from pad + 1 on, so the configuration needs a pad")
        return self.pad + 1 if self.after_pad and self.pad is not None else 0


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a BERT makes of a batch, zeros wherever there is no token.

    last [B, N, dim]. pooled [B, dim], of each sentence's first token; None without a pooler. states: the embeddings
    and each layer's output, [B, N, dim] each. weights: each layer's attention weights, [B, H, N, N].
    """

    last: Tensor
    pooled: Tensor | None
    states: tuple[Tensor, ...] | None
    weights: tuple[Tensor, ...] | None


class Bert(Model):
    """BERT over any topology, or one for each layer; `pooler` adds the map that classifies sentences by their first
    token. A model whose layers hear in another way overrides `layer` and `graphs`."""

    def __init__(
        self, config: BertConfig, graph: Topology | Sequence[Topology] | None = None, *, pooler: bool = True
    ) -> None:
        super().__init__()
        dim, norm = config.dim, partial(nn.LayerNorm, eps=config.eps)
        self.config = config
        self.embeddings = Embeddings(
            config.vocabulary,
            config.context,
            config.types,
            dim,
            pad=config.pad,
            norm=norm,
            dropout=config.dropout,
            first=config.first_position,
        )
        topologies = one_each(complete() if graph is None else graph, config.layers)
        self.layers = nn.ModuleList(self.layer(config, topology) for topology in topologies)
        self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) if pooler else None
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                begin_small(part)

    @staticmethod
    def layer(config: BertConfig, graph: Topology) -> nn.Module:
        """One round; called with x and what `graphs` gives for it."""
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(graph, "sum", update(config), attention)

    def packing(self, keep: Tensor) -> Packing:
        return Packing.of(keep)

    def graphs(self, packing: Packing) -> list[Any]:
        """Who hears whom in each layer, over the packed tokens."""
        return [packing.bind(layer.graph) for layer in self.layers if isinstance(layer, MessagePassing)]

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        graph: Topology | None = None,
        lengths: Sequence[int] | None = None,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Encoded:
        """One pass over a batch of sentences.

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] in place of the token embeddings.
            keep: bool [B, N], which places hold tokens; default: all. The others are neither computed nor heard.
            types: int64 [B, N], default 0. positions: int64 [B, N], rows of the table; default: counted from the
                first on.
            graph: replaces the topology of every layer in this call.
            lengths: every row packs documents of these lengths, N together. A document is computed as if it were
                alone: positions restart, and no token attends to another document. `pooled` is then of each document,
                [B, documents, dim]. Takes no `keep`.
            return_states, return_weights: whether to give more than the last layer's output.
        """
        if keep is not None and lengths is not None:
            raise ValueError("lengths describe rows without padding; give either keep or lengths")
        packing = Packing.whole(tokens, lengths) if keep is None else self.packing(keep)
        if positions is None and packing.documents is not None:
            positions = torch.cat([self.positions(part) for part in tokens.split(packing.documents, 1)], 1)
        graphs = self.graphs(packing) if graph is None else [packing.bind(graph)] * len(self.layers)
        return self.encoded(packing, graphs, tokens, types, positions, return_states, return_weights)

    def encoded(
        self,
        packing: Packing,
        graphs: Sequence[Any],
        tokens: Tensor,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Encoded:
        """`forward` over given graphs, one for each layer, over the packed tokens."""
        types = torch.zeros_like(packing.keep, dtype=torch.int64) if types is None else types
        positions = self.positions(tokens) if positions is None else positions
        x = self.embeddings(packing.pack(tokens), packing.pack(positions), packing.pack(types))
        x, states, heard = through(self.layers, graphs, x, return_states=return_states, return_weights=return_weights)
        last = packing.unpack(x)
        return Encoded(
            last,
            None if self.pooler is None else self.pooler(packing.first(last)),
            tuple(map(packing.unpack, states)) if return_states else None,
            tuple(map(packing.unpack_weights, heard, graphs)) if return_weights else None,
        )

    def positions(self, tokens: Tensor) -> Tensor:
        """The row of each token in the table of positions, int64 [B, N]: its place, or its rank among what is no pad;
        pads are then at the row before the first."""
        first, shape = self.config.first_position, tokens.shape[:2]
        if first and not tokens.is_floating_point():
            real = tokens.ne(first - 1)
            return real.cumsum(1) * real + first - 1
        return torch.arange(first, first + shape[1], device=tokens.device).expand(shape)


def update(config: BertConfig) -> PostNorm:
    """What a token makes of its message: the second half of a BERT layer."""
    return updated_by(PostNorm, config)
