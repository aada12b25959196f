"""Packing: the tokens of a padded batch of sentences as one graph without padding.

Instead of masking padding in attention, packing removes it. The remaining tokens are concatenated, each sentence is a
graph of its own, and there are no edges between sentences. Padding is not computed, and no mask is needed.
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
from mpnn.graph import Graph
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.topology import Topology
from mpnn.graphs import batch, complete
from mpnn.models.layers.blocks import refuse_alone


@dataclass(frozen=True, eq=False)
class Packing:
    """The tokens of a padded batch [B, N], and the sentences they belong to.

    keep: bool [B, N], True at tokens and False at padding. index: int64 [T], indices of the tokens in the flattened
    batch; None if there is no padding. counts: number of tokens of each sentence. apart: sentences have separate graphs
    even if their lengths are equal. documents: lengths of the documents packed in every row; None for one sentence per
    row.

    Packed features are [T, ...]. If all sentences have the same length n and `apart` is False, they are [B, n, ...],
    and all sentences share one graph.
    """

    keep: Tensor
    index: Tensor | None = None
    counts: tuple[int, ...] = ()
    apart: bool = False
    documents: tuple[int, ...] | None = None

    @staticmethod
    def of(keep: Tensor, *, apart: bool = False) -> Packing:
        """Returns the packing of the positions where `keep`, bool [B, N], is True. Padding may be anywhere.

        Args:
            keep: bool [B, N].
            apart: sentences have separate graphs even if their lengths are equal.

        Raises:
            ValueError: if `keep` is not bool [B, N], or if the call is traced.
        """
        if keep.dim() != 2 or keep.dtype != torch.bool:
            raise ValueError(f"keep must be bool [batch, length]; got {keep.dtype} of shape {list(keep.shape)}")
        refuse_while_tracing("the mask decides the sizes", "Omit it if no sentence is padded")
        index = keep.flatten().nonzero().squeeze(1)
        return Packing(keep, index, tuple(keep.sum(1).tolist()), apart)

    @staticmethod
    def whole(tokens: Tensor, lengths: Sequence[int] | None = None) -> Packing:
        """Returns the packing of tokens [B, N, ...] without padding.

        lengths: lengths of the documents packed in every row; they sum to N.
        """
        keep = all_kept(tokens)
        return Packing(keep, documents=None if lengths is None else document_lengths(lengths, keep.shape[1]))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sentence."""
        return (self.keep.shape[1],) * self.keep.shape[0] if self.index is None else self.counts

    def bind(self, topology: Topology | Graph | None) -> Topology | Graph:
        """Returns the graph of the topology over each sentence separately, with nodes numbered as in packed features.

        Distances are counted in tokens: padding inside a sentence does not count. While the call is traced, a topology
        without padding is returned unchanged and bound when sizes are known.

        Raises:
            TypeError: if `topology` is not a Topology.
        """
        if not isinstance(topology, Topology):
            raise TypeError(f"sentences of any length need a Topology, such as window(16); got {topology!r}")
        device = self.keep.device
        if self.documents is not None:
            return ops.build_once(_joined, topology, self.documents, device)
        if self.index is None and torch.compiler.is_compiling():
            return topology
        length = self._length
        return _joined(topology, self.lengths, device) if length is None else topology.bind(length).to(device)

    def bind_each(self, graphs: Sequence[Graph]) -> Graph:
        """Returns the union of one graph per sentence, each over N or more positions, without the nodes at padding.

        Distances are counted in positions: padding inside a sentence counts. The packing must have `apart=True`.

        Raises:
            ValueError: if `apart` is False, or if the number of graphs is not that of sentences.
        """
        if not self.apart or len(graphs) != len(self.lengths):
            raise ValueError(
                f"expected apart=True and {len(self.lengths)} graphs, one per sentence; "
                f"got apart={self.apart} and {len(graphs)} graphs"
            )
        device, length = self.keep.device, self.keep.shape[1]
        masks = [F.pad(keep.cpu(), (0, graph.num_dst - length)) for keep, graph in zip(self.keep, graphs, strict=True)]
        parts = [graph.subgraph(mask) for graph, mask in zip(graphs, masks, strict=True)]
        return batch(parts or [complete().bind(0)]).to(device)

    def pack(self, x: Tensor) -> Tensor:
        """Returns packed features of x [B, N, ...], without padding."""
        if x.shape[:2] != self.keep.shape:
            raise ValueError(f"x must have first sizes [batch, length] = {list(self.keep.shape)}; got {list(x.shape)}")
        if self.index is None:
            return x
        packed = x.flatten(0, 1).index_select(0, self.index)
        return packed if self._length is None else packed.unflatten(0, (len(self.lengths), self._length))

    def unpack(self, x: Tensor) -> Tensor:
        """Returns packed features as [B, N, ...]; zeros at padding."""
        if self.index is None:
            return x
        x = x if self._length is None else x.flatten(0, 1)
        flat = x.new_zeros(self.keep.numel(), *x.shape[1:])
        return flat.index_copy(0, self.index, x).unflatten(0, self.keep.shape)

    def first(self, x: Tensor) -> Tensor:
        """Returns the features [B, ...] of the first token of each sentence, from x [B, N, ...].

        Returns position 0 for a sentence without tokens, and zeros if N is 0. If rows are packed documents, returns the
        first token of each, [B, documents, ...].
        """
        if self.documents is not None:
            return x[:, [end - length for end, length in zip(accumulate(self.documents), self.documents, strict=True)]]
        return first_kept(x, self.keep)

    def unpack_weights(self, weights: Tensor, graph: Topology | Graph) -> Tensor:
        """Returns attention weights [..., E, H] of a graph from `bind` as matrices [B, H, N, N]; zeros for missing
        edges."""
        return as_matrices(weights, graph, self, self)

    def places(self) -> Tensor:
        """Returns the index of each packed token in the flattened batch, int64, in the layout of packed features."""
        return self.pack(torch.arange(self.keep.numel(), device=self.keep.device).view(self.keep.shape))

    def positions(self) -> Tensor:
        """Returns position ids, int64 [N]. They start at 0 in every document."""
        rows = (self.keep.shape[1],) if self.documents is None else self.documents
        return torch.cat([torch.arange(n, device=self.keep.device) for n in rows])

    @property
    def _length(self) -> int | None:
        """The common length of all sentences if they share a graph, else None."""
        if self.index is None:
            return self.keep.shape[1]
        lengths = set(self.lengths)
        return max(lengths, default=0) if len(lengths) < 2 and not self.apart else None


def as_matrices(weights: Tensor, graph: Topology | Graph, target: Packing, source: Packing) -> Tensor:
    """Returns attention weights [..., E, H] of a graph from packed sources to packed targets as matrices [B, H, M, N];
    zeros where there is no edge."""
    (sentences, rows), columns = target.keep.shape, source.keep.shape[1]
    if isinstance(graph, Topology):
        graph = ops.outline(graph, rows, columns, weights.device)
    src, dst = graph.edge_index
    dst_index, src_index = (packing.places() for packing in (target, source))
    if weights.dim() == 2:  # one graph over the nodes of all sentences
        dst_index, src_index = dst_index.flatten(), src_index.flatten()
    matrix = weights.new_zeros(sentences * rows, columns, weights.shape[-1])
    matrix = matrix.index_put((dst_index[..., dst], src_index[..., src] % columns), weights)
    return matrix.unflatten(0, (sentences, rows)).movedim(-1, 1)


def first_kept(x: Tensor, keep: Tensor) -> Tensor:
    """Returns the features [B, ...] at the first True position of `keep`, bool [B, N], from x [B, N, ...]."""
    if not x.shape[1]:
        return x.new_zeros(x.shape[0], *x.shape[2:])
    return x[torch.arange(x.shape[0], device=x.device), keep.to(torch.uint8).argmax(1)]


def all_kept(tokens: Tensor) -> Tensor:
    """Returns a mask of ones, bool [B, N], for tokens [B, N, ...] without padding."""
    refuse_alone(tokens)
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def document_lengths(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """Returns document lengths as integers.

    Raises:
        ValueError: if a length is less than 1, or if they do not sum to `total`.
    """
    checked = tuple(operator.index(n) for n in lengths)
    if any(n < 1 for n in checked) or sum(checked) != total:
        raise ValueError(
            f"lengths must hold the tokens of each document, at least 1 each and {total} together, as each row has; "
            f"got {sum(checked)} in {list(checked[:8])}{'...' if len(checked) > 8 else ''}"
        )
    return checked


def refuse_while_tracing(why: str, instead: str = "") -> None:
    """Raises ValueError while torch.compile or torch.export traces code that depends on the values of tensors."""
    if torch.compiler.is_compiling():
        advice = f"{instead}, or compile" if instead else "Compile"
        raise ValueError(f"this call cannot be traced whole: {why}. {advice} the layers alone")


def _joined(topology: Topology, lengths: tuple[int, ...], device: torch.device) -> Graph:
    return _union(topology, lengths).to(device)


@cached_graph
def _union(topology: Topology, lengths: tuple[int, ...]) -> Graph:
    """Returns one graph over all sentences. It is cached, because all layers of a model use the same one."""
    return batch([topology.bind(n) for n in lengths])
