"""Edges in compressed rows of 32 bits, in memory or in a memory map: what sampling reads, and nothing more.

A `Graph` holds 8 bytes an edge in the caller's order, and what kernels derive from it. A `CompressedGraph` holds 4, and
8 a node, so graphs of billions of edges fit on a disk and are sampled from there.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graph.arguments import INTEGERS, as_integer, check_form
from mpnn.kernels.edges import Sample, sample_neighbors


class Sampled(Protocol):
    """The graph that sampled batches are drawn from."""

    @property
    def num_dst(self) -> int:
        """The number of destinations."""

    @property
    def num_own(self) -> int:
        """The number of nodes whose features `gather` takes."""

    @property
    def processes(self) -> tuple[int, int] | None:
        """The rank and the number of the processes that must call the methods together, or None."""

    def degree(self, nodes: Tensor) -> Tensor:
        """The in-degrees of nodes, int64, or float64 sums of weights."""

    def gather(self, features: Tensor | NDArray[Any], nodes: Tensor) -> Tensor:
        """The rows of nodes, [n, ...]."""

    def sample(self, nodes: Tensor, fanout: int, seed: int = 0) -> tuple[Tensor, Graph, Tensor]:
        """The sources, the graph and the positions of a sample. See `CompressedGraph.sample`."""


@dataclass(eq=False)
class CompressedGraph:
    """Node i receives from `columns[offsets[i]:offsets[i + 1]]`, ascending. Created by `open_csr` and `compressed`.

    Args:
        offsets: int64 [num_dst + 1].
        columns: int32 [E], the source of each edge.
        num_src: the number of sources.
        edge_ids: int64 [E], the index of each edge in the caller's order, or None if it was not asked for.
        sums: float64 [E + 1], the sums of the first edges' weights, or None without weights.
        names_file: where `write_csr` wrote the names of nodes, or None.
    """

    offsets: NDArray[np.int64]
    columns: NDArray[np.int32]
    num_src: int
    edge_ids: NDArray[np.int64] | None = None
    sums: Tensor | None = None
    names_file: Path | None = None

    def __post_init__(self) -> None:
        if self.num_src >= 2**31:
            raise ValueError(f"sources are stored in 32 bits, so there must be fewer than 2^31; got {self.num_src}")

    @property
    def num_dst(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_own(self) -> int:
        return self.num_src

    @property
    def processes(self) -> None:
        return None

    @property
    def num_edges(self) -> int:
        return len(self.columns)

    @cached_property
    def names(self) -> tuple[list[str], list[str]] | None:
        """The names of the destinations and of the sources, by number; None if nodes have none."""
        if self.names_file is None:
            return None
        sets = json.loads(self.names_file.read_text(encoding="utf-8"))
        return sets[-1], sets[0]

    @property
    def nbytes(self) -> int:
        """Bytes in memory or on disk."""
        return self.offsets.nbytes + self.columns.nbytes + (0 if self.edge_ids is None else self.edge_ids.nbytes)

    def __repr__(self) -> str:
        return f"CompressedGraph(num_dst={self.num_dst}, num_src={self.num_src}, num_edges={self.num_edges})"

    def in_neighbors(self, node: int) -> Tensor:
        """Returns the sources of a node, int64, ascending, once for each edge."""
        if not 0 <= as_integer("node", node) < self.num_dst:
            raise IndexError(f"node {node} is not among the {self.num_dst} destinations, counted from 0")
        row = self.columns[self.offsets[node] : self.offsets[node + 1]]
        return torch.from_numpy(row.astype(np.int64))

    def rows(self, nodes: Tensor, before: Tensor | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns where the rows of nodes begin and end in `columns`. Raises ValueError if `before` is passed: only a
        `TemporalGraph` has times."""
        if before is not None:
            raise ValueError("the edges of this graph have no times; before= needs a graphs.TemporalGraph")
        return self.offsets[nodes.numpy()], self.offsets[nodes.numpy() + 1]

    def degree(self, nodes: Tensor | None = None, before: Tensor | None = None) -> Tensor:
        """Returns the in-degrees of nodes, int64, or float64 sums of weights; default: of all. Those of a
        `TemporalGraph` count edges before a time, [n]."""
        first, stop = self.rows(torch.arange(self.num_dst) if nodes is None else nodes, before)
        return torch.from_numpy(stop - first) if self.sums is None else self.sums[stop] - self.sums[first]

    def graph(self) -> Graph:
        """Returns the whole graph in memory, its edges by destination, then source."""
        dst = np.repeat(np.arange(self.num_dst), np.diff(self.offsets))
        edges = torch.from_numpy(np.stack([self.columns.astype(np.int64), dst]))
        return Graph.from_edges(edges, self.num_dst, self.num_src)

    def sample(self, nodes: Tensor, fanout: int, seed: int = 0) -> tuple[Tensor, Graph, Tensor]:
        """Samples at most `fanout` in-neighbors of each node without replacement (GraphSAGE, Hamilton et al. 2017,
        section 3.1), in O(fanout) a node.

        ::

            compressed(from_edges([[0, 1, 2], [2, 2, 0]])).sample(torch.tensor([2]), fanout=2)   .##  sources 2, 0, 1

        Args:
            nodes: int64 [n], distinct destinations.
            fanout: -1 takes all in-neighbors.
            seed: seed and node decide which in-neighbors; neither the other nodes nor the memory of the graph do.

        Returns:
            The sources, int64 [m]: `nodes`, then their other in-neighbors in the order of the edges; the graph of n
            destinations and m sources; and the index of each of its edges in `columns`, int64.

        Raises:
            ValueError: `nodes` are not distinct destinations, `fanout` is below -1, or the graph is damaged.
        """
        fanout, seed = as_integer("fanout", fanout), as_integer("seed", seed)
        if not isinstance(nodes, Tensor):
            raise TypeError(f"nodes must be a tensor of node numbers; got {type(nodes).__name__}")
        targets = nodes.cpu().numpy()
        check_nodes(targets, min(self.num_dst, self.num_src))
        first, stop = self.rows(nodes.cpu())
        sample = sample_neighbors(first, stop, self.columns, self.num_src, targets, fanout, seed)
        return block_of(sample, len(nodes), fanout)

    def gather(self, features: Tensor | NDArray[Any], nodes: Tensor) -> Tensor:
        """Returns the rows of nodes, [n, ...], of features [num_src, ...]."""
        return gather(features, nodes)


def block_of(sample: Sample, num_dst: int, fanout: int) -> tuple[Tensor, Graph, Tensor]:
    """The sources, the graph and the positions of a sample."""
    edges = torch.from_numpy(np.stack([sample.source, sample.destination]))
    block = Graph(num_dst, len(sample.nodes), edges=edges, name=f"sampled({fanout})")
    return torch.from_numpy(sample.nodes.astype(np.int64)), block, torch.from_numpy(sample.position)


def gather(features: Tensor | NDArray[Any], nodes: Tensor) -> Tensor:
    """`features[nodes]` as a tensor. Rows of an array, which may be a memory map, are read in ascending order, so that
    a disk is read in one direction and every page once."""
    if isinstance(features, Tensor):
        return features.index_select(0, nodes)
    order = np.argsort(nodes.numpy(), kind="stable")
    rows = np.empty((len(nodes), *features.shape[1:]), features.dtype)
    rows[order] = features[nodes.numpy()[order]]
    return torch.from_numpy(rows)


def compressed(graph: Graph, *, edge_ids: bool = False) -> CompressedGraph:
    """Returns the edges of a graph in memory in compressed rows: 4 bytes an edge, and 8 for `edge_ids` where edges have
    data of their own, or if they are asked for. Repeated edges are kept; attributes are not.

    Raises:
        ValueError: there are 2^31 sources or more.
    """
    csr = graph.csr
    row, col = csr.row.cpu().numpy(), csr.col.cpu().numpy()
    keys = row.astype(np.int64) << 32 | col
    ids = None
    if edge_ids or graph.edge_attr is not None or graph.has_edge_types:
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        ids = order if csr.edge_id is None else csr.edge_id.cpu().numpy()[order]
    else:
        keys.sort()
    columns = (keys & 0xFFFFFFFF).astype(np.int32)
    sums = sums_of_weights(graph.edge_attr, ids)
    return CompressedGraph(csr.ptr.cpu().numpy(), columns, graph.num_src, ids, sums)


def search_rows(
    value_at: Callable[[NDArray[np.int64]], NDArray[Any]],
    first: NDArray[np.int64],
    stop: NDArray[np.int64],
    wanted: NDArray[Any],
    side: Literal["left", "right"] = "left",
) -> NDArray[np.int64]:
    """The first place of each row [first, stop) whose value is not less than that `wanted` of the row; with side
    "right", the first whose value is larger. Values ascend in each row. All rows are bisected at once."""
    is_before = np.less if side == "left" else np.less_equal
    low, high = first.copy(), stop.copy()
    rows = np.flatnonzero(low < high)
    while len(rows):
        middle = (low[rows] + high[rows]) // 2
        before = is_before(value_at(middle), wanted[rows])
        low[rows[before]] = middle[before] + 1
        high[rows[~before]] = middle[~before]
        rows = rows[low[rows] < high[rows]]
    return low


def sums_of_weights(weight: Tensor | None, edge_ids: NDArray[np.int64] | slice | None) -> Tensor | None:
    """The sums of the sizes of the first edges' weights [E] or [E, 1] in this order, float64 [E + 1]; None for other
    data."""
    if weight is None or weight.shape[1:].numel() != 1:
        return None
    return F.pad(weight.detach().cpu().reshape(-1).double().abs()[edge_ids].cumsum(0), (1, 0))


def check_nodes(nodes: NDArray[np.int64], num_nodes: int, *, distinct: bool = True) -> None:
    """Raises ValueError unless `nodes` are integers [n] from 0 to num_nodes - 1, and distinct if they must be."""
    check_form("nodes must be int64 [n]", nodes, "int64", (None,))
    if not len(nodes):
        return
    if nodes.min() < 0 or nodes.max() >= num_nodes:
        at = int(np.flatnonzero((nodes < 0) | (nodes >= num_nodes))[0])
        raise ValueError(f"nodes[{at}] is {nodes[at]}, but there are {num_nodes} nodes, counted from 0")
    ordered = np.sort(nodes)
    if distinct and (ordered[1:] == ordered[:-1]).any():
        repeated = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        raise ValueError(f"nodes must be distinct; {repeated} appears more than once")


NONE = np.zeros(0, np.int64)


class Found:
    """The nodes of a kind found so far, each at a moment: the number of its time. The first ones may repeat.

    added: the number of first nodes, then of those that each step added.
    """

    def __init__(self, num_nodes: int, node: NDArray[np.int64] = NONE, moment: NDArray[np.int64] = NONE) -> None:
        self.num_nodes = num_nodes
        self.node = node
        self.moment = moment
        self.added = [len(node)]

    def key(self, node: NDArray[np.int64], moment: NDArray[np.int64]) -> NDArray[np.int64]:
        return moment * self.num_nodes + node

    def add(self, node: NDArray[np.int64], moment: NDArray[np.int64]) -> NDArray[np.int64]:
        """Adds pairs that are new, in order. Returns their indices."""
        unique, first = np.unique(self.key(node, moment), return_index=True)
        new = np.sort(first[~np.isin(unique, self.key(self.node, self.moment))])
        self.node = np.append(self.node, node[new])
        self.moment = np.append(self.moment, moment[new])
        self.added.append(len(new))
        return np.arange(len(self.node) - len(new), len(self.node))

    def index(self, key: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of the first node of each key."""
        keys = self.key(self.node, self.moment)
        order = np.argsort(keys, kind="stable")
        return order[np.searchsorted(keys, key, sorter=order)]


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
        times, moment = torch.cat([before, happened if self.as_of == "edge" else asked]).unique(return_inverse=True)
        own, drawn = moment.numpy()[:n], moment.numpy()[n:]
        source = self.columns[sample.position].astype(np.int64)
        sources = Found(self.num_src, nodes.numpy(), own)
        sources.add(source, drawn)
        src = torch.from_numpy(sources.index(sources.key(source, drawn)))
        block = Graph(n, len(sources.node), edges=torch.stack([src, dst]), name=f"sampled({fanout})")
        return torch.from_numpy(sources.node), times[sources.moment], block, edges, asked - happened

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
