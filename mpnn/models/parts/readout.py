"""How a graph network says something of nodes, or of whole graphs: every node votes, as loud as it thinks it should."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn import ops
from mpnn.graph import Graph


class GatedReadout(nn.Module):
    """What the nodes of each graph say together (Li et al. 2016, eq. 7; Gilmer et al. 2017, eq. 4), x being what a node
    began with and h what it knows now:

        r_i = sigmoid( W_g [h_i || x_i] ) * ( W_v [h_i || x_i] ),   r_G = sum of r_i over the nodes i of G
    """

    def __init__(self, dim: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.gate, self.vote = (nn.Linear(dim + in_dim, out_dim) for _ in range(2))

    def forward(self, h: Tensor, x: Tensor, pool: Graph | None = None) -> Tensor:
        """[..., N, out_dim] of h [..., N, dim] and x [..., N, in_dim]; or [..., G, out_dim] with `pool`, a graph of N
        sources and G destinations in which each destination hears the nodes of one graph."""
        both = torch.cat([h, x], -1)
        said = self.gate(both).sigmoid() * self.vote(both)
        return said if pool is None else ops.aggregate(pool, said, "sum")
