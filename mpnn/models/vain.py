"""VAIN: agents attend to those that are like them, at the price of one encoding each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.gaussian import Near
from mpnn.graph import Graph
from mpnn.graphs import complete, identity
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import MLP, Update

OTHERS = complete() - identity()


class VAIN(Model):
    """Vertex attention interaction network (Hoshen 2017, eq. 3-6): everybody hears all others, and not itself.

        P_i = sum_j softmax_j( -|a(x_i) - a(x_j)|^2 ) e(x_j),     out_i = d( P_i || s(x_i) )

    The functions e, a, s and d are MLPs of single agents, so N agents cost N encodings, and not N^2 as those of
    interaction networks, which encode pairs.

    Args:
        in_dim: width of the features. out_dim: of what is predicted of each agent. dim: of what an agent says.
        place_dim: of the vectors a that attention goes by. graph: who hears whom.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dim: int = 64,
        place_dim: int = 10,
        *,
        graph: Topology | Graph = OTHERS,
    ) -> None:
        super().__init__()
        listen = Near(MLP(in_dim, place_dim, dim), MLP(in_dim, dim, dim))
        self.layer = MessagePassing(graph, "sum", Decode(MLP(in_dim, dim, dim), MLP(2 * dim, out_dim, dim)), listen)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """x [..., N, in_dim] -> [..., N, out_dim]."""
        return self.layer(x, graph)

    def loss(self, x: Tensor, target: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """Mean squared error of what is predicted: x [..., N, in_dim], target [..., N, out_dim]."""
        return F.mse_loss(self(x, graph), target)


class Decode(Update):
    """`y = d(m || s(x))`."""

    def __init__(self, own: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.own, self.decode = own, decode

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.decode(torch.cat([message, self.own(x)], -1))
