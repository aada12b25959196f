"""Graph: who hears whom, at a definite size.

An edge goes from `src` to `dst`; `dst` hears `src`; `edge_index[0]` is src and `edge_index[1]` is dst. A graph is
held in one of three forms and yields the others when first asked: rows of runs (from a topology), labels (disjoint
cliques), or explicit edges in the caller's order, repeated edges and edge attributes included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpnn import edges as edge_lists
from mpnn import reach, reorder
from mpnn.edges import CSR, built_once, sorted_by
from mpnn.handles import Handled
from mpnn.relation import Flipped, Relation, Table, as_relation
from mpnn.runs import Ints, Runs, expand

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")


class Graph(Handled):
    """Destinations, sources and the edges between them.

    Made by `Topology.bind` and the builders in `mpnn.graphs`. `relation` is the rule that gives each edge its class
    (`edge_type` holds the classes); `shift` says where destinations stand among the sources: destination i is the
    source i + shift, which matters to relative positions only. Where nodes stand elsewhere than at their numbers,
    `places` says it: int64 [num_dst] and [num_src].
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
        places: tuple[Tensor, Tensor] | None = None,
        name: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_dst, self.num_src = num_dst, num_src
        self.edge_attr = edge_attr
        self.relation, self.shift, self.places, self.name = relation, shift, places, name
        self.device = torch.device(device)
        self._given_runs, self._labels, self._edges, self._edge_type = runs, labels, edges, edge_type
        self._moved: dict[torch.device, Graph] = {self.device: self}
        self._memo: dict[Hashable, Any] = {}
        self.kept: Tensor | None = None
        self.order: Tensor | None = None

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

    @built_once
    def runs(self) -> Runs:
        """The edges as a set, in rows of runs; repeated edges count once."""
        if self._given_runs is not None:
            return self._given_runs
        if self._labels is not None:
            return Runs.from_labels(self._labels)
        src, dst = self.edge_index.cpu().numpy()
        return Runs.from_edges(self.num_dst, self.num_src, dst, src)

    @built_once
    def edge_index(self) -> Tensor:
        """[2, E] int64: row 0 the sources, row 1 the destinations. In the caller's order for explicit graphs, by
        destination and then source for structured ones, whose edges are written out here and only on request."""
        if self._edges is not None:
            return self._edges
        dst, src = self.runs.edges()
        return torch.from_numpy(np.stack([src, dst])).to(self.device)

    @built_once
    def csr(self) -> CSR:
        """Edges by destination."""
        if self._edges is None:
            ptr = torch.from_numpy(np.append(0, np.cumsum(self.runs.degree())))
            return CSR(ptr.to(self.device), self.edge_index[0], None)
        return sorted_by(self.edge_index[1], self.edge_index[0], self.num_dst)

    @built_once
    def csc(self) -> CSR:
        """Edges by source: the transposed graph, whose rows are sources and whose columns are destinations."""
        return sorted_by(self.edge_index[0], self.edge_index[1], self.num_src)

    @built_once
    def labels(self) -> Ints | None:
        """For a graph of disjoint cliques, the clique of each node, [N]; else None."""
        if self._labels is None and self._edges is None and self.num_dst == self.num_src and self.runs.is_complete:
            return np.zeros(self.num_dst, np.int64)
        return self._labels

    @built_once
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

    @built_once
    def num_edges(self) -> int:
        if self._edges is not None:
            return self._edges.shape[1]
        if self._labels is not None:
            return int((np.unique(self._labels, return_counts=True)[1] ** 2).sum())
        return self.runs.num_edges

    @built_once
    def edge_type(self) -> Tensor | None:
        """The class of each edge, int64 [E] in the order of `edge_index`; None when edges have no classes."""
        if self._edge_type is None and self.relation is not None:
            return self.relation.ids(*self.ends())
        return self._edge_type

    def where(self) -> tuple[Tensor, Tensor]:
        """Where destinations and sources stand, int64 [num_dst] and [num_src]."""
        if self.places is not None:
            return self.places
        dst, src = (torch.arange(n, device=self.device) for n in (self.num_dst, self.num_src))
        return dst + self.shift, src

    def ends(self) -> tuple[Tensor, Tensor]:
        """Where the destination and the source of each edge stand, int64 [E] each, in the order of `edge_index`."""
        src, dst = self.edge_index
        return (dst + self.shift, src) if self.places is None else (self.places[0][dst], self.places[1][src])

    @property
    def class_rule(self) -> Relation | None:
        """The rule that edges get their classes by; None when the classes are data, or there are none."""
        return self.relation if self._edge_type is None else None

    @property
    def has_classes(self) -> bool:
        return self._edge_type is not None or self.relation is not None

    @property
    def num_relations(self) -> int:
        """How many classes of edges there are; 0 when edges have none."""
        if self._edge_type is not None:
            return int(self._edge_type.max()) + 1 if self.num_edges else 0
        return 0 if self.relation is None else self.relation.count

    def dense(self) -> Tensor:
        """The adjacency as a bool matrix [num_dst, num_src], on the graph's device: O(N^2), to look at and to test."""
        if self._edges is None:
            return torch.from_numpy(self.runs.dense()).to(self.device)
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
            recording = torch.is_grad_enabled()  # plans depend on it, and leaving inference mode turns it on
            with torch.inference_mode(False), torch.set_grad_enabled(recording):
                self._memo[key] = build()
        return self._memo[key]

    def derived(
        self, build: Callable[..., Graph], *arguments: Hashable, num_dst: int, num_src: int | None = None
    ) -> Graph:
        """`build(graph, *arguments)`, made once: a graph of `num_dst` destinations over `num_src` sources, by default
        the same ones. Programs that `torch.compile` traces go on without it, and make it when they run."""
        return self.memo((build, arguments), lambda: build(self, *arguments))

    # ------------------------------------------------------------------------------------------------ new graphs

    def __or__(self, other: Graph) -> Graph:
        """The edges of both, as a set in rows of runs; so neither may carry attributes or classes as data."""
        if not isinstance(other, Graph):
            return NotImplemented
        for graph in (self, other):
            if graph.edge_attr is not None or graph._edge_type is not None:
                raise ValueError(f"a union would lose the edge data of {graph}; join edges with graphs.from_edges")
        return self._structured(self._runs_with(other, Runs.__or__), other)

    def __and__(self, other: Graph) -> Graph:
        """The edges that both have; those of an explicit graph keep their order, repeats and attributes."""
        if not isinstance(other, Graph):
            return NotImplemented
        if other.is_explicit and not self.is_explicit:
            return other & self
        runs = self._runs_with(other, Runs.__and__)
        if self.is_explicit:
            return self._found_in(runs, other)
        graph = self._structured(runs, other)
        if self.labels is not None and other.labels is not None:
            graph._labels = np.unique(np.stack([self.labels, other.labels]), axis=1, return_inverse=True)[1].reshape(-1)
        return graph

    def __sub__(self, other: Graph) -> Graph:
        """The edges that only this graph has; those of an explicit graph keep their order, repeats and attributes."""
        if not isinstance(other, Graph):
            return NotImplemented
        runs = self._runs_with(other, Runs.__sub__)
        return self._found_in(runs, other) if self.is_explicit else self._structured(runs, other)

    def __invert__(self) -> Graph:
        """Every edge that is not there."""
        return self._structured(self.runs.complement())

    def related(self, relation: Relation | Tensor) -> Graph:
        """The same edges, each with the class that the relation (or an integer matrix [num_dst, num_src]) gives it."""
        relation = as_relation(relation)
        if isinstance(relation, Table):
            relation.check_fits(self.num_dst, self.num_src, self.shift)
        graph = self._copy()
        graph.relation, graph._edge_type = relation, None
        return graph

    def placed(self, dst: Tensor, src: Tensor) -> Graph:
        """The same edges, with destinations and sources that stand at these positions, int64 [num_dst] and [num_src]:
        what relative positions and classes by rule go by."""
        for name, at, n in (("dst", dst, self.num_dst), ("src", src, self.num_src)):
            if at.shape != (n,) or at.is_floating_point():
                raise ValueError(f"{name} must hold {n} integers; got {at.dtype} of shape {list(at.shape)}")
        graph = self._copy()
        graph.places = (dst.to(self.device), src.to(self.device))
        return graph

    def rows(self, start: int, stop: int) -> Graph:
        """Destinations `start` to `stop` alone, over the same sources; they stand where they stood.

        Takes time in what these rows hear, not in the size of the graph.
        """
        if not 0 <= start <= stop <= self.num_dst:
            raise ValueError(f"rows {start} to {stop} are not among the {self.num_dst} destinations of {self}")
        if self._edges is not None:
            first, last = (int(self.csr.ptr[i]) for i in (start, stop))
            which = self.csr.edge_id
            assert which is not None
            graph = self._selected(which[first:last].sort().values)
            assert graph._edges is not None
            graph._edges = graph._edges - graph._edges.new_tensor([[0], [start]])
        else:
            graph = self._structured(self.runs.take(np.arange(start, stop)))
        graph.num_dst = stop - start
        graph.shift = self.shift + start
        graph.places = None if self.places is None else (self.places[0][start:stop], self.places[1])
        return graph

    def heard(self) -> tuple[Tensor, Graph]:
        """The sources that somebody hears, int64 ascending, and the graph over them alone; all stand where they
        stood."""
        if self._edges is not None:
            index, src = torch.unique(self._edges[0], return_inverse=True)
            graph = self._selected(torch.arange(self.num_edges, device=self.device))
            graph._edges = torch.stack([src, self._edges[1]])
        else:
            heard = self.runs.heard()
            index = torch.from_numpy(heard.edges()[1]).to(self.device)
            graph = self._structured(self.runs.narrowed(heard))
        graph.num_src = len(index)
        of_dst = torch.arange(self.num_dst, device=self.device) + self.shift
        graph.places = (of_dst, index) if self.places is None else (self.places[0], self.places[1][index])
        return index, graph

    def induced(self, keep: Tensor) -> Graph:
        """The nodes that are True in `keep`, bool [num_nodes], numbered anew, and the edges between them; all stand
        where they stood."""
        self._need_square("a part of the nodes")
        if keep.shape != (self.num_dst,) or keep.dtype != torch.bool:
            raise ValueError(f"keep must be bool [{self.num_dst}]; got {keep.dtype} of shape {list(keep.shape)}")
        if keep.all():
            return self
        dst, src = self.where()
        if self._edges is None:
            graph = self._structured(self.runs.induced(keep.cpu().numpy()))
        else:
            graph = self._selected((keep[self._edges[0]] & keep[self._edges[1]]).nonzero().squeeze(1))
            assert graph._edges is not None
            graph._edges = (keep.cumsum(0) - 1)[graph._edges]
            graph.num_dst = graph.num_src = int(keep.sum())
        graph.shift, graph.places = 0, (dst[keep], src[keep])
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
        graph.places = self.places and self.places[::-1]
        return graph

    def power(self, k: int) -> Graph:
        """i hears j when some walk of exactly `k` edges leads from j to i (with self-loops: of at most k)."""
        self._need_square("power")
        if k < 1:
            raise ValueError(f"power needs k >= 1; got {k}")
        if self.labels is not None:
            return self
        return self._structured(reach.power(self.runs, k))

    def with_self_loops(self, fill: float = 0.0) -> Graph:
        """Each node hears itself too; loops that are there already stay as they are. The new loops come last, with
        edge attributes of `fill`."""
        self._need_square("self-loops")
        if self.labels is not None:
            return self
        if self._edges is None:
            i = np.arange(self.num_dst)
            return self._structured(self.runs | Runs.from_edges(self.num_dst, self.num_src, i, i))
        loops = edge_lists.nodes_without_loop(self._edges, self.num_dst)
        attr = self.edge_attr
        new = None if attr is None else attr.new_full((len(loops), *attr.shape[1:]), fill)
        return self._extended(torch.stack([loops, loops]), edge_attr=new)

    def undirected(self) -> Graph:
        """Each edge goes both ways; an edge whose reverse was missing lends it its attributes. New edges come last."""
        self._need_square("undirected")
        if self.labels is not None:
            return self
        if self._edges is None:
            return self._structured(self.runs | self.runs.transpose())
        which = edge_lists.one_way(self._edges, self.num_dst)
        lent = self._selected(which)
        return self._extended(lent.edge_index.flip(0), edge_attr=lent.edge_attr, edge_type=lent._edge_type)

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

    def reordered(self, method: str = "rcm") -> Graph:
        """The same graph, with an order in which kernels take its rows: those that hear the same follow each other.

        Nothing else changes: nodes, edges and whatever is computed keep the caller's order. Worth it for large meshes
        and road maps whose nodes are numbered at random; aggregation on CPU heeds it. The order is found once, here,
        and kept in `order`, int64 [N].

        Args:
            method: "rcm" (reverse Cuthill-McKee: neighbours close together) or "degree" (rows that hear most first).
        """
        self._need_square("reordered")
        src, dst = self.edge_index.cpu().numpy()
        graph = self._copy()
        graph.order = torch.from_numpy(reorder.order(src, dst, self.num_dst, method))
        return graph

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        """The graph on a device; moved once, then remembered. `non_blocking`: without waiting, from pinned memory."""
        device = _resolved(device)
        if device not in self._moved:
            with torch.inference_mode(False):
                graph = self._copy(lambda x: x.to(device, non_blocking=non_blocking), device)
            graph._moved = self._moved
            self._moved[device] = graph
        return self._moved[device]

    def pin_memory(self) -> Graph:
        """The same graph with its edges and their data in pinned memory; `DataLoader(pin_memory=True)` calls this."""
        return self._copy(Tensor.pin_memory)

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
            edge_lists.check_form(self._edges)
            edge_lists.check_ends(self._edges, self.num_dst, self.num_src)
        for name, data in self._edge_data().items():
            if data is not None:
                edge_lists.check_data(name, data, self.edge_index)
        if self._edge_type is not None:
            edge_lists.check_classes(self._edge_type)
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

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles do without what was derived, which need not be picklable."""
        return {**super().__getstate__(), "_memo": {}}

    def _need_square(self, what: str) -> None:
        if self.num_dst != self.num_src:
            raise ValueError(f"{what} needs as many sources as destinations; got {self.num_dst} x {self.num_src}")

    def _copy(self, moved: Callable[[Tensor], Tensor] = lambda x: x, device: torch.device | None = None) -> Graph:
        data: Any = {name: None if old is None else moved(old) for name, old in self._edge_data().items()}
        graph = Graph(
            self.num_dst,
            self.num_src,
            runs=self.__dict__.get("runs", self._given_runs),
            labels=self._labels,
            edges=None if self._edges is None else moved(self._edges),
            **data,
            name=self.name,
            **{**self._inherited(), "device": device or self.device},
        )
        graph.places = self.places and (moved(self.places[0]), moved(self.places[1]))
        graph.order = self.order
        return graph

    def _structured(self, runs: Runs, other: Graph | None = None) -> Graph:
        return Graph(runs.num_dst, runs.num_src, runs=runs, **self._inherited(other))

    def _inherited(self, other: Graph | None = None) -> dict[str, Any]:
        """What a graph made from this one, or from this and another, has of them."""
        relation, shift, places = self.relation, self.shift, self.places
        if other is not None:
            relation, shift, places = relation or other.relation, shift or other.shift, places or other.places
        return {"relation": relation, "shift": shift, "places": places, "device": self.device}

    def _edge_data(self) -> dict[str, Tensor | None]:
        return {"edge_attr": self.edge_attr, "edge_type": self._edge_type}

    def _selected(self, which: Tensor, other: Graph | None = None) -> Graph:
        data: Any = {name: None if old is None else old[which] for name, old in self._edge_data().items()}
        edges = self.edge_index[:, which]
        return Graph(self.num_dst, self.num_src, edges=edges, **data, **self._inherited(other))

    def _extended(self, new_edges: Tensor, **new_data: Any) -> Graph:
        if new_edges.shape[1] == 0:
            return self
        if self._edge_type is not None and new_data.get("edge_type") is None:
            raise ValueError(
                f"the {new_edges.shape[1]} new edges would have no edge_type; add them with their classes through "
                "graphs.from_edges"
            )
        data: Any = {
            name: None if old is None else torch.cat([old, new_data[name]]) for name, old in self._edge_data().items()
        }
        edges = torch.cat([self.edge_index, new_edges], 1)
        return Graph(self.num_dst, self.num_src, edges=edges, **data, **self._inherited())

    def _runs_with(self, other: Graph, merge: Callable[[Runs, Runs], Runs]) -> Runs:
        if self.device != other.device:
            raise ValueError(f"the graphs are on {self.device} and {other.device}; move one with .to(device)")
        return merge(self.runs, other.runs)

    def _found_in(self, runs: Runs, other: Graph) -> Graph:
        """Those of the explicit edges that are in the runs too."""
        src, dst = self.edge_index.cpu().numpy()
        return self._selected(torch.from_numpy(runs.holds(dst, src)).to(self.device), other)


def _resolved(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device
