"""Graph: who hears whom, at a definite size.

An edge goes from `src` to `dst`; `dst` hears `src`; `edge_index[0]` is src and `edge_index[1]` is dst. A graph is
held in one of three forms and yields the others when first asked: rows of runs (from a topology), labels (disjoint
cliques), or explicit edges in the caller's order, repeated edges and edge attributes included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpnn import capacity, reach, reorder
from mpnn import edges as edge_lists
from mpnn.edges import CSR, built_once, sorted_by, trainable
from mpnn.graph import algebra, parts, rewired
from mpnn.graph.made import check_form, edge_data, structured
from mpnn.handles import Handled
from mpnn.relation import Relation, Table, as_relation
from mpnn.runs import Ints, Runs, cliques_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
_ABSENT: Any = object()


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
        self._moved: dict[torch.device, Graph] = {}
        self._moved_from: weakref.ref[Graph] | None = None  # weak: a graph that is let go is gone, with all its edges
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
        capacity.require(
            self.num_edges * 32,  # the result, and as much again while it is written
            f"the edges of {self} do not fit into memory: int64 [2, E]",
            "its runs, degrees, algebra and structured kernels need none of them",
        )
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
        return [torch.from_numpy(members).to(self.device) for members in cliques_of(self.labels)]

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
        capacity.require(3 * self.num_dst * self.num_src, f"the matrix of {self}", "look at a smaller graph")
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
        found = self._memo.get(key, _ABSENT)
        if found is _ABSENT:
            found = self._memo[key] = trainable(build)
        return found

    def derived(
        self, build: Callable[..., Graph], *arguments: Hashable, num_dst: int, num_src: int | None = None
    ) -> Graph:
        """`build(graph, *arguments)`, made once: a graph of `num_dst` destinations over `num_src` sources, by default
        the same ones. Programs that `torch.compile` traces go on without it, and make it when they run."""
        return self.memo((build, arguments), lambda: build(self, *arguments))

    # ------------------------------------------------------------------------------------------------ new graphs

    def __or__(self, other: Graph) -> Graph:
        """The edges of both, as a set in rows of runs; so neither may carry attributes or classes as data."""
        return algebra.union(self, other) if isinstance(other, Graph) else NotImplemented

    def __and__(self, other: Graph) -> Graph:
        """The edges that both have; those of an explicit graph keep their order, repeats and attributes."""
        return algebra.intersection(self, other) if isinstance(other, Graph) else NotImplemented

    def __sub__(self, other: Graph) -> Graph:
        """The edges that only this graph has; those of an explicit graph keep their order, repeats and attributes."""
        return algebra.difference(self, other) if isinstance(other, Graph) else NotImplemented

    def __invert__(self) -> Graph:
        """Every edge that is not there."""
        return structured(self, self.runs.complement())

    def __bool__(self) -> NoReturn:
        algebra.refuse_truth(self)

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
        dst, src = (torch.as_tensor(at, device=self.device) for at in (dst, src))
        for name, at, n in (("dst", dst, self.num_dst), ("src", src, self.num_src)):
            if at.shape != (n,) or at.is_floating_point():
                raise ValueError(f"{name} must hold {n} integers; got {at.dtype} of shape {list(at.shape)}")
        graph = self._copy()
        graph.places = (dst, src)
        return graph

    def rows(self, start: int, stop: int) -> Graph:
        """Destinations `start` to `stop` alone, over the same sources; they stand where they stood.

        Takes time in what these rows hear, not in the size of the graph.
        """
        return parts.rows(self, start, stop)

    def heard(self) -> tuple[Tensor, Graph]:
        """The sources that somebody hears, int64 ascending, and the graph over them alone; all stand where they
        stood."""
        return parts.heard(self)

    def induced(self, keep: Tensor) -> Graph:
        """The nodes that are True in `keep`, bool [num_nodes], numbered anew, and the edges between them; all stand
        where they stood."""
        self._need_square("a part of the nodes")
        return parts.induced(self, keep)

    def reverse(self) -> Graph:
        """Every edge turned round; attributes and classes stay with their edges."""
        return rewired.reverse(self)

    def power(self, k: int) -> Graph:
        """i hears j when some walk of exactly `k` edges leads from j to i (with self-loops: of at most k)."""
        self._need_square("power")
        return rewired.power(self, k)

    def with_self_loops(self, fill: float = 0.0) -> Graph:
        """Each node hears itself too; loops that are there already stay as they are. The new loops come last, with
        edge attributes of `fill`."""
        self._need_square("self-loops")
        return rewired.with_self_loops(self, fill)

    def undirected(self) -> Graph:
        """Each edge goes both ways; an edge whose reverse was missing lends it its attributes. New edges come last."""
        self._need_square("undirected")
        return rewired.undirected(self)

    def drop_edges(self, p: float, generator: torch.Generator | None = None) -> Graph:
        """Each edge kept with probability 1 - p (DropEdge, Rong et al. 2020); the rest keep order and attributes.

        `kept` of the result, int64, says which edges they are. Drawn on the CPU from `generator`, or from torch's
        default one.
        """
        return rewired.drop_edges(self, p, generator)

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
        origin = None if self._moved_from is None else self._moved_from()
        first = self if origin is None else origin
        for graph in (self, first):
            if graph.device == device:
                return graph
        if device not in first._moved:
            with torch.inference_mode(False):
                graph = self._copy(lambda x: x.to(device, non_blocking=non_blocking), device)
            graph._moved_from = weakref.ref(first)
            first._moved[device] = graph
        return first._moved[device]

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
        edge_lists.check(self._edges, self.num_dst, self.num_src, edge_data(self))
        return self

    def reach(self, layers: int) -> float:
        """The fraction of (destination, source) pairs that `layers` rounds of message passing connect, each node
        keeping what it knows: 1.0 when everybody has heard everybody. A node knows itself from the beginning, so that
        `reach(1)` counts it although the share of pairs that are edges may not. Above 1,024 nodes, measured on 256
        sources spread evenly."""
        self._need_square("reach")
        return reach.fraction(self.runs, layers)

    def diameter(self) -> int | None:
        """How many layers until every node has heard every other; None when some never do. Sampled as `reach` is."""
        self._need_square("diameter")
        return reach.diameter(self.runs)

    def components(self) -> Tensor:
        """The component of each source, int64 [num_src], numbered from 0: two sources are in one component where a
        destination receives from both, or where a chain of such pairs leads from one to the other."""
        return torch.from_numpy(reach.components(self.runs)).to(self.device)

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
        """What defines the graph. Copies and pickles derive the rest again, on the device where they need it."""
        state = {name: _compact(value) for name, value in super().__getstate__().items() if name not in _DERIVED}
        if self._edges is not None or self._labels is not None:
            state["_given_runs"] = None
        labels = None if self._labels is None else torch.tensor(self._labels)
        there = torch.empty(0, device=self.device)  # a tensor, so that `torch.load(map_location=)` moves the graph
        return {**state, "_labels": labels, "device": there, "_memo": {}, "_moved": {}, "_moved_from": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Checks the graph, since kernels read wherever its edges point and a pickle may come from anywhere.

        Raises:
            ValueError, TypeError, IndexError: as `validate`, and where the parts do not make one graph.
        """
        given = {name: value for name, value in state.items() if name not in _DERIVED}
        self.__dict__.update(given, _memo={}, _moved={}, _moved_from=None)
        self.device = state["device"].device
        if isinstance(labels := state.get("_labels"), Tensor):
            self._labels = labels.cpu().numpy()
        check_form(self)
        self.validate()

    def _need_square(self, what: str) -> None:
        if self.num_dst != self.num_src:
            raise ValueError(f"{what} needs as many sources as destinations; got {self.num_dst} x {self.num_src}")

    def _copy(self, moved: Callable[[Tensor], Tensor] = lambda x: x, device: torch.device | None = None) -> Graph:
        data: Any = {name: None if old is None else moved(old) for name, old in edge_data(self).items()}
        graph = Graph(
            self.num_dst,
            self.num_src,
            runs=self.__dict__.get("runs", self._given_runs),
            labels=self._labels,
            edges=None if self._edges is None else moved(self._edges),
            **data,
            name=self.name,
            relation=self.relation,
            shift=self.shift,
            device=device or self.device,
        )
        graph.places = self.places and (moved(self.places[0]), moved(self.places[1]))
        graph.order = self.order
        return graph


_DERIVED = {name for name, value in vars(Graph).items() if isinstance(value, built_once)}


def _compact(value: Any) -> Any:
    """Tensors without the rest of the memory that they are views of, which a pickle would write out too."""
    if isinstance(value, Tensor):
        whole = value.layout != torch.strided or value.untyped_storage().nbytes() <= value.nbytes
        return value if whole else value.clone()
    return tuple(map(_compact, value)) if isinstance(value, tuple) else value


def _resolved(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device
