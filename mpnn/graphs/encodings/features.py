"""Degrees; random features, which distinguish nodes that no other encoding can distinguish; and times."""

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
