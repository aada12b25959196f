"""Samples of graphs of several kinds of nodes, whose nodes may have times.

What a node receives at a time depends on the node, the time and the seed: other seeds of a batch change nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import as_integer, at_least
from mpnn.graphs.compressed import NONE, CompressedGraph, Found, TemporalGraph, check_nodes, check_times, compressed
from mpnn.graphs.kinds import EdgeKind, HeteroGraph
from mpnn.kernels.edges import sample_neighbors

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class HeteroSample:
    """A sample of a `HeteroGraph`.

    Args:
        graph: the sampled edges with their data. Its nodes of a kind are `nodes[kind]`, of which some may be one node
            at several times.
        nodes: {kind: int64 [n]}, in the whole graph. Those asked for come first in their kind, in the order asked for.
        times: {kind: [n]}, the time at which each node is looked at; empty without times.
        edge_ids: {relation: int64 [E]}, the index of each edge in `edge_index` of the relation in the whole graph.
    """

    graph: HeteroGraph
    nodes: dict[str, Tensor]
    times: dict[str, Tensor]
    edge_ids: dict[EdgeKind, Tensor]


def sample(
    graph: HeteroGraph,
    seeds: tuple[str, Tensor],
    fanouts: Sequence[int | Mapping[EdgeKind, int]],
    *,
    time: Tensor | None = None,
    latest: bool = False,
    seed: int = 0,
) -> HeteroSample:
    """Samples in-neighbors of nodes, of those in-neighbors, and so on, along all relations (GraphSAGE, Hamilton et al.
    2017; of several kinds, as PyTorch Geometric's `NeighborLoader`).

    With `time`, only nodes that existed before the time of the seed that they are sampled for are in-neighbors, as
    `graph.times` has them; nodes of kinds without times always exist, and so do the seeds themselves. A node that seeds
    of several times reach is in the sample once for each of these times.

    Args:
        seeds: (kind, int64 [n]); nodes may repeat at different times.
        fanouts: for each step, the number of in-neighbors along each relation, -1 for all; or {relation: number}, which
            leaves out other relations.
        time: [n], the time of each seed, of the dtype of `graph.times`. Default: all edges exist.
        latest: take the latest in-neighbors instead of random ones, of kinds that have times.
        seed: seed, relation, step and node decide which in-neighbors are sampled.

    Raises:
        ValueError: an argument does not fit.
    """
    kind, targets = seeds
    if kind not in graph.num_nodes:
        raise ValueError(f"seeds are of kind {kind!r}; the kinds are {', '.join(graph.num_nodes)}")
    targets = targets.cpu()
    check_nodes(targets.numpy(), graph.num_nodes[kind], distinct=False)
    moments, moment = _moments(graph, time, len(targets), latest)
    steps = [_fanouts_of(graph, fanout) for fanout in fanouts]
    key = as_integer("seed", seed)
    numbers = {relation: number for number, relation in enumerate(graph)}
    sampled = {name: Found(n) for name, n in graph.num_nodes.items()}
    sampled[kind] = Found(graph.num_nodes[kind], targets.numpy(), moment)
    if len(np.unique(sampled[kind].key(targets.numpy(), moment))) < len(targets):
        raise ValueError("seeds must be distinct, or at different times")

    def draw(relation: EdgeKind, step: int, fanout: int, nodes: Ints, when: Ints) -> tuple[Ints, Ints, Ints]:
        rows = _rows(graph, relation)
        has_times = isinstance(rows, TemporalGraph)
        first, stop = rows.rows(torch.from_numpy(nodes), moments[when] if has_times and moments is not None else None)
        if latest and fanout > 0 and has_times:
            first = np.maximum(first, stop - fanout)
        drawn = key + (step * len(graph) + numbers[relation]) * _STRIDE
        edges = sample_neighbors(first, stop, rows.columns, rows.num_src, nodes, fanout, drawn)
        return edges.destination, edges.position, rows.columns[edges.position].astype(np.int64)

    return _result(graph, sampled, spread(sampled, steps, draw), moments)


Draw = Callable[[EdgeKind, int, int, Ints, Ints], tuple[Ints, Ints, Ints]]
"""Draws in-neighbors: `draw(relation, step, fanout, nodes, moments)` returns for each edge the index of its destination
among `nodes`, its position among the edges of the relation, and its source."""
_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of the steps


class Step(NamedTuple):
    """Edges of a relation that a step sampled: the keys of their sources, the indices of their destinations among the
    nodes found, and their positions."""

    source: Ints
    destination: Ints
    position: Ints


def spread(
    sampled: Mapping[str, Found], steps: Sequence[Mapping[EdgeKind, int]], draw: Draw
) -> dict[EdgeKind, list[Step]]:
    """Samples in-neighbors of the nodes found, of those in-neighbors, and so on, and adds them to `found`.

    Args:
        steps: the fan-out of each relation in each step.
    """
    edges: dict[EdgeKind, list[Step]] = {relation: [] for step in steps for relation in step}
    frontier = {kind: np.arange(len(one.node)) for kind, one in sampled.items()}
    for number, fanouts in enumerate(steps):
        reached = {kind: [(NONE, NONE)] for kind in sampled}
        for relation, fanout in fanouts.items():
            source, _, destination = relation
            at = frontier[destination]
            when = sampled[destination].moment[at]
            place, position, node = draw(relation, number, fanout, sampled[destination].node[at], when)
            edges[relation].append(Step(sampled[source].key(node, when[place]), at[place], position))
            reached[source].append((node, when[place]))
        frontier = {
            kind: sampled[kind].add(*(np.concatenate(ends) for ends in zip(*pairs, strict=True)))
            for kind, pairs in reached.items()
        }
    return edges


def _moments(graph: HeteroGraph, time: Tensor | None, count: int, latest: bool) -> tuple[Tensor | None, Ints]:
    """The distinct times of the seeds, ascending, and the number of each seed's time."""
    if time is None:
        if latest:
            raise ValueError("latest=True needs time, the time of each seed")
        return None, np.zeros(count, np.int64)
    if not graph.times:
        raise ValueError("time= needs a HeteroGraph with times: HeteroGraph(relations, times={kind: [N]})")
    check_times("time", time, count, next(iter(graph.times.values())).dtype)
    moments, moment = time.cpu().unique(return_inverse=True)
    return moments, moment.numpy()


def _fanouts_of(graph: HeteroGraph, fanout: int | Mapping[EdgeKind, int]) -> dict[EdgeKind, int]:
    """The fan-out of each relation, in the order of the graph."""
    of = fanout if isinstance(fanout, Mapping) else dict.fromkeys(graph, fanout)
    if unknown := of.keys() - graph.keys():
        raise ValueError(f"fanouts name {next(iter(unknown))!r}; the relations are {', '.join(map(str, graph))}")
    return {relation: at_least("fanouts", of[relation], -1) for relation in graph if relation in of}


def _rows(graph: HeteroGraph, relation: EdgeKind) -> CompressedGraph:
    """The rows of a relation; in the order of time if its sources have times."""
    if relation not in graph.rows:
        one = graph[relation].to("cpu")
        time = graph.times.get(relation[0])
        graph.rows[relation] = (
            compressed(one, edge_ids=True) if time is None else TemporalGraph(one, time.cpu()[one.ends[0]])
        )
    return graph.rows[relation]


def _result(
    graph: HeteroGraph,
    sampled: Mapping[str, Found],
    edges: Mapping[EdgeKind, list[Step]],
    moments: Tensor | None,
) -> HeteroSample:
    relations = {}
    edge_ids = {}
    for relation, one in graph.items():
        source, _, destination = relation
        steps = [Step(NONE, NONE, NONE), *edges.get(relation, ())]
        key, dst, position = (np.concatenate(part) for part in zip(*steps, strict=True))
        ids = _rows(graph, relation).edge_ids
        assert ids is not None
        which = torch.from_numpy(ids[position])
        data = {"edge_attr": one.edge_attr, "edge_type": one.edge_type if one.has_edge_types else None}
        relations[relation] = Graph.from_edges(
            torch.from_numpy(np.stack([sampled[source].index(key), dst])),
            len(sampled[destination].node),
            len(sampled[source].node),
            name=relation[1],
            periodic=one.periodic,
            **{name: x[which.to(x.device)] for name, x in data.items() if x is not None},
        )
        edge_ids[relation] = which
    sizes = {kind: len(one.node) for kind, one in sampled.items()}
    times = {} if moments is None else {kind: moments[one.moment] for kind, one in sampled.items()}
    own = {kind: time.cpu()[sampled[kind].node] for kind, time in graph.times.items()}
    nodes = {kind: torch.from_numpy(one.node) for kind, one in sampled.items()}
    return HeteroSample(HeteroGraph(relations, sizes, own), nodes, times, edge_ids)
