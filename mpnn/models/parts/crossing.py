"""Crossing: one batch of sentences hears another, each sentence only the one that it belongs to.

A translation hears its source: a rectangular complete graph for each pair of sentences, and no edge between pairs. As
in `models.parts.packing`, sentences of different lengths follow one another and nothing is computed for padding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpnn import ops
from mpnn.bind_cache import cached_graph
from mpnn.decoding import Cache
from mpnn.graph import Graph
from mpnn.graphs import batch, complete
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.packing import Packing, as_matrices
from mpnn.topology import Topology

COMPLETE = complete()


@dataclass(frozen=True, eq=False)
class Half:
    """What the encoder or the decoder makes of a batch of sentences.

    packed: the last layer's output, as `packing` has it. states: the embeddings and each layer's output, and weights,
    crossed: each layer's attention weights among the sentences themselves and to the source; all [B, N, dim] and
    [B, H, N, N], zeros wherever there is no token, where they were asked for. heard: keys and values that cached
    decoding makes of it.
    """

    packed: Tensor
    packing: Packing
    states: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()
    crossed: tuple[Tensor, ...] = ()
    heard: Cache = field(default_factory=lambda: Cache(sys.maxsize))

    @property
    def last(self) -> Tensor:
        """[B, N, dim], zeros wherever there is no token."""
        return self.packing.unpack(self.packed)

    def select(self, index: Tensor) -> Half:
        """These sentences, int64 [B'], in this order; one may be taken more than once. What is cached moves along."""
        apart = self.packed.dim() == 2
        packing = Packing.of(self.packing.keep[index], apart=apart)
        if apart:
            first = torch.tensor([0, *self.packing.lengths]).cumsum(0).tolist()
            tokens = [torch.arange(first[b], first[b + 1]) for b in index.tolist()]
            index = torch.cat(tokens).to(index.device)
        self.heard.select(index)
        return Half(self.packed[index], packing, heard=self.heard)


@dataclass(frozen=True, eq=False)
class Crossing:
    """Sentence b of `target`, as many as `source` has, hears all of sentence b of `source`."""

    target: Packing
    source: Packing

    def hear(
        self, layer: MessagePassing, x: Tensor, source: Tensor, return_weights: bool = False, cache: Cache | None = None
    ) -> Any:
        """The layer's round: packed features of the targets, like x; and the weights [B, H, M, N] if asked for.

        Where all sources have one length and all targets too (packed features [B, n, ...]), one graph serves all pairs.
        """
        together = x.dim() == source.dim() == 3
        if not together:
            x, source, shape = x.flatten(0, -2), source.flatten(0, -2), x.shape[:-1]
        graph = self._graph(together, x.device)
        y, weights = _pair(layer(x, graph, source=source, return_weights=return_weights, cache=cache))
        y = y if together else y.unflatten(0, shape)
        return (y, as_matrices(weights, graph, self.target, self.source)) if return_weights else y

    def _graph(self, together: bool, device: torch.device) -> Topology | Graph:
        targets, sources = self.target.documents, self.source.documents
        if targets is not None or sources is not None:
            if len(targets or ()) != len(sources or ()):
                raise ValueError(
                    "document k of the targets attends to document k of the sources, so there must be as many of both; "
                    f"got {len(targets or ())} and {len(sources or ())}"
                )
            return ops.built(_joined, targets, sources, device)
        if not together:
            return _joined(self.target.lengths, self.source.lengths, device)
        if torch.compiler.is_compiling():
            return COMPLETE
        return COMPLETE.bind(*(max(packing.lengths, default=0) for packing in (self.target, self.source))).to(device)


def _pair(found: Any) -> tuple[Tensor, Any]:
    return found if isinstance(found, tuple) else (found, None)


def _joined(targets: tuple[int, ...], sources: tuple[int, ...], device: torch.device) -> Graph:
    return _union(targets, sources).to(device)


@cached_graph
def _union(targets: Sequence[int], sources: Sequence[int]) -> Graph:
    """Kept for the layers of a model, which all ask for the same."""
    return batch([COMPLETE.bind(n, m) for n, m in zip(targets, sources, strict=True)])
