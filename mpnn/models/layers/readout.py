"""Gated readout of nodes or of whole graphs."""

import torch
from torch import Tensor, nn

from mpnn import Graph, ops
from mpnn.maps import Linear


class GatedReadout(nn.Module):
    """Gated sum over the nodes of each graph (Li et al. 2016, eq. 7; Gilmer et al. 2017, eq. 4):

        r_i = sigmoid( W_g [h_i || x_i] ) * ( W_v [h_i || x_i] ),   r_G = sum of r_i over the nodes i of G

    x are the input features of the nodes, h their final states.

    Args:
        dim: width of h.
        in_dim: width of x.
        out_dim: width of the result.
    """

    def __init__(self, dim: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.gate, self.vote = (Linear(dim + in_dim, out_dim) for _ in range(2))

    def forward(self, h: Tensor, x: Tensor, pool: Graph | None = None) -> Tensor:
        """Returns the readout r.

        Args:
            h: [..., N, dim].
            x: [..., N, in_dim].
            pool: graph with N sources and G destinations. Destination g receives from the nodes of graph g.

        Returns:
            r_i [..., N, out_dim], or r_G [..., G, out_dim] with `pool`.
        """
        features = torch.cat([h, x], -1)
        votes = self.gate(features).sigmoid() * self.vote(features)
        return votes if pool is None else ops.aggregate(pool, votes, "sum")
