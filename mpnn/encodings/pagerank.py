"""Personalised PageRank: the proximity of two nodes over all paths between them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpnn.encodings.adjacency import adjacency, inverse_or_zero
from mpnn.graph import Graph


def pagerank(graph: Graph, alpha: float = 0.15, nodes: Tensor | None = None) -> Tensor:
    """Rows of `alpha (I - (1 - alpha) A D^-1)^-1`: the intimacy of Graph-BERT (Zhang et al. 2020).

    Entry (i, j) is the probability that a walk from j, which stops before each step with probability alpha, stops at i.
    It is computed by one sparse factorization.

    Args:
        nodes: the rows to return, integers; default: all rows, in order.

    Returns:
        [len(nodes), N] in torch's default dtype, on the graph's device.

    Raises:
        ValueError: if alpha is not in (0, 1], `nodes` are not valid node numbers, or the graph has two sets of nodes.
    """
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import splu

    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha must lie in (0, 1]; got {alpha}")
    n = graph.num_dst
    walk = adjacency(graph, "PageRank")
    rows = np.arange(n) if nodes is None else _validate_nodes(nodes, n)
    solution = np.zeros((n, len(rows)))
    solution[rows, np.arange(len(rows))] = alpha
    if n:
        system = eye_array(n) - (1 - alpha) * (walk * inverse_or_zero(walk.sum(0))[None, :])
        solution = splu(system.T.tocsc()).solve(solution)
    return torch.from_numpy(np.ascontiguousarray(solution.T)).to(graph.device, torch.get_default_dtype())


def _validate_nodes(nodes: Tensor, n: int) -> np.ndarray:
    rows = np.asarray(nodes.cpu())
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or ((rows < 0) | (rows >= n)).any():
        raise ValueError(f"nodes must be integers [rows] from 0 to {n - 1}; got {nodes}")
    return rows
