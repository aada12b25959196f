"""Reformer (Kitaev et al. 2020): attention within chunks of positions and within buckets of locality-sensitive hashes.

topology   local: chunks attend to themselves and the one before   lsh: the same, with nodes sorted by hash, per head
attention  local: DotProduct(dim, heads)                           lsh: SharedKey, with W_K = W_Q
aggregate  "sum"
update     Reversible(dim, FeedForward(dim))                       two streams
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn.attention import DotProduct
from mpnn.decoding.generation import refuse_the_future
from mpnn.dropout import Dropout
from mpnn.graph.topology import Topology
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.blocks import AxialPositions, embedded, looked_up, updated_by
from mpnn.models.layers.losses import token_loss
from mpnn.models.layers.packing import Packing, all_kept, refuse_while_tracing
from mpnn.models.saving import Model
from mpnn.models.text.bert import Encoded
from mpnn.models.text.reformer_hashing import Heard, ReformerConfig, SharedKey
from mpnn.update import Reversible


class Reformer(Model):
    """Reformer encoder or decoder (Kitaev et al. 2020). The output is the concatenation of its two streams, of width
    `2 * dim`.

    The layers are reversible, but this implementation still stores their activations for the backward pass.

    Args:
        config: sizes and options.
        graph: replaces the chunks and hashes of all layers. It is bound to the positions of the padded row.

    Raises:
        ValueError: if `config.causal` and a node of `graph` attends to a later one.
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
        """Encodes a batch of sentences.

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] that replace the token embeddings.
            keep: bool [B, N], True at tokens and False at padding; default: all True. Padding is not computed and not
                attended to.
            positions: int64 [B, N]; default: 0 to N - 1.
            rounds: number of hashing rounds; default: `config.rounds`.
            return_states: also return the second stream before each layer and after the last, [B, N, dim] each.

        Returns:
            `last` has shape [B, N, 2 * dim]. `pooled` and `weights` are None.
        """
        refuse_while_tracing("the tokens' hashes decide the graph")
        packing = Packing.of(all_kept(tokens) if keep is None else keep, apart=True)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        vectors = embedded(self.token, tokens)
        x = self.dropout(packing.pack(vectors)) + self.dropout(self._position(packing.pack(positions)))
        x = torch.cat([x, x], -1)
        graphs, states = Heard(self.config, packing, rounds), [x]
        for layer in self.layers:
            assert isinstance(layer, MessagePassing)
            x = layer(x, graphs.by(layer, x) if self.graph is None else graphs.over(self.graph, layer))
            states.append(x)
        last = packing.unpack(self.dropout(self.norm(x)))
        outputs = tuple(packing.unpack(x.chunk(2, -1)[1]) for x in states) if return_states else None
        return Encoded(last, None, outputs, None)

    def _position(self, positions: Tensor) -> Tensor:
        if isinstance(self.position, AxialPositions):
            return self.position(positions)
        assert isinstance(self.position, nn.Embedding)
        return looked_up(self.position, positions, "position")


class ReformerLM(Model):
    """Reformer for causal or masked language modelling: `logits_i = W y_i + b`. W is not tied to the embeddings."""

    def __init__(self, config: ReformerConfig, graph: Topology | None = None) -> None:
        super().__init__()
        self.encoder = Reformer(config, graph)
        self.to_logits = nn.Linear(2 * config.dim, config.vocabulary)

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Returns logits [B, N, vocabulary]. Arguments are those of `Reformer.forward`."""
        return self.to_logits(self.encoder(tokens, keep).last)

    def loss(self, tokens: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        """Returns the mean cross-entropy in nats. targets: int64 [B, N], -100 at positions to ignore."""
        return token_loss(self(tokens, keep), targets)
