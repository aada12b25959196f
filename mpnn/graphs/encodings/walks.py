"""Walks and paths: the probability that a walk returns to its start, the proximity of two nodes over all walks, hop
distances, and the edges on shortest paths. Most are matrices over all pairs of nodes, for graphs of up to a few
thousand nodes, such as molecules.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least, one_set

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_MAX_ELEMENTS = 1 << 22  # of the rows of a power in memory at a time


def random_walk(graph: Graph, steps: int) -> Tensor:
    """`diag((A D^-1)^k)` for k = 1 to `steps`: the probability of being back after k steps (Dwivedi et al. 2022,
    "Graph neural networks with learnable structural and positional representations").

    No power is stored as a whole or computed beyond half of the steps:

        diag(P^(a + b))_i = sum_j (P^a)_ij (P^b)_ji

    Returns:
        [N, steps] in torch's default dtype, on the graph's device.

    Raises:
        ValueError: if steps is negative, or the graph has two sets of nodes.
    """
    steps = at_least("steps", steps, 0)
    capacity.require(8 * graph.num_dst * steps, f"probabilities of return for steps={steps}", "take fewer steps")
    walk = _steps(graph, "a random walk").tocsr()
    back = walk.T.tocsr()
    n = graph.num_dst
    out = np.zeros((n, steps))
    rows = max(1, _MAX_ELEMENTS // max(n, 1))
    for first in range(0, n if steps else 0, rows):
        here = slice(first, first + rows)
        # rows of P^a and of the transpose of P^b
        forth_k = walk[here]
        back_k = back[here]
        out[here, 0] = walk.diagonal()[here]
        for k in range(2, steps + 1):
            if k > 2 and k % 2:
                forth_k = forth_k @ walk
            elif k > 2:
                back_k = back_k @ back
            out[here, k - 1] = (forth_k * back_k).sum(1)
    return torch.from_numpy(out).to(graph.device, torch.get_default_dtype())


def pagerank(graph: Graph, alpha: float = 0.15) -> Tensor:
    """`alpha (I - (1 - alpha) A D^-1)^-1`: the intimacy of Graph-BERT (Zhang et al. 2020).

    Entry (i, j) is the probability that a walk from j, which stops before each step with probability alpha, stops at i.
    It is computed by one sparse factorization.

    Returns:
        [N, N] in torch's default dtype, on the graph's device.

    Raises:
        ValueError: if alpha is not in (0, 1], or the graph has two sets of nodes.
    """
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import splu

    if isinstance(alpha, (bool, str)) or not hasattr(alpha, "__float__"):
        raise TypeError(f"alpha must be a number in (0, 1]; got {alpha!r}")
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha must lie in (0, 1]; got {alpha}")
    n = graph.num_dst
    walk = _steps(graph, "PageRank")
    solution = alpha * np.eye(n)
    if n:
        system = eye_array(n) - (1 - alpha) * walk
        solution = splu(system.T.tocsc()).solve(solution)
    return torch.from_numpy(np.ascontiguousarray(solution.T)).to(graph.device, torch.get_default_dtype())


def _steps(graph: Graph, what: str) -> "csr_array":
    """`A D^-1`: entry (i, j) is the probability of a step from j to i. A walk leaves a node along one of its outgoing
    edges, all with equal probability, and ends at a node without them. `what` is as of `adjacency`."""
    edges = adjacency(graph, what)
    return edges * inverse_or_zero(edges.sum(0))[None, :]


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


def adjacency(graph: Graph, what: str) -> "csr_array":
    """[N, N] in float64: entry (i, j) is the number of edges from j to i.

    Raises:
        ValueError: if the numbers of sources and destinations differ; the message begins with `what`.
    """
    from scipy.sparse import csr_array

    one_set(what, graph)
    src, dst = graph.edge_index.cpu().numpy()
    return csr_array((np.ones(len(src)), (dst, src)), shape=(graph.num_dst, graph.num_src))


def inverse_or_zero(x: np.ndarray) -> np.ndarray:
    """`1 / x`, and 0 where x is 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)
