"""Degrees: how many a node hears, and how many hear it."""

from __future__ import annotations

import torch
from torch import Tensor

from mpnn.encodings.check import not_negative
from mpnn.graph import Graph


def degrees(graph: Graph, most: int | None = None) -> Tensor:
    """How many edges arrive at each node and how many leave it; above `most`, `most` (Graphormer's centrality, Ying et
    al. 2021, eq. 5, looks a vector up for each).

    Returns:
        int64 [N, 2]: edges in, edges out, on the graph's device.

    Raises:
        ValueError: `most` is negative, or the graph has two sets of nodes.
    """
    if most is not None:
        not_negative("most", most)
    if graph.num_dst != graph.num_src:
        raise ValueError(f"degrees need one set of nodes; the graph is {graph.num_dst} x {graph.num_src}")
    leaving = torch.bincount(graph.edge_index[0], minlength=graph.num_src)
    both = torch.stack([graph.degree(), leaving], 1)
    return both if most is None else both.clamp(max=most)
