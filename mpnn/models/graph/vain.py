"""VAIN: agents attend to similar agents, with one encoding per agent instead of one per pair."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Near
from mpnn.graphs import complete, identity
from mpnn.models.saving import Model
from mpnn.update import MLP, Update

OTHERS = complete() - identity()


class VAIN(Model):
    """Vertex attention interaction network (Hoshen 2017, section 3 and figure 1). By default each agent attends to all
    other agents, and not to itself.

        e_i || a_i = E_c(x_i),   w_ij = softmax_j( -|a_i - a_j|^2 ),   P_i = sum_j w_ij e_j
        out_i = D( P_i || E_s(x_i) )

    The MLPs E_c, E_s and D take single agents, so N agents need N encodings. Interaction networks encode pairs and need
    N^2.

    Args:
        in_dim: width of the input features.
        out_dim: width of the prediction for each agent.
        dim: width of the messages e.
        vector_dim: width of the attention vectors a.
        normalized: whether w_ij is the softmax above. Otherwise w_ij = exp(-|a_i - a_j|^2), for additive interactions
            such as forces.
        graph: topology or graph of the layer.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dim: int = 64,
        vector_dim: int = 10,
        *,
        normalized: bool = True,
        graph: Topology | Graph = OTHERS,
    ) -> None:
        super().__init__()
        near = Near(MLP(in_dim, dim + vector_dim, dim), vector_dim, normalized=normalized)
        self.layer = MessagePassing(graph, "sum", Decode(MLP(in_dim, dim, dim), MLP(2 * dim, out_dim, dim)), near)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """Maps x [..., N, in_dim] to [..., N, out_dim]."""
        return self.layer(x, graph)

    def loss(self, x: Tensor, target: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """Returns the mean squared error of the predictions: x [..., N, in_dim], target [..., N, out_dim]."""
        return F.mse_loss(self(x, graph), target)


class Decode(Update):
    """`y = decode(m || own(x))`."""

    def __init__(self, own: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.decode = decode

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.decode(torch.cat([message, self.own(x)], -1))
