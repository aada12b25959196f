"""Packing: the tokens of a padded batch of sentences as one graph without padding.

Instead of masking padding in attention, packing removes it. The remaining tokens are concatenated, each sentence is a
graph of its own, and there are no edges between sentences. Padding is not computed, and no mask is needed.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, Topology, engine
from mpnn.graph import sharding
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.bound import BoundGraph
from mpnn.graphs import as_topology, batch, complete
from mpnn.graphs.listed import most_nodes
from mpnn.models.layers.blocks import require_batch


@dataclass(frozen=True, eq=False)
class Packing:
    """The tokens of a padded batch [B, N], and the sentences they belong to.

    token_mask: bool [B, N], True at tokens and False at padding. index: int64 [T], indices of the tokens in the
    flattened batch; None if there is no padding. counts: number of tokens of each sentence. separate: sentences have
    separate graphs even if their lengths are equal. documents: lengths of the documents packed in every row; None for
    one sentence per row.

    Packed features are [T, ...]. If all sentences have the same length n and `separate` is False, they are
    [B, n, ...], and all sentences share one graph.
    """

    token_mask: Tensor
    index: Tensor | None = None
    counts: tuple[int, ...] = ()
    separate: bool = False
    documents: tuple[int, ...] | None = None

    @staticmethod
    def of(token_mask: Tensor, *, separate: bool = False) -> "Packing":
        """Returns the packing of the positions where `token_mask`, bool [B, N], is True. Padding may be anywhere.

        Args:
            token_mask: bool [B, N].
            separate: sentences have separate graphs even if their lengths are equal.
        """
        _check_mask("token_mask", token_mask)
        require_eager("the mask decides the sizes", "Omit it if no sentence is padded")
        index = token_mask.flatten().nonzero().squeeze(1)
        return Packing(token_mask, index, tuple(token_mask.sum(1).tolist()), separate)

    @staticmethod
    def of_tokens(
        tokens: Tensor, padding_mask: Tensor | None = None, lengths: Sequence[int] | None = None
    ) -> "Packing":
        """Returns the packing of tokens [B, N, ...].

        Args:
            tokens: the tokens; only their shape is used.
            padding_mask: bool [B, N], True at padding; default: no padding.
            lengths: lengths of the documents packed in every row; they sum to N.
        """
        if padding_mask is not None:
            if lengths is not None:
                raise ValueError("lengths describe rows without padding; give either padding_mask or lengths")
            return Packing.of(token_mask(tokens, padding_mask))
        mask = token_mask(tokens)
        return Packing(mask, documents=None if lengths is None else document_lengths(lengths, mask.shape[1]))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sentence."""
        return (self.token_mask.shape[1],) * self.token_mask.shape[0] if self.index is None else self.counts

    def bind(self, topology: Topology | Graph | None) -> Topology | Graph:
        """Returns the graph of the topology over each sentence separately, with nodes numbered as in packed features.

        Distances are counted in tokens: padding inside a sentence does not count. Node k of a `Graph` is the k-th token
        of each sentence; it has as many nodes as each sentence has tokens, or as a row has positions, of which those
        at padding are left out. While the call is traced, a topology without padding is returned unchanged and bound
        when sizes are known.

        Raises:
            ValueError: a `Graph` has another size.
        """
        if isinstance(topology, BoundGraph) and topology.stack:
            return self._stacked(topology)
        topology = as_topology(topology, prefixes=False)
        if not isinstance(topology, Topology):
            raise TypeError(f"sentences need a Topology, such as window(16), or a Graph; got {topology!r}")
        device = self.token_mask.device
        if self.documents is not None:
            return engine.build_once(_union_on_device, topology, self.documents, device)
        if self.index is None and torch.compiler.is_compiling():
            return topology
        length = self._length
        row = self.token_mask.shape[1]
        if self.index is not None and most_nodes(topology) == row:
            return _union_of_rows(topology, row, self.lengths if length is None else (length,)).to(device)
        if length is None:
            return _union_on_device(topology, self.lengths, device)
        return sharding.bind(topology, length, length).to(device)

    def _stacked(self, graph: Graph) -> Graph:
        """A graph that differs by sentence and head, over sentences without padding."""
        if self.index is not None or self.documents is not None or graph.num_dst != self.token_mask.shape[1]:
            raise ValueError(
                f"{graph} differs by item and head, and needs rows of {graph.num_dst} tokens, without padding"
            )
        return graph.to(self.token_mask.device)

    @staticmethod
    def each(graphs: Sequence[Topology | Graph], token_mask: Tensor) -> "tuple[Packing, Graph]":
        """Returns the packing of a batch whose sentences have a graph each, and the union of these graphs. Nodes of a
        graph are as in `bind`. token_mask: bool [B, N]."""
        packing = Packing.of(token_mask, separate=True)
        if len(graphs) != len(packing.lengths):
            raise ValueError(f"expected a graph for each of {len(packing.lengths)} sentences; got {len(graphs)} graphs")
        row = token_mask.shape[1]
        exact = [as_topology(graph, prefixes=False) for graph in graphs]
        parts = [
            _first_of_row(topology, row, n) if most_nodes(topology) == row else topology.bind(n)
            for topology, n in zip(exact, packing.lengths, strict=True)
        ]
        return packing, batch(parts or [complete().bind(0)]).to(token_mask.device)

    def bind_each(self, graphs: Sequence[Graph]) -> Graph:
        """Returns the union of one graph per sentence, each over N or more positions, without the nodes at padding.

        Distances are counted in positions: padding inside a sentence counts. The packing must have `separate=True`."""
        if not self.separate or len(graphs) != len(self.lengths):
            raise ValueError(
                f"expected separate=True and {len(self.lengths)} graphs, one per sentence; "
                f"got separate={self.separate} and {len(graphs)} graphs"
            )
        device = self.token_mask.device
        length = self.token_mask.shape[1]
        rows = zip(self.token_mask.cpu(), graphs, strict=True)
        masks = [F.pad(mask, (0, graph.num_dst - length)) for mask, graph in rows]
        parts = [graph.subgraph(mask) for graph, mask in zip(graphs, masks, strict=True)]
        return batch(parts or [complete().bind(0)]).to(device)

    def pack(self, x: Tensor) -> Tensor:
        """Returns packed features of x [B, N, ...], without padding."""
        shape = self.token_mask.shape
        if x.shape[:2] != shape:
            raise ValueError(f"x must have first sizes [batch, length] = {list(shape)}; got {list(x.shape)}")
        if self.index is None:
            return x
        packed = x.flatten(0, 1).index_select(0, self.index)
        return packed if self._length is None else packed.unflatten(0, (len(self.lengths), self._length))

    def unpack(self, x: Tensor) -> Tensor:
        """Returns packed features as [B, N, ...]; zeros at padding."""
        if self.index is None:
            return x
        x = x if self._length is None else x.flatten(0, 1)
        flat = x.new_zeros(self.token_mask.numel(), *x.shape[1:])
        return flat.index_copy(0, self.index, x).unflatten(0, self.token_mask.shape)

    def first(self, x: Tensor) -> Tensor:
        """Returns the features [B, ...] of the first token of each sentence, from x [B, N, ...].

        Returns position 0 for a sentence without tokens, and zeros if N is 0. If rows are packed documents, returns the
        first token of each, [B, documents, ...].
        """
        if self.documents is not None:
            return x[:, [end - length for end, length in zip(accumulate(self.documents), self.documents, strict=True)]]
        if not x.shape[1]:
            return x.new_zeros(x.shape[0], *x.shape[2:])
        return x[torch.arange(x.shape[0], device=x.device), self.token_mask.to(torch.uint8).argmax(1)]

    def unpack_weights(self, weights: Tensor, graph: Topology | Graph) -> Tensor:
        """Returns attention weights [..., E, H] of a graph from `bind` as matrices [B, H, N, N]; zeros for missing
        edges."""
        return weight_matrices(weights, graph, self, self)

    def token_index(self) -> Tensor:
        """Returns the index of each packed token in the flattened batch, int64, in the layout of packed features."""
        mask = self.token_mask
        return self.pack(torch.arange(mask.numel(), device=mask.device).view(mask.shape))

    def position_ids(self) -> Tensor:
        """Returns position ids, int64 [N]. They start at 0 in every document."""
        device = self.token_mask.device
        if self.documents is None:
            return sharding.node_numbers(self.token_mask.shape[1], device)
        return torch.cat([torch.arange(n, device=device) for n in self.documents])

    @property
    def _length(self) -> int | None:
        """The common length of all sentences if they share a graph, else None."""
        if self.index is None:
            return self.token_mask.shape[1]
        lengths = set(self.lengths)
        return max(lengths, default=0) if len(lengths) < 2 and not self.separate else None


def weight_matrices(weights: Tensor, graph: Topology | Graph, target: Packing, source: Packing) -> Tensor:
    """Returns attention weights [..., E, H] of a graph from packed sources to packed targets as matrices [B, H, M, N];
    zeros where there is no edge."""
    (sentences, rows), columns = target.token_mask.shape, source.token_mask.shape[1]
    if isinstance(graph, Topology):
        graph = engine.traced_graph(graph, rows, columns, weights.device)
    src, dst = graph.edge_index
    dst_index, src_index = (packing.token_index() for packing in (target, source))
    if weights.dim() == 2:  # one graph over the nodes of all sentences
        dst_index, src_index = dst_index.flatten(), src_index.flatten()
    matrix = weights.new_zeros(sentences * rows, columns, weights.shape[-1])
    matrix = matrix.index_put((dst_index[..., dst], src_index[..., src] % columns), weights)
    return matrix.unflatten(0, (sentences, rows)).movedim(-1, 1)


def token_mask(tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Returns the inverse of a padding mask: bool [B, N], True at tokens [B, N, ...]. Without one, all are True."""
    if padding_mask is not None:
        _check_mask("padding_mask", padding_mask)
        return ~padding_mask
    require_batch(tokens)
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def _check_mask(name: str, mask: Tensor) -> None:
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool [batch, length]; got {mask.dtype} of shape {list(mask.shape)}")


def document_lengths(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """Returns document lengths as integers."""
    checked = tuple(operator.index(n) for n in lengths)
    if any(n < 1 for n in checked) or sum(checked) != total:
        raise ValueError(
            f"lengths must hold the tokens of each document, at least 1 each and {total} together, as each row has; "
            f"got {sum(checked)} in {list(checked[:8])}{'...' if len(checked) > 8 else ''}"
        )
    return checked


def require_eager(why: str, instead: str = "") -> None:
    """Raises ValueError while torch.compile or torch.export traces code that depends on the values of tensors."""
    if torch.compiler.is_compiling():
        advice = f"{instead}, or compile" if instead else "Compile"
        raise ValueError(f"this call cannot be traced whole: {why}. {advice} the layers alone")


def _union_on_device(topology: Topology, lengths: tuple[int, ...], device: torch.device) -> Graph:
    return _union(topology, lengths).to(device)


@cached_graph
def _union_of_rows(topology: Topology, row: int, lengths: tuple[int, ...]) -> Graph:
    """Returns one graph over the first nodes of each row. The topology has a size, that of the rows."""
    return batch([_first_of_row(topology, row, n) for n in lengths])


def _first_of_row(topology: Topology, row: int, length: int) -> Graph:
    """Returns the graph of the first nodes of a row: its tokens, without those at padding."""
    whole = topology.bind(row)
    return whole if length == row else whole.subgraph(torch.arange(row) < length)


@cached_graph
def _union(topology: Topology, lengths: tuple[int, ...]) -> Graph:
    """Returns one graph over all sentences. It is cached, because all layers of a model use the same one."""
    return batch([topology.bind(n) for n in lengths])
