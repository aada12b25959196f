"""Other edges between the same nodes: turned round, added, dropped, or walked along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpnn import edges as edge_lists
from mpnn import reach
from mpnn.graph.made import edge_data, extended, renumbered, selected, structured
from mpnn.relation import Offset, flipped
from mpnn.runs import Runs

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph


def reverse(graph: Graph) -> Graph:
    """`Graph.reverse`."""
    relation = None if graph.relation is None else flipped(graph.relation)
    places = graph.places
    by_distance = relation is None or any(isinstance(one, Offset) for one in (relation, graph.relation))
    if places is None and graph.shift and not by_distance:
        places = graph.where()  # a shift tells distances alone
    turned: dict[str, Any] = {
        "num_dst": graph.num_src,
        "num_src": graph.num_dst,
        "relation": relation,
        "shift": -graph.shift if places is None else 0,
        "places": places and places[::-1],
    }
    if graph.is_explicit:
        return renumbered(graph, graph.edge_index.flip(0), **turned)
    runs = graph.runs if graph.labels is not None else graph.runs.transpose()
    return structured(graph, runs, labels=graph.labels, **turned)


def power(graph: Graph, k: int) -> Graph:
    """`Graph.power`."""
    if not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"power needs an integer k >= 1; got {k!r}")
    return graph if graph.labels is not None else structured(graph, reach.power(graph.runs, k))


def with_self_loops(graph: Graph, fill: float) -> Graph:
    """`Graph.with_self_loops`."""
    if graph.labels is not None:
        return graph
    if not graph.is_explicit:
        i = np.arange(graph.num_dst)
        return structured(graph, graph.runs | Runs.from_edges(graph.num_dst, graph.num_src, i, i))
    loops = edge_lists.nodes_without_loop(graph.edge_index, graph.num_dst)
    attr = graph.edge_attr
    new = None if attr is None else attr.new_full((len(loops), *attr.shape[1:]), fill)
    if new is not None and (new != fill).any() and fill == fill:  # of NaN, which equals nothing, there is no doubt
        raise ValueError(f"loops cannot have attributes of {fill} where edge_attr holds {new.dtype}")
    return extended(graph, torch.stack([loops, loops]), edge_attr=new)


def undirected(graph: Graph) -> Graph:
    """`Graph.undirected`."""
    if graph.labels is not None:
        return graph
    if not graph.is_explicit:
        return structured(graph, graph.runs | graph.runs.transpose())
    lent = selected(graph, edge_lists.one_way(graph.edge_index, graph.num_dst))
    return extended(graph, lent.edge_index.flip(0), **edge_data(lent))


def drop_edges(graph: Graph, p: float, generator: torch.Generator | None) -> Graph:
    """`Graph.drop_edges`."""
    if not hasattr(p, "__float__"):
        raise TypeError(f"p must be a number from 0 to 1; got {p!r}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must lie between 0 and 1; got {p}")
    _ = graph.edge_index  # first, as this refuses a graph whose edges do not fit into memory
    kept = (torch.rand(graph.num_edges, generator=generator) >= p).nonzero().squeeze(1).to(graph.device)
    fewer = selected(graph, kept)
    fewer.kept = kept
    return fewer
