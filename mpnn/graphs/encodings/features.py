"""Degrees; roles, by which nodes with similar neighborhoods get the same number; random features, which distinguish
nodes that no other encoding can distinguish; and times."""

import numpy as np
import torch
from torch import Tensor, nn

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import as_integer, at_least, one_set


def degrees(graph: Graph, most: int | None = None) -> Tensor:
    """In-degree and out-degree of each node, clamped to at most `most`.

    Graphormer's centrality encoding (Ying et al. 2021, eq. 5) looks up a vector for each of them.

    Returns:
        int64 [N, 2]: in-degree, out-degree, on the graph's device.

    Raises:
        ValueError: if `most` is negative, or the graph has two sets of nodes.
    """
    if most is not None:
        at_least("most", most, 0)
    one_set("degrees", graph)
    out_degree = torch.bincount(graph.edge_index[0], minlength=graph.num_src)
    both = torch.stack([graph.degree(), out_degree], 1)
    return both if most is None else both.clamp(max=most)


def random_features(num_nodes: int, k: int, seed: int) -> Tensor:
    """Standard normal numbers [num_nodes, k], the same for the same arguments (Sato et al. 2021, "Random features
    strengthen graph neural networks"). Use another seed in each training step, so that the model cannot learn
    particular numbers. Torch's global random state is not changed.

    Raises:
        ValueError: if num_nodes or k is negative.
    """
    at_least("num_nodes", num_nodes, 0)
    at_least("k", k, 0)
    capacity.require(4 * num_nodes * k, f"random features of num_nodes={num_nodes} and k={k}", "use fewer")
    return torch.randn(num_nodes, k, generator=torch.Generator().manual_seed(as_integer("seed", seed)))


class TimeEncoding(nn.Module):
    """`Phi(t) = cos(w t + b)` of times or differences of times, with learned w and b (TGAT, Xu et al. 2020,
    arXiv:2002.07962, section 3.1; TGN, Rossi et al. 2020). At first, the frequencies w are 1 to 10^-9, as in the
    authors' code, and b is 0.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        capacity.require(8 * at_least("dim", dim, 1), f"an encoding of times of dim={dim}", "use fewer")
        self.frequency = nn.Parameter(torch.logspace(0, -9, dim))
        self.phase = nn.Parameter(torch.zeros(dim))

    def forward(self, t: Tensor) -> Tensor:
        """t [...], integers or floating point -> [..., dim]. Pass differences of large integers, not the integers."""
        return torch.cos(t.to(self.frequency.dtype)[..., None] * self.frequency + self.phase)


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
