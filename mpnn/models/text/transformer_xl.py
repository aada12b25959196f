"""Transformer-XL (Dai et al. 2019): a language model that reads long texts in segments and caches earlier states.

topology   memory(m)                               j <= i + m: m cached states, then the segment up to node i
attention  RelativeDotProduct(dim, heads)          <W_Q x_i + u, W_K x_j> + <W_Q x_i + v, W_R P(i - j)>
aggregate  "sum"                                   m_i = W_O || _h sum_j w_ij W_V x_j
update     PostNorm(dim, FeedForward(dim))         z   = norm(x + m),  y = norm'(z + ffn(z))
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.decoding.generation import eval_mode, generate
from mpnn.models.layers.blocks import lookup, require_batch
from mpnn.models.layers.losses import token_loss
from mpnn.models.layers.relative import RelativeDotProduct
from mpnn.models.saving import Model
from mpnn.update import FeedForward, PostNorm
from mpnn.update.dropout import Dropout
from mpnn.update.maps import linear

Memory = Sequence[Tensor]
"""Cached states of each layer, [B, m, dim] each, with the same m for all layers."""


class TransformerXL(Model):
    """Transformer-XL (Dai et al. 2019, section 3), with tied embeddings.

        h_0     = W_token[tokens],   no positions: the attention is relative
        h_l     = layer_l(x = h_(l-1), source = [memory_l || h_(l-1)]),   over memory(m)
        logits  = h W_token^T + b

    The last inputs of a layer become its memory for the next segment, without gradients. The logits of a segment depend
    on the `layers * remember` tokens before it, although each layer attends to only `remember` cached states.

    Args:
        vocabulary: number of tokens.
        dim: width of the model.
        heads: number of heads; must divide `dim`.
        layers: number of layers.
        remember: number of states of each layer that are cached for the next segment.
        dropout: of embeddings, attention weights, and the outputs of attention and feed-forward network.

    Raises:
        ValueError: if `remember` is negative.
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
        """Runs one segment.

        Args:
            tokens: int64 [B, N].
            memory: the memory that the previous segment returned; default: none.

        Returns:
            Logits of each next token [B, N, vocabulary], and the memory for the next segment: one tensor [B, m, dim]
            per layer, m <= `remember`.
        """
        require_batch(tokens)
        h = self.dropout(lookup(self.token, tokens, "token"))
        new_memory = []
        for layer, states in zip(self.layers, self._validate(memory, h), strict=True):
            source = torch.cat([states, h], 1)
            new_memory.append(source[:, max(0, source.shape[1] - self.remember) :].detach())
            h = layer(h, graphs.memory(states.shape[1]), source)
        return linear(self.dropout(h), self.token.weight, self.bias), new_memory

    def loss(self, tokens: Tensor, targets: Tensor, memory: Memory | None = None) -> tuple[Tensor, list[Tensor]]:
        """Returns the mean cross-entropy of a segment in nats, and its memory. targets: int64 [B, N], -100 at positions
        to ignore."""
        logits, new_memory = self(tokens, memory)
        return token_loss(logits, targets), new_memory

    def generate(self, tokens: Tensor, steps: int, memory: Memory | None = None, **options: Any) -> Tensor:
        """Samples up to `steps` tokens after `tokens`, int64 [B, N]. Each new token attends to the memory of the tokens
        before it. Returns int64 [B, at most N + steps]. Options are those of `generation.generate`."""

        def forward(fresh: Tensor, cache: object) -> Tensor:
            nonlocal memory
            logits, memory = self(fresh, memory)
            return logits

        with eval_mode(self):
            return generate(forward, tokens, steps, **options)

    def _validate(self, memory: Memory | None, h: Tensor) -> Memory:
        if memory is None:
            return [h.new_zeros(h.shape[0], 0, h.shape[2])] * len(self.layers)
        expected = (h.shape[0], memory[0].shape[1] if memory else 0, h.shape[2])
        shapes = [tuple(m.shape) for m in memory]
        if len(memory) != len(self.layers) or set(shapes) != {expected}:
            raise ValueError(
                f"memory must hold a tensor [batch, m, dim] = [{h.shape[0]}, m, {h.shape[2]}] for each of "
                f"{len(self.layers)} layers; got {shapes}"
            )
        return memory
