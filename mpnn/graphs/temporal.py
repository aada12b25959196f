"""Graphs whose edges have times: what a node receives before a time."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import INTEGERS, check_form
from mpnn.graphs.compressed import CompressedGraph, search_rows, sums_of_weights
from mpnn.kernels.edges import sample_neighbors


class TemporalGraph(CompressedGraph):
    """A graph and the times of its edges, for `data.neighbor_batches(..., before=)`. In its rows, edges ascend in time,
    then in their order in the graph.

    Args:
        graph: its edges may have attributes and types.
        times: [E] in the caller's edge order, integers or floating point.
        latest: whether a sample of k in-neighbors is the last k; otherwise all sets of k are equally likely.
        as_of: the time before which the in-neighbors of a sampled in-neighbor are sampled: that of the "query" (TGN,
            Rossi et al. 2020), or of the "edge", so that times ascend along paths (TGAT, Xu et al.
            2020).

    Raises:
        ValueError: there is not one time for each edge, a time is NaN, or as_of is unknown.
    """

    def __init__(self, graph: Graph, times: Tensor, *, latest: bool = False, as_of: str = "query") -> None:
        if as_of not in ("query", "edge"):
            raise ValueError(f"as_of must be 'query' or 'edge'; got {as_of!r}")
        check_times("times", times, graph.num_edges)
        self.whole = graph.to("cpu")
        self.latest = latest
        self.as_of = as_of
        src, dst = self.whole.edge_index.numpy()
        order = np.lexsort((times.numpy(force=True), dst))
        offsets = np.bincount(dst + 1, minlength=graph.num_dst + 1).cumsum()
        sums = sums_of_weights(self.whole.edge_attr, order)
        super().__init__(offsets, src[order].astype(np.int32), graph.num_src, order, sums)
        self.times = times.detach().cpu()[order]

    def sample_before(
        self, nodes: Tensor, before: Tensor, fanout: int, seed: int = 0
    ) -> tuple[Tensor, Tensor, Graph, Tensor, Tensor]:
        """Samples in-neighbors of nodes [n], which may repeat, each before a time [n]. Returns the sources [m], of
        which all but `nodes` are distinct pairs of node and time; their times [m]; the graph; for each of its edges,
        the index in `columns`, ascending for each destination, and how long before the time of its destination it was,
        [E]."""
        first, stop = self.rows(nodes, before)
        if self.latest and fanout >= 0:
            first = np.maximum(first, stop - fanout)
        sample = sample_neighbors(first, stop, self.columns, self.num_src, nodes.numpy(), fanout, seed)
        n = len(nodes)
        edges = torch.from_numpy(sample.position)
        dst = torch.from_numpy(sample.destination)
        asked = before[dst]
        happened = self.times[edges]
        nodes = torch.cat([nodes, torch.from_numpy(self.columns[sample.position].astype(np.int64))])
        times = torch.cat([before, happened if self.as_of == "edge" else asked])
        moment = np.unique(times.numpy(), return_inverse=True)[1]
        _, same, pair = np.unique(nodes.numpy() * len(nodes) + moment, return_index=True, return_inverse=True)
        same = same[pair]  # the first source that is the same node at the same time
        is_source = (same == np.arange(len(nodes))) | (np.arange(len(nodes)) < n)
        src = torch.from_numpy((is_source.cumsum() - 1)[same[n:]])
        block = Graph(n, int(is_source.sum()), edges=torch.stack([src, dst]), name=f"sampled({fanout})")
        return nodes[is_source], times[is_source], block, edges, asked - happened

    def rows(self, nodes: Tensor, before: Tensor | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, stop = super().rows(nodes)
        return start, stop if before is None else search_rows(
            self.times.numpy().__getitem__, start, stop, before.numpy()
        )


def check_times(name: str, times: Tensor, count: int, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless there are `count` times, of this dtype, none of them NaN."""
    check_form(f"{name} must be {count} numbers", times, (*INTEGERS, "float"), (count,))
    if dtype not in (None, times.dtype):
        raise ValueError(f"{name} must have the dtype of the times of edges, {dtype}; got {times.dtype}")
    if times.isnan().any():
        raise ValueError(f"{name}[{int(times.isnan().nonzero()[0])}] is NaN")
