"""Random walks: the probability that a random walk returns to its start."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpnn.encodings.adjacency import adjacency, inverse_or_zero
from mpnn.graph import Graph
from mpnn.graph.arguments import not_negative

_MAX_ELEMENTS = 1 << 22  # of the rows of a power in memory at a time


def random_walk(graph: Graph, steps: int) -> Tensor:
    """`diag((A D^-1)^k)` for k = 1 to `steps`: the probability of being back after k steps (Dwivedi et al. 2022,
    "Graph neural networks with learnable structural and positional representations").

    A walk leaves a node along one of its outgoing edges, all with equal probability. A walk at a node without outgoing
    edges ends. No power is stored as a whole or computed beyond half of the steps:

        diag(P^(a + b))_i = sum_j (P^a)_ij (P^b)_ji

    Returns:
        [N, steps] in torch's default dtype, on the graph's device.

    Raises:
        ValueError: if steps is negative, or the graph has two sets of nodes.
    """
    not_negative("steps", steps)
    walk = adjacency(graph, "a random walk")
    walk = (walk * inverse_or_zero(walk.sum(0))[None, :]).tocsr()
    back = walk.T.tocsr()
    n = graph.num_dst
    out = np.zeros((n, steps))
    rows = max(1, _MAX_ELEMENTS // max(n, 1))
    for first in range(0, n if steps else 0, rows):
        here = slice(first, first + rows)
        forth_k, back_k = walk[here], back[here]  # rows of P^a and of the transpose of P^b
        out[here, 0] = walk.diagonal()[here]
        for k in range(2, steps + 1):
            if k > 2 and k % 2:
                forth_k = forth_k @ walk
            elif k > 2:
                back_k = back_k @ back
            out[here, k - 1] = (forth_k * back_k).sum(1)
    return torch.from_numpy(out).to(graph.device, torch.get_default_dtype())
