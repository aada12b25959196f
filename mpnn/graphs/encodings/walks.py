"""Random walks: the probability that a walk returns to its start, and the proximity of two nodes over all walks."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least
from mpnn.graphs.encodings.adjacency import adjacency, inverse_or_zero

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
