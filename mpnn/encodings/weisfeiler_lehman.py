"""Weisfeiler-Lehman roles: nodes whose surroundings look alike get the same number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpnn.encodings.check import not_negative
from mpnn.graph import Graph


def weisfeiler_lehman(graph: Graph, rounds: int, labels: Tensor | None = None) -> Tensor:
    """Colour refinement (Weisfeiler & Lehman 1968): in each round a node's role becomes the number of

        (how many it hears, its role, the sorted roles of those whom it hears)

    among all such tuples, in their order. The order is of the tuples and not of the nodes: renumbering the nodes
    renumbers the result, nodes of different graphs of a batch that look alike have equal roles, and no two that differ
    share one (tuples are compared, not hashed). Roles of different calls cannot be compared: batch the graphs.

    Args:
        rounds: how far a node sees. labels: integers [N] to begin with; default: all alike.

    Returns:
        int64 [N], numbers from 0 upward without gaps, on the graph's device.

    Raises:
        ValueError: rounds is negative, the graph has two sets of nodes, or labels do not match its nodes.
        TypeError: labels are not integers.
    """
    not_negative("rounds", rounds)
    n = graph.num_dst
    if n != graph.num_src:
        raise ValueError(f"roles need one set of nodes; the graph is {n} x {graph.num_src}")
    role = _ranked(np.zeros(n, np.int64) if labels is None else _checked(labels, n))
    ptr, col = graph.csr.ptr.cpu().numpy(), graph.csr.col.cpu().numpy()
    degree = np.diff(ptr)
    row = np.repeat(np.arange(n), degree)
    alike = [np.flatnonzero(degree == d) for d in np.unique(degree)]  # a tuple's length is its node's degree
    for _ in range(rounds):
        heard = role[col]
        heard = heard[np.lexsort((heard, row))]
        new, known = np.empty_like(role), 0
        for nodes in alike:
            places = ptr[nodes, None] + np.arange(degree[nodes[0]])
            tuples = np.concatenate([role[nodes, None], heard[places]], 1)
            distinct, rank = np.unique(tuples, axis=0, return_inverse=True)
            new[nodes] = known + rank.reshape(-1)
            known += len(distinct)
        role = new
    return torch.from_numpy(role).to(graph.device)


def _ranked(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _checked(labels: Tensor, n: int) -> np.ndarray:
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers; got {labels.dtype}")
    if labels.shape != (n,):
        raise ValueError(f"labels must be one integer for each of {n} nodes; got shape {list(labels.shape)}")
    return labels.cpu().numpy()
