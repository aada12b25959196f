"""Reformer (Kitaev et al. 2020): who hears whom is asked of the features themselves.

topology   local: a chunk hears itself and the one before   lsh: so do chunks of nodes sorted by their hash, per head
attention  local: DotProduct(dim, heads)                    lsh: SharedKey, W_K = W_Q, so that one hash serves both
aggregate  "sum"
update     Reversible(dim, FeedForward(dim))                two streams
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn.attention import DotProduct
from mpnn.dropout import Dropout
from mpnn.message_passing import MessagePassing
from mpnn.models.bert import Encoded
from mpnn.models.hashing import Heard, ReformerConfig, SharedKey
from mpnn.models.parts.blocks import AxialPositions, embedded, looked_up, updated_by
from mpnn.models.parts.generation import refuse_the_future
from mpnn.models.parts.losses import token_loss
from mpnn.models.parts.packing import Packing, all_kept, refuse_while_tracing
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import Reversible


class Reformer(Model):
    """Reformer. Its two streams end side by side, so that the result is `2 * dim` wide.

    A layer's features follow from its results, so training need not keep them; here it does.

    Args:
        graph: takes the place of chunks and hashes in all layers; it goes by places.

    Raises:
        ValueError: a causal model is given a graph in which a node hears a later one.
    """

    def __init__(self, config: ReformerConfig, graph: Topology | None = None) -> None:
        super().__init__()
        if config.causal and graph is not None:
            refuse_the_future(graph, config.context)
        dim = config.dim
        self.config, self.graph = config, graph
        self.token = nn.Embedding(config.vocabulary, dim)
        axial = None if config.axial is None else AxialPositions(config.axial, config.axial_dims)
        self.position = nn.Embedding(config.context, dim) if axial is None else axial

        def layer(kind: str) -> MessagePassing:
            update = updated_by(Reversible, config, ffn_dropout=config.dropout)
            dropout = config.chunks(kind).dropout
            attention = (
                SharedKey(dim, config.heads, head_dim=config.head_dim, dropout=dropout)
                if kind == "lsh"
                else DotProduct(dim, config.heads, head_dim=config.head_dim, dropout=dropout, bias=False)
            )
            return MessagePassing(None, "sum", update, attention)

        self.layers = nn.ModuleList(layer(kind) for kind in config.layers)
        self.norm, self.dropout = nn.LayerNorm(2 * dim, eps=config.eps), Dropout(config.dropout)

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        rounds: int | None = None,
        return_states: bool = False,
    ) -> Encoded:
        """One pass over a batch of sentences.

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] in place of the token embeddings.
            keep: bool [B, N], which places hold tokens; default: all. The others are neither computed nor heard.
            positions: int64 [B, N], default 0 to N-1.
            rounds: of hashing; default: the configuration's.
            return_states: whether to give the second stream before each layer and after the last, [B, N, dim] each.

        Returns:
            last [B, N, 2 * dim]; there is no pooler.
        """
        refuse_while_tracing("the tokens' hashes decide the graph")
        packing = Packing.of(all_kept(tokens) if keep is None else keep, apart=True)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        vectors = embedded(self.token, tokens)
        x = self.dropout(packing.pack(vectors)) + self.dropout(self._position(packing.pack(positions)))
        x = torch.cat([x, x], -1)
        heard, states = Heard(self.config, packing, rounds), [x]
        for layer in self.layers:
            assert isinstance(layer, MessagePassing)
            x = layer(x, heard.by(layer, x) if self.graph is None else heard.over(self.graph, layer))
            states.append(x)
        last = packing.unpack(self.dropout(self.norm(x)))
        seen = tuple(packing.unpack(x.chunk(2, -1)[1]) for x in states) if return_states else None
        return Encoded(last, None, seen, None)

    def _position(self, positions: Tensor) -> Tensor:
        if isinstance(self.position, AxialPositions):
            return self.position(positions)
        assert isinstance(self.position, nn.Embedding)
        return looked_up(self.position, positions, "position")


class ReformerLM(Model):
    """Which token comes next, or stands in a hidden token's place: `logits_i = W y_i + b`, W a table of its own."""

    def __init__(self, config: ReformerConfig, graph: Topology | None = None) -> None:
        super().__init__()
        self.encoder = Reformer(config, graph)
        self.to_logits = nn.Linear(2 * config.dim, config.vocabulary)

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits [B, N, vocabulary]; arguments as those of `Reformer`."""
        return self.to_logits(self.encoder(tokens, keep).last)

    def loss(self, tokens: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats; targets int64 [B, N], -100 where there is nothing to predict."""
        return token_loss(self(tokens, keep), targets)
