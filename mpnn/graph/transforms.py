"""Graphs with other edges between the same nodes: reversed, added, dropped, or k-hop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import csr as edge_lists
from mpnn.graph import reachability
from mpnn.graph.derive import edge_data, extended, renumbered, selected, structured
from mpnn.graph.relations import Offset, flipped
from mpnn.graph.runs import Runs

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph


def reverse(graph: Graph) -> Graph:
    """`Graph.reverse`."""
    relation = None if graph.relation is None else flipped(graph.relation)
    positions = graph.positions
    by_distance = relation is None or any(type(one) is Offset for one in (relation, graph.relation))
    if positions is None and graph.shift and not by_distance:
        positions = graph.node_positions()  # a shift determines relative positions only
    changes: dict[str, Any] = {
        "num_dst": graph.num_src,
        "num_src": graph.num_dst,
        "relation": relation,
        "shift": -graph.shift if positions is None else 0,
        "positions": positions and positions[::-1],
    }
    if graph.is_explicit:
        return renumbered(graph, graph.stored_edges.flip(0), **changes)
    if graph.clique_sizes is not None:
        return structured(graph, graph.structure, labels=graph._labels, **changes)
    return structured(graph, graph.runs.transpose(), **changes)


def power(graph: Graph, k: int) -> Graph:
    """`Graph.power`."""
    if not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"power needs an integer k >= 1; got {k!r}")
    return graph if graph.clique_sizes is not None else structured(graph, reachability.power(graph.runs, k))


def with_self_loops(graph: Graph, fill: float) -> Graph:
    """`Graph.with_self_loops`."""
    if graph.clique_sizes is not None:
        return graph
    if not graph.is_explicit:
        i = np.arange(graph.num_dst)
        return structured(graph, graph.runs | Runs.from_edges(graph.num_dst, graph.num_src, i, i))
    loops = edge_lists.nodes_without_loop(graph.ends, graph.num_dst)
    attr = graph.edge_attr
    new = None if attr is None else attr.new_full((len(loops), *attr.shape[1:]), fill)
    if new is not None and (new != fill).any() and fill == fill:  # NaN never equals itself
        raise ValueError(f"loops cannot have attributes of {fill} where edge_attr holds {new.dtype}")
    return extended(graph, torch.stack([loops, loops]), edge_attr=new)


def undirected(graph: Graph) -> Graph:
    """`Graph.undirected`."""
    if graph.clique_sizes is not None:
        return graph
    if not graph.is_explicit:
        return structured(graph, graph.runs | graph.runs.transpose())
    one_way = selected(graph, edge_lists.one_way(graph.ends, graph.num_dst))
    return extended(graph, one_way.ends.flip(0), **edge_data(one_way))


def drop_edges(graph: Graph, p: float, generator: torch.Generator | None) -> Graph:
    """`Graph.drop_edges`."""
    if not hasattr(p, "__float__"):
        raise TypeError(f"p must be a number from 0 to 1; got {p!r}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must lie between 0 and 1; got {p}")
    _ = graph.stored_edges  # raises MemoryError first if the edges do not fit into memory
    return keep_edges(graph, torch.rand(graph.num_edges, generator=generator) >= p)


def keep_edges(graph: Graph, keep: Tensor) -> Graph:
    """The edges where `keep`, bool [E], is True; `edge_ids` of the result holds their indices in `graph`."""
    edge_ids = keep.nonzero().squeeze(1).to(graph.device)
    subset = selected(graph, edge_ids)
    subset.edge_ids, subset.exchange, subset.node_ids = edge_ids, graph.exchange, graph.node_ids
    return subset
