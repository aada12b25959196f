"""Graph: who hears whom, at a definite size.

An edge goes from `src` to `dst`; `dst` hears `src`; `edge_index[0]` is src and `edge_index[1]` is dst. A graph is
held in one of three forms and yields the others when first asked: rows of runs (from a topology), labels (disjoint
cliques), or explicit edges in the caller's order, repeated edges and edge attributes included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpnn import reach
from mpnn.relation import Flipped, Relation, as_relation
from mpnn.runs import Ints, Runs, expand

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CSR:
    """Edges sorted by row: row r has the edges `ptr[r]:ptr[r+1]`, each with its `col`. All int64.

    `edge_id` says where each of them stands in the caller's order; None when that is the same order.
    """

    ptr: Tensor
    col: Tensor
    edge_id: Tensor | None

    @cached_property
    def row(self) -> Tensor:
        """The row of each edge, [E]."""
        rows = torch.arange(len(self.ptr) - 1, device=self.ptr.device)
        return torch.repeat_interleave(rows, self.ptr.diff(), output_size=len(self.col))

    def from_caller(self, per_edge: Tensor, dim: int = 0) -> Tensor:
        """Values in the caller's edge order, put into this one."""
        return per_edge if self.edge_id is None else per_edge.index_select(dim, self.edge_id)

    def to_caller(self, per_edge: Tensor, dim: int = 0) -> Tensor:
        """Values in this edge order, put into the caller's."""
        return per_edge if self.edge_id is None else per_edge.index_select(dim, self.edge_id.argsort())


class Graph:
    """Destinations, sources and the edges between them.

    Made by `Topology.bind` and the builders in `mpnn.graphs`. `relation` is the rule that gives each edge its class
    (`edge_type` holds the classes); `shift` says where destinations stand among the sources: destination i is the
    source i + shift, which matters to relative positions only.
    """

    def __init__(
        self,
        num_dst: int,
        num_src: int,
        *,
        runs: Runs | None = None,
        labels: Ints | None = None,
        edges: Tensor | None = None,
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
        relation: Relation | None = None,
        shift: int = 0,
        name: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_dst, self.num_src = num_dst, num_src
        self.edge_attr = edge_attr
        self.relation, self.shift, self.name = relation, shift, name
        self.device = torch.device(device)
        self._given_runs, self._labels, self._edges, self._edge_type = runs, labels, edges, edge_type
        self._moved: dict[torch.device, Graph] = {self.device: self}
        self._memo: dict[Hashable, Any] = {}

    # ------------------------------------------------------------------------------------------------ made from

    @staticmethod
    def from_runs(runs: Runs, *, relation: Relation | None = None, shift: int = 0, name: str = "") -> Graph:
        return Graph(runs.num_dst, runs.num_src, runs=runs, relation=relation, shift=shift, name=name)

    @staticmethod
    def from_labels(labels: Ints, *, relation: Relation | None = None, name: str = "") -> Graph:
        """Disjoint cliques: i hears j when `labels[i] == labels[j]`; int64 [num_nodes]."""
        return Graph(len(labels), len(labels), labels=labels, relation=relation, name=name)

    @staticmethod
    def from_edges(
        edge_index: Tensor,
        num_dst: int,
        num_src: int,
        *,
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
        name: str = "",
    ) -> Graph:
        """Explicit edges, int64 [2, E]: kept in this order, repeated ones too; checked here."""
        return Graph(
            num_dst,
            num_src,
            edges=edge_index,
            edge_attr=edge_attr,
            edge_type=edge_type,
            name=name,
            device=edge_index.device,
        ).validate()

    # ------------------------------------------------------------------------------------------------ physical forms

    @property
    def is_explicit(self) -> bool:
        """Whether the graph is a list of edges in its caller's order, rather than a structured one."""
        return self._edges is not None

    @cached_property
    def runs(self) -> Runs:
        """The edges as a set, in rows of runs; repeated edges count once."""
        if self._given_runs is not None:
            return self._given_runs
        if self._labels is not None:
            return _runs_of_labels(self._labels)
        src, dst = self.edge_index.cpu().numpy()
        return Runs.from_edges(self.num_dst, self.num_src, dst, src)

    @cached_property
    def edge_index(self) -> Tensor:
        """[2, E] int64: row 0 the sources, row 1 the destinations. In the caller's order for explicit graphs, by
        destination and then source for structured ones, whose edges are written out here and only on request."""
        if self._edges is not None:
            return self._edges
        dst, src = self.runs.edges()
        return torch.from_numpy(np.stack([src, dst])).to(self.device)

    @cached_property
    def csr(self) -> CSR:
        """Edges by destination."""
        if self._edges is None:
            ptr = torch.from_numpy(np.append(0, np.cumsum(self.runs.degree())))
            return CSR(ptr.to(self.device), self.edge_index[0], None)
        return _sorted_by(self.edge_index[1], self.edge_index[0], self.num_dst)

    @cached_property
    def csc(self) -> CSR:
        """Edges by source: the transposed graph, whose rows are sources and whose columns are destinations."""
        return _sorted_by(self.edge_index[0], self.edge_index[1], self.num_src)

    @cached_property
    def labels(self) -> Ints | None:
        """For a graph of disjoint cliques, the clique of each node, [N]; else None."""
        if self._labels is None and self._edges is None and self.num_dst == self.num_src and self.runs.is_complete:
            return np.zeros(self.num_dst, np.int64)
        return self._labels

    @cached_property
    def cliques(self) -> list[Tensor]:
        """The members of the disjoint cliques, one int64 tensor [number of cliques, size] for each size there is."""
        if self.labels is None:
            raise ValueError(f"{self} is not a graph of disjoint cliques")
        order = np.argsort(self.labels, kind="stable")
        size = np.bincount(np.unique(self.labels, return_inverse=True)[1])
        first = np.cumsum(size) - size
        return [
            torch.from_numpy(order[expand(first[size == s], first[size == s] + s)].reshape(-1, s)).to(self.device)
            for s in np.unique(size)
        ]

    # ------------------------------------------------------------------------------------------------ what it holds

    @cached_property
    def num_edges(self) -> int:
        if self._edges is not None:
            return self._edges.shape[1]
        if self._labels is not None:
            return int((np.unique(self._labels, return_counts=True)[1] ** 2).sum())
        return self.runs.num_edges

    @cached_property
    def edge_type(self) -> Tensor | None:
        """The class of each edge, int64 [E] in the order of `edge_index`; None when edges have no classes."""
        if self._edge_type is None and self.relation is not None:
            return self.relation.ids(self.edge_index[1] + self.shift, self.edge_index[0])
        return self._edge_type

    @property
    def num_relations(self) -> int:
        """How many classes of edges there are; 0 when edges have none."""
        if self._edge_type is not None:
            return int(self._edge_type.max()) + 1 if self.num_edges else 0
        return 0 if self.relation is None else self.relation.count

    def dense(self) -> Tensor:
        """The adjacency as a bool matrix [num_dst, num_src], on the graph's device: O(N^2), to look at and to test."""
        matrix = torch.zeros(self.num_dst, self.num_src, dtype=torch.bool, device=self.device)
        matrix[self.edge_index[1], self.edge_index[0]] = True
        return matrix

    def degree(self) -> Tensor:
        """How many edges each destination hears, int64 [num_dst]."""
        if self._edges is not None:
            return torch.bincount(self._edges[1], minlength=self.num_dst)
        return torch.from_numpy(self.runs.degree()).to(self.device)

    def memo(self, key: Hashable, build: Callable[[], T]) -> T:
        """What `build()` gave the first time for this graph and key: a place for whatever layers derive from it."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    # ------------------------------------------------------------------------------------------------ new graphs

    def __or__(self, other: Graph) -> Graph:
        return self._combined(other, Runs.__or__, None)

    def __and__(self, other: Graph) -> Graph:
        both = isinstance(other, Graph) and self.labels is not None and other.labels is not None
        labels = _common(self.labels, other.labels) if both and self.num_dst == other.num_dst else None  # type: ignore[arg-type]
        return self._combined(other, Runs.__and__, labels)

    def __sub__(self, other: Graph) -> Graph:
        return self._combined(other, Runs.__sub__, None)

    def __invert__(self) -> Graph:
        """Every edge that is not there."""
        return self._structured(self.runs.complement())

    def _combined(self, other: Graph, merge: Callable[[Runs, Runs], Runs], labels: Ints | None) -> Graph:
        if not isinstance(other, Graph):
            return NotImplemented
        graph = self._structured(merge(self.runs, other.runs))
        graph.relation = self.relation or other.relation
        graph.shift = self.shift or other.shift
        graph._labels = labels
        return graph

    def _structured(self, runs: Runs, relation: Relation | None = None) -> Graph:
        relation = relation or self.relation
        return Graph(runs.num_dst, runs.num_src, runs=runs, relation=relation, shift=self.shift, device=self.device)

    def related(self, relation: Relation | Tensor) -> Graph:
        """The same edges, each with the class that the relation (or an integer matrix [num_dst, num_src]) gives it."""
        graph = self._copy()
        graph.relation, graph._edge_type = as_relation(relation), None
        return graph

    def reverse(self) -> Graph:
        """Every edge turned round; attributes and classes stay with their edges."""
        if self._edges is None:
            runs = self.runs if self._labels is not None else self.runs.transpose()
            graph = Graph(self.num_src, self.num_dst, runs=runs, labels=self._labels, device=self.device)
            graph.shift = -self.shift
        else:
            graph = Graph(self.num_src, self.num_dst, edges=self._edges.flip(0), device=self.device)
        graph.edge_attr, graph._edge_type = self.edge_attr, self._edge_type
        graph.relation = self.relation and Flipped(self.relation)
        return graph

    def power(self, k: int) -> Graph:
        """i hears j when some walk of exactly `k` edges leads from j to i (with self-loops: of at most k)."""
        self._need_square("power")
        if k < 1:
            raise ValueError(f"power needs k >= 1; got {k}")
        return self._structured(reach.power(self.runs, k))

    def with_self_loops(self, fill: float = 0.0) -> Graph:
        """Each node hears itself too; loops that are there already stay as they are. The new loops come last, with
        edge attributes of `fill`."""
        self._need_square("self-loops")
        if self._edges is None:
            i = np.arange(self.num_dst)
            return self._structured(self.runs | Runs.from_edges(self.num_dst, self.num_src, i, i))
        src, dst = self._edges
        missing = torch.ones(self.num_dst, dtype=torch.bool, device=self.device)
        missing[dst[src == dst]] = False
        loops = missing.nonzero().squeeze(1)
        attr = self.edge_attr
        new = None if attr is None else attr.new_full((len(loops), *attr.shape[1:]), fill)
        return self._extended(torch.stack([loops, loops]), new)

    def undirected(self) -> Graph:
        """Each edge goes both ways; an edge whose reverse was missing lends it its attributes. New edges come last."""
        self._need_square("undirected")
        if self._edges is None:
            return self._structured(self.runs | self.runs.transpose())
        src, dst = self._edges
        key, turned = dst * self.num_src + src, src * self.num_src + dst
        missing = ~torch.isin(turned, key)
        which = missing.nonzero().squeeze(1)
        attr, kind = self.edge_attr, self._edge_type
        return self._extended(
            self._edges[:, which].flip(0),
            None if attr is None else attr[which],
            None if kind is None else kind[which],
        )

    def drop_edges(self, p: float, generator: torch.Generator | None = None) -> Graph:
        """Each edge kept with probability 1 - p (DropEdge, Rong et al. 2020); the rest keep order and attributes.

        `kept` of the result, int64, says which edges they are. Drawn on the CPU from `generator`, or from torch's
        default one.
        """
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p must lie between 0 and 1; got {p}")
        kept = (torch.rand(self.num_edges, generator=generator) >= p).nonzero().squeeze(1).to(self.device)
        graph = self._selected(kept)
        graph.kept = kept
        return graph

    kept: Tensor | None = None

    def to(self, device: torch.device | str) -> Graph:
        """The graph on a device; moved once, then remembered."""
        device = _resolved(device)
        if device not in self._moved:
            graph = self._copy(device)
            graph._moved = self._moved
            self._moved[device] = graph
        return self._moved[device]

    # ------------------------------------------------------------------------------------------------ looking at it

    def validate(self) -> Graph:
        """Checks everything that explicit edges can get wrong, and names the offending edge; returns the graph.

        Raises:
            TypeError: edges are not integers.
            ValueError: wrong shapes, or attributes that do not match the edges.
            IndexError: an end that is no node.
        """
        for name, n in (("num_dst", self.num_dst), ("num_src", self.num_src)):
            if n < 0:
                raise ValueError(f"{name} must not be negative; got {n}")
        if self._edges is not None:
            _check_edges(self._edges, self.num_dst, self.num_src)
        for name, data in (("edge_attr", self.edge_attr), ("edge_type", self._edge_type)):
            if data is None:
                continue
            if len(data) != self.num_edges:
                raise ValueError(f"{name} must have one row for each of the {self.num_edges} edges; got {len(data)}")
            if data.device != self.edge_index.device:
                raise ValueError(f"{name} is on {data.device} and the edges on {self.edge_index.device}; move one")
        if self._edge_type is not None:
            if self._edge_type.is_floating_point() or self._edge_type.dim() != 1:
                raise TypeError(
                    f"edge_type must be integers [E]; got {self._edge_type.dtype} of shape "
                    f"{list(self._edge_type.shape)}"
                )
            if self.num_edges and int(self._edge_type.min()) < 0:
                bad = int(self._edge_type.argmin())
                raise ValueError(f"edge {bad} has edge_type {int(self._edge_type[bad])}; classes count from 0")
        return self

    def reach(self, layers: int) -> float:
        """The fraction of (destination, source) pairs that `layers` rounds of message passing connect, each node
        keeping what it knows: 1.0 when everybody has heard everybody. Above 1,024 nodes, measured on 256 sources
        spread evenly."""
        self._need_square("reach")
        return reach.fraction(self.runs, layers)

    def diameter(self) -> int | None:
        """How many layers until every node has heard every other; None when some never do. Sampled as `reach` is."""
        self._need_square("diameter")
        return reach.diameter(self.runs)

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draws the edges that run, destinations down and sources across; see `mpnn.plot.adjacency`."""
        from mpnn import plot

        return plot.adjacency(self, ax=ax, **options)

    def __repr__(self) -> str:
        size = f"{self.num_dst:,} nodes" if self.num_dst == self.num_src else f"{self.num_dst:,} x {self.num_src:,}"
        named = f"{self.name}: " if self.name else ""
        return f"Graph({named}{size}, {self.num_edges:,} edges)"

    # ------------------------------------------------------------------------------------------------ inside

    def _need_square(self, what: str) -> None:
        if self.num_dst != self.num_src:
            raise ValueError(f"{what} needs as many sources as destinations; got {self.num_dst} x {self.num_src}")

    def _copy(self, device: torch.device | None = None) -> Graph:
        device = device or self.device
        moved = [None if t is None else t.to(device) for t in (self._edges, self.edge_attr, self._edge_type)]
        return Graph(
            self.num_dst,
            self.num_src,
            runs=self.__dict__.get("runs", self._given_runs),
            labels=self._labels,
            edges=moved[0],
            edge_attr=moved[1],
            edge_type=moved[2],
            relation=self.relation,
            shift=self.shift,
            name=self.name,
            device=device,
        )

    def _selected(self, edges: Tensor) -> Graph:
        graph = Graph(self.num_dst, self.num_src, edges=self.edge_index[:, edges], device=self.device)
        graph.edge_attr = None if self.edge_attr is None else self.edge_attr[edges]
        graph._edge_type = None if self._edge_type is None else self._edge_type[edges]
        graph.relation, graph.shift = self.relation, self.shift
        return graph

    def _extended(self, edges: Tensor, attr: Tensor | None, kind: Tensor | None = None) -> Graph:
        if self._edge_type is not None and kind is None and edges.shape[1]:
            raise ValueError("the new edges have no edge_type; add them with their classes through graphs.from_edges")
        graph = Graph(self.num_dst, self.num_src, edges=torch.cat([self.edge_index, edges], 1), device=self.device)
        graph.edge_attr = None if self.edge_attr is None or attr is None else torch.cat([self.edge_attr, attr])
        graph._edge_type = None if self._edge_type is None or kind is None else torch.cat([self._edge_type, kind])
        graph.relation, graph.shift = self.relation, self.shift
        return graph


def _sorted_by(row: Tensor, col: Tensor, num_rows: int) -> CSR:
    edge_id = torch.sort(row, stable=True).indices
    ptr = torch.zeros(num_rows + 1, dtype=torch.int64, device=row.device)
    ptr[1:] = torch.bincount(row, minlength=num_rows).cumsum(0)
    return CSR(ptr, col[edge_id], edge_id)


def _runs_of_labels(labels: Ints) -> Runs:
    """Every node hears the runs of consecutive nodes that its own clique is made of."""
    n = len(labels)
    _, clique = np.unique(labels, return_inverse=True)
    order = np.argsort(clique, kind="stable")
    begins = np.ones(n, bool)
    begins[1:] = (np.diff(order) != 1) | (np.diff(clique[order]) != 0)
    first = np.flatnonzero(begins)
    start = order[first]
    stop = start + np.diff(np.append(first, n))
    runs_of = np.append(0, np.cumsum(np.bincount(clique[start], minlength=int(clique.max(initial=-1)) + 1)))
    which = expand(runs_of[clique], runs_of[clique + 1])
    ptr = np.append(0, np.cumsum(runs_of[clique + 1] - runs_of[clique]))
    return Runs(n, n, ptr, start[which], stop[which])


def _common(a: Ints, b: Ints) -> Ints:
    """Cliques of the nodes that share both labels."""
    return np.unique(np.stack([a, b]), axis=1, return_inverse=True)[1].reshape(-1)


def _check_edges(edges: Tensor, num_dst: int, num_src: int) -> None:
    if edges.dim() != 2 or edges.shape[0] != 2:
        raise ValueError(f"edge_index must have shape [2, E], sources above destinations; got {list(edges.shape)}")
    if edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool:
        raise TypeError(f"edge_index must hold integers; got {edges.dtype}")
    for role, ends, n in (("source", edges[0], num_src), ("destination", edges[1], num_dst)):
        bad = ((ends < 0) | (ends >= n)).nonzero()
        if len(bad):
            e = int(bad[0])
            raise IndexError(
                f"edge {e} ({int(edges[0, e])} -> {int(edges[1, e])}) has {role} {int(ends[e])}, "
                f"but there are {n} {role}s, counted from 0"
            )


def _resolved(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
