"""Incidence graphs: nodes receive from their edges, and edges receive from their two ends.

They express messages that are a function of both ends and the edge, and edge features that are updated in each round.
"""

from __future__ import annotations

import torch

from mpnn.graph import Graph


def edges_into(graph: Graph) -> Graph:
    """Each node receives from its incoming edges. Sources are the edges of `graph`, in the order of `edge_index`.

    ::

        edges_into(from_edges([[0, 0, 1], [1, 2, 2]]))   ...
                                                         #..
                                                         .##
    """
    dst = graph.edge_index[1]
    edges = torch.stack([torch.arange(graph.num_edges, device=graph.device), dst])
    return Graph.from_edges(edges, graph.num_dst, graph.num_edges, name="edges into nodes")


def ends_of_edges(graph: Graph) -> Graph:
    """Each edge receives from its source, with edge type 0, and from its destination, with edge type 1.

    ::

        ends_of_edges(from_edges([[0, 0, 1], [1, 2, 2]]))   ##.
                                                            #.#
                                                            .##

    Raises:
        ValueError: if the graph has two sets of nodes.
    """
    if graph.num_dst != graph.num_src:
        raise ValueError(
            f"ends_of_edges needs one set of nodes; the graph has {graph.num_dst} destinations and {graph.num_src} "
            "sources"
        )
    edge = torch.arange(graph.num_edges, device=graph.device)
    edges = torch.cat([torch.stack([end, edge]) for end in graph.edge_index], 1)
    which_end = torch.arange(2, device=graph.device).repeat_interleave(graph.num_edges)
    return Graph.from_edges(edges, graph.num_edges, graph.num_src, edge_type=which_end, name="ends of edges")
