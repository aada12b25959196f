"""Personalised PageRank: how close two nodes are, all paths between them taken together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpnn.encodings.adjacency import adjacency, inverse_or_zero
from mpnn.graph import Graph


def pagerank(graph: Graph, alpha: float = 0.15, nodes: Tensor | None = None) -> Tensor:
    """Rows of `alpha (I - (1 - alpha) A D^-1)^-1`: the intimacy of Graph-BERT (Zhang et al. 2020).

    Entry (i, j) is the probability that a walk which begins at j, and stops before each step with probability alpha,
    stops at i. Found by one sparse factorisation.

    Args:
        nodes: which rows, integers; default: all of them, in order.

    Returns:
        [len(nodes), N] in torch's default dtype, on the graph's device.

    Raises:
        ValueError: alpha does not lie in (0, 1], `nodes` are not such integers, or the graph has two sets of nodes.
    """
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import splu

    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha must lie in (0, 1]; got {alpha}")
    n = graph.num_dst
    walk = adjacency(graph, "PageRank")
    rows = np.arange(n) if nodes is None else _checked(nodes, n)
    wanted = np.zeros((n, len(rows)))
    wanted[rows, np.arange(len(rows))] = alpha
    if n:
        system = eye_array(n) - (1 - alpha) * (walk * inverse_or_zero(walk.sum(0))[None, :])
        wanted = splu(system.T.tocsc()).solve(wanted)
    return torch.from_numpy(np.ascontiguousarray(wanted.T)).to(graph.device, torch.get_default_dtype())


def _checked(nodes: Tensor, n: int) -> np.ndarray:
    rows = np.asarray(nodes.cpu())
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or ((rows < 0) | (rows >= n)).any():
        raise ValueError(f"nodes must be integers [rows] from 0 to {n - 1}; got {nodes}")
    return rows
