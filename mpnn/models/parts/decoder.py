"""What language models share: tokens in, layers over a graph in which nobody hears the future, the next token out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.decoding import Cache
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.models.parts.blocks import embedded, looked_up
from mpnn.models.parts.generation import evaluating, generate
from mpnn.models.parts.losses import token_loss
from mpnn.models.parts.rounds import through
from mpnn.models.saving import Model
from mpnn.topology import Topology

Bind = Callable[[Topology], Topology | Graph]
"""What a layer's topology is over the nodes of a call: itself, or a graph such as `Packing.bind` gives."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decoder makes of tokens [..., N].

    last [..., N, dim]. states: the embeddings and each layer's output, [..., N, dim] each, the last one normed.
    weights: each layer's attention weights, [..., E, H].
    """

    last: Tensor
    states: tuple[Tensor, ...] | None
    weights: tuple[Tensor, ...] | None


class Decoder(Model):
    """A language model; a subclass makes its parts.

        h = W_token[tokens] (+ W_position[positions])
        h <- layer(h), for each layer one operator
        logits = norm(h) W_head^T, with W_head = W_token where `head` is None

    `context`: the longest sequence that it is for.
    """

    context: int
    token: nn.Embedding
    position: nn.Embedding | None
    dropout: Dropout
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear | None

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits of each next token: tokens [B, N], integers, N <= context -> [B, N, vocabulary].

        With a cache, the tokens are those that come after the ones it has seen.
        """
        if tokens.is_floating_point():
            raise TypeError(f"tokens must be integers [B, N]; got {tokens.dtype} of shape {list(tokens.shape)}")
        last = self.decode(tokens, cache=cache).last
        return F.linear(last, self.token.weight) if self.head is None else self.head(last)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        bind: Bind | None = None,
        cache: Cache | None = None,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Decoded:
        """One pass without the head.

        Args:
            tokens: integers [..., N], or vectors [..., N, dim] in place of the token embeddings.
            positions: integers [..., N] or [N], for learned positions; default: 0 to N-1, counted on from the cache.
            bind: makes graphs of the layers' topologies. cache: of the nodes before.
            return_states, return_weights: whether to give more than the last layer's output.
        """
        x = self._embedded(tokens, positions, 0 if cache is None else cache.count)
        own: list[Any] = [layer.graph for layer in self.layers]
        graphs = own if bind is None else [bind(graph) for graph in own]
        x, states, weights = through(
            self.layers, graphs, x, return_states=return_states, return_weights=return_weights, cache=cache
        )
        last = self.norm(x)
        return Decoded(
            last, (*states[:-1], last) if return_states else None, tuple(weights) if return_weights else None
        )

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; targets [B, N], -100 where there is nothing to predict."""
        return token_loss(self(tokens), targets)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        steps: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        *,
        top_p: float | None = None,
        eos: int | None = None,
    ) -> Tensor:
        """`tokens` [B, N] and up to `steps` more that the model draws, [B, N + steps]: `generation.generate`, with its
        options. Beyond `context`, the oldest are forgotten."""
        with evaluating(self):
            return generate(
                self,
                tokens,
                steps,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                eos=eos,
                generator=generator,
                context=self.context,
            )

    def _embedded(self, tokens: Tensor, positions: Tensor | None, start: int) -> Tensor:
        vectors = embedded(self.token, tokens)
        stop = start + vectors.shape[-2]
        if positions is None and stop > self.context:
            raise ValueError(f"got {stop} tokens, but this model was made with context={self.context}")
        if self.position is not None:
            if positions is None:
                vectors = vectors + self.position.weight[start:stop]
            else:
                vectors = vectors + looked_up(self.position, positions, "position")
        return self.dropout(vectors)
