"""Explicit edges as a topology, so that whatever takes a topology takes any graph."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import integers
from mpnn.graph.bound import BoundGraph
from mpnn.graph.runs import Ints, Runs
from mpnn.graph.topology import Topology
from mpnn.graphs.parse import register


@register
def listed(
    sources: Sequence[int] | Tensor, destinations: Sequence[int] | Tensor, num_nodes: int, prefixes: bool = True
) -> Topology:
    """Node destinations[e] receives from node sources[e], for each e. Over fewer than `num_nodes` nodes, as in a
    shorter text or a prefix, the edges among the first ones; without `prefixes` it is bound to `num_nodes` nodes only.

    ::

        listed([0, 0, 1, 2], [0, 1, 2, 2], 3)   #..
                                                #..
                                                .##
    """
    src, dst = integers("sources", sources), integers("destinations", destinations)
    if len(src) != len(dst):
        raise ValueError(f"sources and destinations are the two ends of edges; got {len(src)} and {len(dst)}")
    for e, ends in enumerate(zip(src, dst, strict=True)):
        if not 0 <= min(ends) <= max(ends) < num_nodes:
            raise IndexError(f"edge {e} ({ends[0]} -> {ends[1]}) leaves the {num_nodes} nodes, counted from 0")
    edge, count = next(iter(Counter(zip(src, dst, strict=True)).most_common(1)), ((0, 0), 0))
    if count > 1:
        raise ValueError(
            f"edge {edge[0]} -> {edge[1]} is listed {count} times, and a topology is a set of edges: drop the others "
            "by torch.unique(edge_index, dim=1)"
        )
    return Topology.of(_listed, src, dst, int(num_nodes), bool(prefixes), positional=True)


def _listed(
    i: Ints,
    num_src: int,
    sources: tuple[int, ...],
    destinations: tuple[int, ...],
    num_nodes: int,
    prefixes: bool = True,
) -> Runs:
    rows = int(i.max(initial=-1)) + 1
    if not prefixes and num_src != num_nodes:
        raise ValueError(
            f"the graph has {num_nodes} nodes, and the text or image has {num_src}; a graph is never cut: "
            f"pass a graph over {num_src} nodes, a list with a graph for each text of the batch, or a topology"
        )
    if max(rows, num_src) > num_nodes:
        raise ValueError(
            f"the graph has {num_nodes} nodes, and the text or image has {max(rows, num_src)}; pass a graph over all "
            "of them, or a topology, which fits each length"
        )
    src, dst = np.asarray(sources, np.int64), np.asarray(destinations, np.int64)
    known = (src < num_src) & (dst < rows)
    runs = Runs.of(rows, num_src, [(dst[known], src[known], src[known] + 1)])
    return runs.take(i)


def as_topology(graph: Any, prefixes: bool = True) -> Any:
    """Returns the edges of a square `Graph` as a topology, `listed(...)`; anything else as it is. It does not keep
    `edge_attr` and `edge_type`, which layers of ready-made models do not read.

    `prefixes`: whether it may be bound to fewer nodes. The nodes of a prefix of a causal graph have the same
    in-neighbors as in the whole graph; those of another graph do not.

    Raises:
        ValueError: if the graph is not square, differs by item and head, or lists an edge twice.
    """
    if isinstance(graph, BoundGraph) and graph.stack:
        raise ValueError(f"{graph} differs by item and head; pass it with a call: model(x, graph=...)")
    if not isinstance(graph, Graph):
        return graph
    if graph.num_dst != graph.num_src:
        raise ValueError(
            f"the nodes of a layer attend to one another, so its graph has as many destinations as sources; got {graph}"
        )
    return graph.cached(
        ("as topology", prefixes), lambda: listed(graph.ends[0], graph.ends[1], graph.num_dst, prefixes)
    )


def most_nodes(topology: Any) -> int | None:
    """The most nodes over which a topology can be bound, because it lists edges; None for any number."""
    operands = getattr(topology, "operands", None)
    if operands is None:
        return topology.args[2] if getattr(topology, "rule", None) is _listed else None
    sizes = [size for size in map(most_nodes, operands) if size is not None]
    return min(sizes, default=None)
