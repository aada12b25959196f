"""What language models share: tokens in, layers over a graph in which nobody hears the future, the next token out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import ops
from mpnn.decoding import Cache
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.models.parts.blocks import embedded, looked_up
from mpnn.models.parts.generation import evaluating, generate, refuse_the_future, refuse_to_continue
from mpnn.models.parts.losses import token_loss, without_ends
from mpnn.models.parts.packing import Packing, document_lengths
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

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        graph: Topology | Graph | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits of each next token.

        Args:
            tokens: integers [B, N], N <= context.
            cache: the tokens are those that come after the ones it has seen.
            graph: replaces the graph of every layer in this call. A topology, or a graph of N nodes.
            lengths: every row packs documents of these lengths, N together, each at most `context`. A document is
                computed as if it were alone: positions restart, and no token attends to another document. A `graph`
                beside it must be a topology, and applies to each document.

        Returns:
            [B, N, vocabulary].

        Raises:
            ValueError: a node of `graph` attends to a later one; lengths that do not add up to N; or a cache beside
                `graph` or `lengths`.
        """
        if tokens.is_floating_point():
            raise TypeError(f"tokens must be integers [B, N]; got {tokens.dtype} of shape {list(tokens.shape)}")
        if cache is not None:
            refuse_to_continue(graph, lengths)
        packing = None if lengths is None else self._documents(tokens, lengths)
        positions = None if packing is None else packing.positions()
        bind = None if graph is None and packing is None else self._bind(tokens, graph, packing)
        last = self.decode(tokens, positions, bind=bind, cache=cache).last
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

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        graph: Topology | Graph | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats; targets [B, N], -100 where there is nothing to predict. Other arguments as those
        of `forward`. With `lengths`, nothing is predicted at the last token of each document, whatever its target."""
        if lengths is not None:
            targets = without_ends(targets, document_lengths(lengths, tokens.shape[-1]))
        return token_loss(self(tokens, graph=graph, lengths=lengths), targets)

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
        graph: Topology | Graph | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """`tokens` [B, N] and up to `steps` more that the model draws, [B, N + steps]: `generation.generate`, with its
        options. Beyond `context`, the oldest are forgotten.

        Raises:
            ValueError: an option out of its range, or `graph` or `lengths`, which only whole passes take.
        """
        refuse_to_continue(graph, lengths)
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

    def _documents(self, tokens: Tensor, lengths: Sequence[int]) -> Packing:
        packing = Packing.whole(tokens, lengths)
        longest = max(packing.documents or (0,))
        if longest > self.context:
            raise ValueError(f"got a document of {longest} tokens, but this model was made with context={self.context}")
        return packing

    def _bind(self, tokens: Tensor, graph: Topology | Graph | None, packing: Packing | None) -> Bind:
        """What replaces the topologies of the layers in one call."""
        if graph is not None:
            sizes = (tokens.shape[-1],) if packing is None else packing.documents or ()
            for size in sorted(set(sizes)):
                ops.built(refuse_the_future, graph, operator.index(size))

        def bind(own: Topology) -> Topology | Graph:
            replaced = own if graph is None else graph
            return replaced if packing is None else packing.bind(replaced)

        return bind

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
