"""BERT (Devlin et al. 2019): every token of a sentence hears every other.

topology   complete()                              or any other: window(16), longformer(32, globals=1), ...
attention  DotProduct(dim, heads)                  w_ij = softmax_j( <W_Q x_i, W_K x_j> / sqrt(D) )
aggregate  "sum"                                   m_i  = W_O || _h sum_j w_ij W_V x_j
update     PostNorm(dim, FeedForward(dim))         z    = norm(x + m),  y = norm'(z + ffn(z))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mpnn.attention import DotProduct
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.blocks import ACTIVATIONS, Embeddings
from mpnn.models.packing import Packing
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import FeedForward, PostNorm


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT; the defaults are BERT-base's.

    vocabulary, types: numbers of tokens and of token types. dim, hidden: widths of the model and of its feed-forward
    network. context: number of learned positions, the longest sentence. pad: the token whose embedding is not trained,
    or None. activation: a name in `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm.
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
    """BERT over any topology; `pooler` adds the map that classifies sentences by their first token."""

    def __init__(self, config: BertConfig, graph: Topology | None = None, *, pooler: bool = True) -> None:
        super().__init__()
        graph = complete() if graph is None else graph
        dim, norm = config.dim, partial(nn.LayerNorm, eps=config.eps)
        self.embeddings = Embeddings(
            config.vocabulary, config.context, config.types, dim, pad=config.pad, norm=norm, dropout=config.dropout
        )

        def layer() -> MessagePassing:
            ffn = FeedForward(dim, config.hidden, ACTIVATIONS[config.activation])
            update = PostNorm(dim, ffn, dropout=config.dropout, norm=norm)
            return MessagePassing(graph, "sum", update, DotProduct(dim, config.heads, dropout=config.attention_dropout))

        self.layers = nn.ModuleList(layer() for _ in range(config.layers))
        self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) if pooler else None

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Encoded:
        """One pass over a batch of sentences.

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] in place of the token embeddings.
            keep: bool [B, N], which places hold tokens; default: all. The others are neither computed nor heard.
            types: int64 [B, N], default 0. positions: int64 [B, N], default 0 to N-1.
            return_states, return_weights: whether to give more than the last layer's output.
        """
        shape, device = tokens.shape[:2], tokens.device
        packing = Packing.of(torch.ones(shape, dtype=torch.bool, device=device) if keep is None else keep)
        types = torch.zeros(shape, dtype=torch.int64, device=device) if types is None else types
        positions = torch.arange(shape[1], device=device).expand(shape) if positions is None else positions

        x = self.embeddings(packing.pack(tokens), packing.pack(positions), packing.pack(types))
        states, weights = [x], []
        for layer in self.layers:
            assert isinstance(layer, MessagePassing)
            graph = packing.bind(layer.graph)
            x = layer(x, graph, return_weights=return_weights)
            if return_weights:
                x, heard = x
                weights.append(packing.unpack_weights(heard, graph))
            if return_states:
                states.append(x)
        last = packing.unpack(x)
        return Encoded(
            last,
            None if self.pooler is None else self.pooler(packing.first(last)),
            tuple(packing.unpack(x) for x in states) if return_states else None,
            tuple(weights) if return_weights else None,
        )
