"""Transformer-XL: a language model that reads a long text in segments and remembers what it thought of the last ones.

topology   memory(m)                               j <= i + m: the remembered states, then the segment up to oneself
attention  RelativeDotProduct(dim, heads)          <W_Q x_i + u, W_K x_j> + <W_Q x_i + v, W_R P(i - j)>
aggregate  "sum"                                   m_i = W_O || _h sum_j w_ij W_V x_j
update     PostNorm(dim, FeedForward(dim))         z   = norm(x + m),  y = norm'(z + ffn(z))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import graphs
from mpnn.dropout import Dropout
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import looked_up, refuse_alone
from mpnn.models.parts.generation import evaluating, generate
from mpnn.models.parts.losses import token_loss
from mpnn.models.parts.relative import RelativeDotProduct
from mpnn.models.saving import Model
from mpnn.update import FeedForward, PostNorm

Memory = Sequence[Tensor]
"""What each layer remembers, [B, m, dim] each, m the same for all."""


class TransformerXL(Model):
    """Transformer-XL (Dai et al. 2019, section 3), with tied embeddings.

        h_0     = W_token[tokens],   no positions: attention knows offsets
        h_l     = layer_l(x = h_(l-1), source = [memory_l || h_(l-1)]),   over memory(m)
        logits  = h W_token^T + b

    What a layer heard becomes its memory for the next segment, without gradients: so the logits of a segment depend on
    the `layers * remember` tokens before it, though each layer hears only `remember` of them.

    Args:
        vocabulary: number of tokens. dim: width. heads: they divide `dim`. layers: their number.
        remember: how many states of each layer are kept for the next segment.
        dropout: of embeddings, attention weights and what the layers add, in training.
    """

    def __init__(
        self, vocabulary: int, dim: int, heads: int, layers: int, *, remember: int = 128, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if remember < 0:
            raise ValueError(f"remember must be at least 0; got {remember}")
        self.remember = remember
        self.token = nn.Embedding(vocabulary, dim)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            MessagePassing(
                graphs.memory(remember),
                "sum",
                PostNorm(dim, FeedForward(dim, activation=nn.ReLU), dropout=dropout),
                RelativeDotProduct(dim, heads, dropout=dropout),
            )
            for _ in range(layers)
        )
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, list[Tensor]]:
        """One segment: tokens int64 [B, N] -> logits of each next token [B, N, vocabulary], and the memory for the next
        segment, `layers` tensors [B, m, dim] with m <= remember; `memory` is that of the segment before."""
        refuse_alone(tokens)
        h = self.dropout(looked_up(self.token, tokens, "token"))
        old = self._checked(memory, h)
        new = []
        for layer, remembered in zip(self.layers, old, strict=True):
            source = torch.cat([remembered, h], 1)
            new.append(source[:, max(0, source.shape[1] - self.remember) :].detach())
            h = layer(h, graphs.memory(remembered.shape[1]), source)
        return F.linear(self.dropout(h), self.token.weight, self.bias), new

    def loss(self, tokens: Tensor, targets: Tensor, memory: Memory | None = None) -> tuple[Tensor, list[Tensor]]:
        """Mean cross-entropy of a segment in nats, targets [B, N] (-100: nothing to predict), and the new memory."""
        logits, new = self(tokens, memory)
        return token_loss(logits, targets), new

    def generate(self, tokens: Tensor, steps: int, memory: Memory | None = None, **options: Any) -> Tensor:
        """`tokens` int64 [B, N] and up to `steps` more that the model draws, [B, N + steps], each of which hears the
        memory that those before it have left; options as those of `generation.generate`."""

        def forward(fresh: Tensor, cache: object) -> Tensor:
            nonlocal memory
            logits, memory = self(fresh, memory)
            return logits

        with evaluating(self):
            return generate(forward, tokens, steps, **options)

    def _checked(self, memory: Memory | None, h: Tensor) -> Memory:
        if memory is None:
            return [h.new_zeros(h.shape[0], 0, h.shape[2])] * len(self.layers)
        expected = (h.shape[0], memory[0].shape[1] if memory else 0, h.shape[2])
        shapes = [tuple(m.shape) for m in memory]
        if len(memory) != len(self.layers) or set(shapes) != {expected}:
            raise ValueError(
                f"memory holds a tensor [batch, m, dim] = [{h.shape[0]}, m, {h.shape[2]}] for each of "
                f"{len(self.layers)} layers; got {shapes}"
            )
        return memory
