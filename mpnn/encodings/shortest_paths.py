"""Hop distances between every two nodes, and the edges on the way: what Graphormer's attention knows of the graph.

Both are matrices over all pairs, for graphs of up to some thousand nodes, such as molecules.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpnn.encodings.adjacency import adjacency
from mpnn.encodings.check import not_negative
from mpnn.graph import Graph


def shortest_paths(graph: Graph, max_distance: int) -> Tensor:
    """How many hops lead from j to i, as classes that `topology.related(...)` and position tables take.

    Entry (i, j) is the length of a shortest path from j to i along the edges, 0 where i = j; lengths above
    `max_distance` count as `max_distance`; where no path leads from j to i it is `max_distance + 1`.

    Returns:
        int64 [N, N], destinations down and sources across, on the graph's device.

    Raises:
        ValueError: max_distance is negative, or the graph has two sets of nodes.
    """
    not_negative("max_distance", max_distance)
    hops = np.minimum(_hops(graph), max_distance)
    return torch.from_numpy(np.where(hops < 0, max_distance + 1, hops)).to(graph.device)


def path_edges(graph: Graph, steps: int) -> Tensor:
    """The edges on a shortest path from j to i, counted from i: entry (i, j, 0) is the edge that arrives at i.

    Where there are several shortest paths, at each step the first of the edges that belong to one is taken, in the
    caller's order. Of paths longer than `steps`, the rest is left out; where a path has ended, or there is none, the
    entry is -1.

    Returns:
        int64 [N, N, steps], numbers of edges in the caller's order, on the graph's device.
    """
    not_negative("steps", steps)
    hops = _hops(graph)
    src, dst = graph.edge_index.cpu().numpy()
    n = graph.num_dst
    on_path = (hops[src] >= 0) & (hops[src] + 1 == hops[dst])  # [E, N]: edge e is the last of a shortest path from j
    edge, start = np.nonzero(on_path[::-1])
    edge = len(src) - 1 - edge
    last = np.full((n, n), -1)
    last[dst[edge], start] = edge  # later assignments count, which are those of earlier edges
    out = np.full((n, n, steps), -1)
    at, start = np.broadcast_arrays(np.arange(n)[:, None], np.arange(n)[None, :])
    for step in range(steps):
        out[..., step] = np.where(at < 0, -1, last[at, start])
        at = np.where(out[..., step] < 0, -1, src[out[..., step]]) if len(src) else np.full((n, n), -1)
    return torch.from_numpy(out).to(graph.device)


def _hops(graph: Graph) -> np.ndarray:
    """int64 [N, N]: hops from j to i, -1 where no path leads there."""
    from scipy.sparse.csgraph import dijkstra

    if graph.num_dst == 0:
        return np.zeros((0, 0), np.int64)
    along = adjacency(graph, "a shortest path").T.tocsr()
    distance = dijkstra(along, unweighted=True).T
    return np.where(np.isinf(distance), -1, distance).astype(np.int64)
