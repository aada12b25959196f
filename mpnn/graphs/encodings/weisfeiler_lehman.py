"""Weisfeiler-Lehman roles: nodes with similar neighborhoods get the same number."""

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least, one_set


def weisfeiler_lehman(graph: Graph, rounds: int, labels: Tensor | None = None) -> Tensor:
    """Color refinement (Weisfeiler & Lehman 1968): in each round the new role of a node is the rank of the tuple

        (in-degree, role, sorted roles of the in-neighbors)

    among the sorted distinct tuples of all nodes. The result does not depend on the numbering of nodes. Nodes of
    different graphs of a batch have equal roles if and only if their tuples are equal (tuples are compared, not
    hashed). Roles of different calls are not comparable: batch the graphs.

    Args:
        rounds: number of rounds, the radius of the neighborhood. labels: initial integers [N]; default: all equal.

    Returns:
        int64 [N], numbers from 0 upward without gaps, on the graph's device.

    Raises:
        ValueError: if rounds is negative, the graph has two sets of nodes, or labels do not match its nodes.
        TypeError: if labels are not integers.
    """
    at_least("rounds", rounds, 0)
    one_set("roles", graph)
    n = graph.num_dst
    role = _rank(np.zeros(n, np.int64) if labels is None else _validate_labels(labels, n))
    ptr, col = graph.csr.ptr.cpu().numpy(), graph.csr.col.cpu().numpy()
    degree = np.diff(ptr)
    row = np.repeat(np.arange(n), degree)
    by_degree = [np.flatnonzero(degree == d) for d in np.unique(degree)]  # the length of a tuple depends on the degree
    for _ in range(rounds):
        neighbor_roles = role[col]
        neighbor_roles = neighbor_roles[np.lexsort((neighbor_roles, row))]
        new = np.empty_like(role)
        num_roles = 0
        for nodes in by_degree:
            columns = ptr[nodes, None] + np.arange(degree[nodes[0]])
            tuples = np.concatenate([role[nodes, None], neighbor_roles[columns]], 1)
            distinct, rank = np.unique(tuples, axis=0, return_inverse=True)
            new[nodes] = num_roles + rank.reshape(-1)
            num_roles += len(distinct)
        if np.array_equal(new, role):  # further rounds find the same roles
            break
        role = new
    return torch.from_numpy(role).to(graph.device)


def _rank(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _validate_labels(labels: Tensor, n: int) -> np.ndarray:
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers; got {labels.dtype}")
    if labels.shape != (n,):
        raise ValueError(f"labels must be one integer for each of {n} nodes; got shape {list(labels.shape)}")
    return labels.cpu().numpy()
