"""Packing: the real tokens of a batch of sentences as one graph.

Sentences are of different lengths and tensors are not. Where others fill up with padding and mask it from being heard,
here it is left out: the tokens that are kept follow one another, each sentence is a graph by itself, and between two
graphs there is no edge for anything to leak along. Nothing is computed for padding, and no mask is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import ops
from mpnn.bind_cache import cached_graph
from mpnn.graph import Graph
from mpnn.graphs import batch, complete
from mpnn.models.parts.blocks import refuse_alone
from mpnn.topology import Topology


@dataclass(frozen=True, eq=False)
class Packing:
    """Which of the B x N places of a padded batch hold tokens, and which of these belong together.

    `keep` bool [B, N]; `index` int64 [T]: the places kept, counted row by row, None where all are. Packed features are
    [T, ...], or [B, n, ...] when all sentences are of one length n and not `apart`, because one graph then serves them
    all. `documents`: the lengths of the documents that each row holds one after the other; None for one sentence a row.
    """

    keep: Tensor
    index: Tensor | None = None
    counts: tuple[int, ...] = ()
    apart: bool = False
    documents: tuple[int, ...] | None = None

    @staticmethod
    def of(keep: Tensor, *, apart: bool = False) -> Packing:
        """The packing that keeps the places that are True in `keep`, bool [B, N]: any of them, not only the first.

        `apart`: sentences have graphs of their own, also where they are of one length.
        """
        if keep.dim() != 2 or keep.dtype != torch.bool:
            raise ValueError(f"keep must be bool [batch, length]; got {keep.dtype} of shape {list(keep.shape)}")
        refuse_while_tracing("the mask decides the sizes", "Leave it out where no sentence is padded")
        index = keep.flatten().nonzero().squeeze(1)
        return Packing(keep, index, tuple(keep.sum(1).tolist()), apart)

    @staticmethod
    def whole(tokens: Tensor, lengths: Sequence[int] | None = None) -> Packing:
        """The packing of tokens [B, N, ...] without padding.

        `lengths`: of the documents that every row holds one after the other; they add up to N.
        """
        keep = all_kept(tokens)
        return Packing(keep, documents=None if lengths is None else document_lengths(lengths, keep.shape[1]))

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each sentence has."""
        return (self.keep.shape[1],) * self.keep.shape[0] if self.index is None else self.counts

    def bind(self, topology: Topology | Graph | None) -> Topology | Graph:
        """The topology over each sentence by itself, its nodes numbered as in packed features: a graph, but for a
        program that is traced, in which a topology without padding is bound when sizes are known.

        Neighbours are neighbours among the tokens that are kept: a window reaches over places that are left out.
        """
        if not isinstance(topology, Topology):
            raise TypeError(f"sentences of any length need a Topology, such as window(16); got {topology!r}")
        device = self.keep.device
        if self.documents is not None:
            return ops.built(_joined, topology, self.documents, device)
        if self.index is None and torch.compiler.is_compiling():
            return topology
        length = self._length
        return _joined(topology, self.lengths, device) if length is None else topology.bind(length).to(device)

    def bind_each(self, graphs: Sequence[Graph]) -> Graph:
        """A graph for each sentence over its N places or more, without the places that are left out: a window reaches
        no further over them. The packing must keep sentences apart."""
        if not self.apart or len(graphs) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} sentences kept apart need as many graphs; got {len(graphs)}")
        device, length = self.keep.device, self.keep.shape[1]
        kept = [F.pad(keep.cpu(), (0, graph.num_dst - length)) for keep, graph in zip(self.keep, graphs, strict=True)]
        parts = [graph.induced(keep) for graph, keep in zip(graphs, kept, strict=True)]
        return batch(parts or [complete().bind(0)]).to(device)

    def pack(self, x: Tensor) -> Tensor:
        """[B, N, ...] without the places that hold no token."""
        if x.shape[:2] != self.keep.shape:
            raise ValueError(f"expected [batch, length, ...] = {[*self.keep.shape]} and so on; got {list(x.shape)}")
        if self.index is None:
            return x
        packed = x.flatten(0, 1).index_select(0, self.index)
        return packed if self._length is None else packed.unflatten(0, (len(self.lengths), self._length))

    def unpack(self, x: Tensor) -> Tensor:
        """Packed features as [B, N, ...], zeros where there is no token."""
        if self.index is None:
            return x
        x = x if self._length is None else x.flatten(0, 1)
        places = x.new_zeros(self.keep.numel(), *x.shape[1:])
        return places.index_copy(0, self.index, x).unflatten(0, self.keep.shape)

    def first(self, x: Tensor) -> Tensor:
        """The first token of each sentence, [B, ...] of [B, N, ...]; the first place of a sentence that has none, and
        zeros where there are no places. Of each document, [B, documents, ...], where rows hold several."""
        if self.documents is not None:
            return x[:, [end - length for end, length in zip(accumulate(self.documents), self.documents, strict=True)]]
        return first_kept(x, self.keep)

    def unpack_weights(self, weights: Tensor, graph: Topology | Graph) -> Tensor:
        """Attention weights [..., E, H] of what `bind` gave as matrices [B, H, N, N], zeros where there is no edge."""
        return as_matrices(weights, graph, self, self)

    def places(self) -> Tensor:
        """Where each packed token stands among all places, counted row by row; int64 as packed features are."""
        return self.pack(torch.arange(self.keep.numel(), device=self.keep.device).view(self.keep.shape))

    def positions(self) -> Tensor:
        """The position of each place, int64 [N]: from 0 on in every document."""
        rows = (self.keep.shape[1],) if self.documents is None else self.documents
        return torch.cat([torch.arange(n, device=self.keep.device) for n in rows])

    @property
    def _length(self) -> int | None:
        """The length that all sentences share, if they do."""
        if self.index is None:
            return self.keep.shape[1]
        lengths = set(self.lengths)
        return max(lengths, default=0) if len(lengths) < 2 and not self.apart else None


def as_matrices(weights: Tensor, graph: Topology | Graph, target: Packing, source: Packing) -> Tensor:
    """Attention weights [..., E, H] of a graph from packed sources to packed targets as matrices [B, H, M, N], zeros
    where there is no edge."""
    (sentences, rows), columns = target.keep.shape, source.keep.shape[1]
    if isinstance(graph, Topology):
        graph = ops.outline(graph, rows, columns, weights.device)
    src, dst = graph.edge_index
    at, of = (packing.places() for packing in (target, source))
    if weights.dim() == 2:  # one graph over the nodes of all sentences
        at, of = at.flatten(), of.flatten()
    matrix = weights.new_zeros(sentences * rows, columns, weights.shape[-1])
    matrix = matrix.index_put((at[..., dst], of[..., src] % columns), weights)
    return matrix.unflatten(0, (sentences, rows)).movedim(-1, 1)


def first_kept(x: Tensor, keep: Tensor) -> Tensor:
    """The first of the places kept (bool [B, N]) of each sentence, [B, ...] of [B, N, ...]."""
    if not x.shape[1]:
        return x.new_zeros(x.shape[0], *x.shape[2:])
    return x[torch.arange(x.shape[0], device=x.device), keep.to(torch.uint8).argmax(1)]


def all_kept(tokens: Tensor) -> Tensor:
    """bool [B, N]: every place of tokens [B, N, ...] holds one."""
    refuse_alone(tokens)
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def document_lengths(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """The lengths of documents that follow one another, checked: each at least 1, and `total` together."""
    given = tuple(operator.index(n) for n in lengths)
    if any(n < 1 for n in given) or sum(given) != total:
        raise ValueError(
            f"lengths must hold the tokens of each document, at least 1 each and {total} together, as each row has; "
            f"got {sum(given)} in {list(given[:8])}{'...' if len(given) > 8 else ''}"
        )
    return given


def refuse_while_tracing(why: str, instead: str = "") -> None:
    """Raises ValueError while torch.compile or torch.export traces what only the numbers in tensors decide."""
    if torch.compiler.is_compiling():
        advice = f"{instead}, or compile" if instead else "Compile"
        raise ValueError(f"this call cannot be traced whole: {why}. {advice} the layers alone")


def _joined(topology: Topology, lengths: tuple[int, ...], device: torch.device) -> Graph:
    return _union(topology, lengths).to(device)


@cached_graph
def _union(topology: Topology, lengths: tuple[int, ...]) -> Graph:
    """Kept for the layers of a model, which all ask for the same."""
    return batch([topology.bind(n) for n in lengths])
