"""VAIN: agents attend to those that are like them, at the price of one encoding each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import Near
from mpnn.graph import Graph
from mpnn.graphs import complete, identity
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import MLP, Update

OTHERS = complete() - identity()


class VAIN(Model):
    """Vertex attention interaction network (Hoshen 2017, section 3 and figure 1): everybody hears all others, and not
    itself.

        e_i || a_i = E_c(x_i),   w_ij = softmax_j( -|a_i - a_j|^2 ),   P_i = sum_j w_ij e_j
        out_i = D( P_i || E_s(x_i) )

    The MLPs E_c, E_s and D look at single agents, so N agents cost N encodings, and not N^2 as those of interaction
    networks, which encode pairs.

    Args:
        in_dim: width of the features. out_dim: of what is predicted of each agent. dim: of what an agent says.
        places: width of the vectors a that attention goes by. normalized: softmax as above; else w_ij is
            exp(-|a_i - a_j|^2), for interactions that add up as forces do.
        graph: who hears whom.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dim: int = 64,
        places: int = 10,
        *,
        normalized: bool = True,
        graph: Topology | Graph = OTHERS,
    ) -> None:
        super().__init__()
        near = Near(MLP(in_dim, dim + places, dim), places, normalized=normalized)
        self.layer = MessagePassing(graph, "sum", Decode(MLP(in_dim, dim, dim), MLP(2 * dim, out_dim, dim)), near)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """x [..., N, in_dim] -> [..., N, out_dim]."""
        return self.layer(x, graph)

    def loss(self, x: Tensor, target: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """Mean squared error of what is predicted: x [..., N, in_dim], target [..., N, out_dim]."""
        return F.mse_loss(self(x, graph), target)


class Decode(Update):
    """`y = decode(m || own(x))`."""

    def __init__(self, own: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.own, self.decode = own, decode

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.decode(torch.cat([message, self.own(x)], -1))
