"""Graphs of several kinds of nodes: a graph for each relation, and all relations as one graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.graphs.compressed import check_times

EdgeKind = tuple[str, str, str]
"""(kind of the sources, name of the relation, kind of the destinations)."""


class HeteroGraph(Mapping[EdgeKind, Graph]):
    """Nodes of several kinds, and a graph for each relation between them: PyTorch Geometric's `HeteroData`.

    Args:
        relations: {(kind of the sources, name, kind of the destinations): graph}, such as
            {("author", "writes", "paper"): from_edges([[0, 1], [0, 0]], num_src=2, num_dst=1)}.
        num_nodes: {kind: number of nodes} of kinds without relations. The others follow from the graphs.
        times: {kind: [N], the time from which on each node exists}, for `graphs.sample`; other kinds always exist.

    Attributes:
        num_nodes: {kind: number of nodes}, in the order in which kinds are first mentioned.
        batch_sizes: of a batch, {kind: its number of nodes in each graph}; else empty.
        times: as passed.

    Raises:
        TypeError: if a relation is not three texts, or what it maps to is not a Graph.
        ValueError: if two graphs disagree about the number of nodes of a kind, graphs are on different devices, or
            times are not those of a kind.
    """

    def __init__(
        self,
        relations: Mapping[EdgeKind, Graph],
        num_nodes: Mapping[str, int] | None = None,
        times: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.num_nodes: dict[str, int] = {}
        for kind, n in (num_nodes or {}).items():
            self.num_nodes[kind] = at_least(f"num_nodes of {kind!r}", n, 0)
        for relation, graph in relations.items():
            if not (isinstance(relation, tuple) and [type(part) for part in relation] == [str] * 3):
                raise TypeError(f"a relation is (kind of sources, name, kind of destinations); got {relation!r}")
            if not isinstance(graph, Graph):
                raise TypeError(f"{relation} must be a Graph; got {type(graph).__name__}")
            for kind, n in ((relation[0], graph.num_src), (relation[2], graph.num_dst)):
                if self.num_nodes.setdefault(kind, n) != n:
                    raise ValueError(
                        f"{relation} has {n} nodes of kind {kind!r}; before it were {self.num_nodes[kind]}"
                    )
        self._relations = dict(relations)
        self.batch_sizes: dict[str, tuple[int, ...]] = {}
        if len({graph.device for graph in self.values()}) > 1:
            raise ValueError("the graphs of a HeteroGraph must be on one device; use to(device)")
        self.times = dict(times or {})
        self.rows: dict[EdgeKind, Any] = {}  # of each relation, made when it is first sampled
        for kind, time in self.times.items():
            if kind not in self.num_nodes:
                raise ValueError(f"times are of kind {kind!r}; the kinds are {', '.join(self.num_nodes)}")
            check_times(f"times[{kind!r}]", time, self.num_nodes[kind])
        if len({time.dtype for time in self.times.values()}) > 1:
            raise ValueError("the times of all kinds must have one dtype")

    def __getitem__(self, relation: EdgeKind) -> Graph:
        return self._relations[relation]

    def __iter__(self) -> Iterator[EdgeKind]:
        return iter(self._relations)

    def __len__(self) -> int:
        return len(self._relations)

    def __repr__(self) -> str:
        nodes = ", ".join(f"{n:,} {kind}" for kind, n in self.num_nodes.items())
        return f"HeteroGraph({nodes}; {', '.join(f'{g.num_edges:,} {name[1]}' for name, g in self.items())})"

    def to(self, device: torch.device | str) -> "HeteroGraph":
        times = {kind: time.to(device) for kind, time in self.times.items()}
        moved = HeteroGraph({name: graph.to(device) for name, graph in self.items()}, self.num_nodes, times)
        moved.batch_sizes = self.batch_sizes
        return moved

    @cached_property
    def stacked(self) -> Graph:
        """All relations as one graph, so that one softmax runs over them. Destinations are the nodes of all kinds, kind
        by kind. Sources are those of all relations, relation by relation: a node has other features in each. Edges come
        relation by relation, with the number of their relation as edge_type."""
        first = dict(zip(self.num_nodes, accumulate(self.num_nodes.values(), initial=0), strict=False))
        num_src = 0
        edges = []
        for relation, graph in self.items():
            src, dst = graph.edge_index
            edges.append(torch.stack([src + num_src, dst + first[relation[2]]]))
            num_src += graph.num_src
        if not edges:
            raise ValueError("a HeteroGraph without relations has no stacked graph")
        counts = torch.tensor([one.shape[1] for one in edges])
        which = torch.arange(len(edges)).repeat_interleave(counts).to(edges[0].device)
        sizes = sum(self.num_nodes.values()), num_src
        return Graph.from_edges(torch.cat(edges, 1), *sizes, edge_type=which, name="stacked relations")


def batch_of_kinds(graphs: Sequence[HeteroGraph], union: Callable[[list[Graph]], Graph]) -> HeteroGraph:
    """The union of graphs of several kinds, from the `union` of those of a relation; see `graphs.batch`.

    Raises:
        ValueError: a kind has times in some graphs only, or relations do not fit.
    """
    if len(graphs) == 1:
        return graphs[0]
    kinds = dict.fromkeys(kind for graph in graphs for kind in graph.num_nodes)
    sizes = {kind: tuple(graph.num_nodes.get(kind, 0) for graph in graphs) for kind in kinds}
    relations = {}
    for relation in dict.fromkeys(name for graph in graphs for name in graph):
        try:
            relations[relation] = union(_of_each(graphs, relation))
        except ValueError as error:
            raise ValueError(f"{relation}: {error}") from None
    times = {}
    for kind in kinds:
        parts = [graph.times.get(kind) for graph in graphs if graph.num_nodes.get(kind, 0)]
        present = [part for part in parts if part is not None]
        if present and len(present) < len(parts):
            raise ValueError(f"some graphs of the batch have times of kind {kind!r}, and others have none")
        if present:
            times[kind] = torch.cat(present)
    batch = HeteroGraph(relations, {kind: sum(counts) for kind, counts in sizes.items()}, times)
    batch.batch_sizes = sizes
    return batch


def _of_each(graphs: Sequence[HeteroGraph], relation: EdgeKind) -> list[Graph]:
    """A relation in each graph: without an edge in those that lack it."""
    like = next(graph[relation] for graph in graphs if relation in graph)
    none = torch.zeros(like.num_edges, dtype=torch.bool, device=like.device)
    data = {"edge_attr": like.edge_attr, "edge_type": like.types}
    empty = {name: values[none] for name, values in data.items() if values is not None}
    joined = []
    for graph in graphs:
        if relation in graph:
            joined.append(graph[relation])
            continue
        num_src, num_dst = (graph.num_nodes.get(kind, 0) for kind in (relation[0], relation[2]))
        nothing = torch.zeros(2, 0, dtype=torch.int64, device=like.device)
        joined.append(Graph.from_edges(nothing, num_dst, num_src, **empty))
    return joined
