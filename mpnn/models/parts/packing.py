"""Packing: the real tokens of a batch of sentences as one graph.

Sentences are of different lengths and tensors are not. Where others fill up with padding and mask it from being heard,
here it is left out: the tokens that are kept follow one another, each sentence is a graph by itself, and between two
graphs there is no edge for anything to leak along. Nothing is computed for padding, and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.bind_cache import cached_graph
from mpnn.graph import Graph
from mpnn.graphs import batch, complete
from mpnn.models.parts.blocks import refuse_alone
from mpnn.topology import Topology


@dataclass(frozen=True, eq=False)
class Packing:
    """Which of the B x N places of a padded batch hold tokens.

    `keep` bool [B, N]; `index` int64 [T]: the places kept, counted row by row; `lengths`: how many each sentence has.
    Packed features are [T, ...], or [B, n, ...] when all sentences are of one length n and not `apart`, because one
    graph then serves them all.
    """

    keep: Tensor
    index: Tensor
    lengths: tuple[int, ...]
    apart: bool = False

    @staticmethod
    def of(keep: Tensor, *, apart: bool = False) -> Packing:
        """The packing that keeps the places that are True in `keep`, bool [B, N]: any of them, not only the first.

        `apart`: sentences have graphs of their own, also where they are of one length.
        """
        if keep.dim() != 2 or keep.dtype != torch.bool:
            raise ValueError(f"keep must be bool [batch, length]; got {keep.dtype} of shape {list(keep.shape)}")
        index = keep.flatten().nonzero().squeeze(1)
        return Packing(keep, index, tuple(keep.sum(1).tolist()), apart)

    def bind(self, topology: Topology | Graph | None) -> Graph:
        """The topology over each sentence by itself, its nodes numbered as in packed features.

        Neighbours are neighbours among the tokens that are kept: a window reaches over places that are left out.
        """
        if not isinstance(topology, Topology):
            raise TypeError(f"sentences of any length need a Topology, such as window(16); got {topology!r}")
        graph = _union(topology, self.lengths) if self._length is None else topology.bind(self._length)
        return graph.to(self.index.device)

    def bind_each(self, graphs: Sequence[Graph]) -> Graph:
        """A graph for each sentence over its N places or more, without the places that are left out: a window reaches
        no further over them. The packing must keep sentences apart."""
        if not self.apart or len(graphs) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} sentences kept apart need as many graphs; got {len(graphs)}")
        device, length = self.index.device, self.keep.shape[1]
        kept = [F.pad(keep.cpu(), (0, graph.num_dst - length)) for keep, graph in zip(self.keep, graphs, strict=True)]
        parts = [graph.induced(keep) for graph, keep in zip(graphs, kept, strict=True)]
        return batch(parts or [complete().bind(0)]).to(device)

    def pack(self, x: Tensor) -> Tensor:
        """[B, N, ...] without the places that hold no token."""
        if x.shape[:2] != self.keep.shape:
            raise ValueError(f"expected [batch, length, ...] = {[*self.keep.shape]} and so on; got {list(x.shape)}")
        packed = x.flatten(0, 1).index_select(0, self.index)
        return packed if self._length is None else packed.unflatten(0, (len(self.lengths), self._length))

    def unpack(self, x: Tensor) -> Tensor:
        """Packed features as [B, N, ...], zeros where there is no token."""
        x = x if self._length is None else x.flatten(0, 1)
        places = x.new_zeros(self.keep.numel(), *x.shape[1:])
        return places.index_copy(0, self.index, x).unflatten(0, self.keep.shape)

    def first(self, x: Tensor) -> Tensor:
        """The first token of each sentence, [B, ...] of [B, N, ...]; the first place of a sentence that has none, and
        zeros where there are no places."""
        if not x.shape[1]:
            return x.new_zeros(len(self.lengths), *x.shape[2:])
        sentence = torch.arange(len(self.lengths), device=x.device)
        return x[sentence, self.keep.to(torch.uint8).argmax(1)]

    def unpack_weights(self, weights: Tensor, graph: Graph) -> Tensor:
        """Attention weights [..., E, H] of a bound graph as matrices [B, H, N, N], zeros where there is no edge."""
        return as_matrices(weights, graph, self, self)

    def places(self) -> Tensor:
        """Where each packed token stands among all places, counted row by row; int64 as packed features are."""
        return self.pack(torch.arange(self.keep.numel(), device=self.index.device).view(self.keep.shape))

    @property
    def _length(self) -> int | None:
        """The length that all sentences share, if they do."""
        lengths = set(self.lengths)
        return max(lengths, default=0) if len(lengths) < 2 and not self.apart else None


def as_matrices(weights: Tensor, graph: Graph, target: Packing, source: Packing) -> Tensor:
    """Attention weights [..., E, H] of a graph from packed sources to packed targets as matrices [B, H, M, N], zeros
    where there is no edge."""
    (sentences, rows), columns = target.keep.shape, source.keep.shape[1]
    src, dst = graph.edge_index
    at, of = (packing.places() for packing in (target, source))
    if weights.dim() == 2:  # one graph over the nodes of all sentences
        at, of = at.flatten(), of.flatten()
    matrix = weights.new_zeros(sentences * rows, columns, weights.shape[-1])
    matrix = matrix.index_put((at[..., dst], of[..., src] % columns), weights)
    return matrix.unflatten(0, (sentences, rows)).movedim(-1, 1)


def all_kept(tokens: Tensor) -> Tensor:
    """bool [B, N]: every place of tokens [B, N, ...] holds one."""
    refuse_alone(tokens)
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


@cached_graph
def _union(topology: Topology, lengths: tuple[int, ...]) -> Graph:
    """Kept for the layers of a model, which all ask for the same."""
    return batch([topology.bind(n) for n in lengths])
