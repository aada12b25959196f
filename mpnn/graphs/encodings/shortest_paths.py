"""Hop distances between all pairs of nodes, and the edges on shortest paths, as used by Graphormer's attention.

Both are matrices over all pairs, for graphs of up to a few thousand nodes, such as molecules.
"""

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least
from mpnn.graphs.encodings.adjacency import adjacency


def shortest_paths(graph: Graph, max_distance: int) -> Tensor:
    """Number of hops from j to i, as edge types for `topology.with_relation(...)` and position tables.

    Entry (i, j) is the length of a shortest path from j to i forward the edges, 0 where i = j. Lengths above
    `max_distance` are clamped to `max_distance`. Without a path from j to i, the entry is `max_distance + 1`.

    Returns:
        int64 [N, N], rows are destinations and columns sources, on the graph's device.

    Raises:
        ValueError: if max_distance is negative, or the graph has two sets of nodes.
    """
    max_distance = at_least("max_distance", max_distance, 0)
    hops = np.minimum(_hops(graph), max_distance)
    return torch.from_numpy(np.where(hops < 0, max_distance + 1, hops)).to(graph.device)


def path_edges(graph: Graph, steps: int) -> Tensor:
    """The edges on a shortest path from j to i, counted from i: entry (i, j, 0) is the last edge of the path, into i.

    Among several shortest paths, each step takes the first possible edge in the caller's order. Paths longer than
    `steps` are truncated. The entry is -1 after the end of a path, or if there is none.

    Returns:
        int64 [N, N, steps], edge numbers in the caller's order, on the graph's device.
    """
    steps = at_least("steps", steps, 0)
    capacity.require(16 * graph.num_dst**2 * steps, f"the edges of paths of steps={steps}", "take fewer steps")
    hops = _hops(graph)
    src, dst = graph.edge_index.cpu().numpy()
    n = graph.num_dst
    on_path = (hops[src] >= 0) & (hops[src] + 1 == hops[dst])  # [E, N]: edge e is the last of a shortest path from j
    edge, start = np.nonzero(on_path[::-1])
    edge = len(src) - 1 - edge
    last = np.full((n, n), -1)
    last[dst[edge], start] = edge  # the last assignment wins, which is that of the earliest edge
    out = np.full((n, n, steps), -1)
    at, start = np.broadcast_arrays(np.arange(n)[:, None], np.arange(n)[None, :])
    for step in range(steps):
        out[..., step] = np.where(at < 0, -1, last[at, start])
        at = np.where(out[..., step] < 0, -1, src[out[..., step]]) if len(src) else np.full((n, n), -1)
    return torch.from_numpy(out).to(graph.device)


def _hops(graph: Graph) -> np.ndarray:
    """int64 [N, N]: hops from j to i, -1 without a path."""
    from scipy.sparse.csgraph import dijkstra

    if graph.num_dst == 0:
        return np.zeros((0, 0), np.int64)
    forward = adjacency(graph, "a shortest path").T.tocsr()
    distance = dijkstra(forward, unweighted=True).T
    return np.where(np.isinf(distance), -1, distance).astype(np.int64)
