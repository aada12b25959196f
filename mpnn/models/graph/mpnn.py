"""MPNN with an edge network: a matrix computed from the features of an edge transforms its message."""

from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import EdgeMessage
from mpnn.models.layers.readout import GatedReadout
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import GRU, MLP
from mpnn.update.maps import Linear


class MPNN(Model):
    """Neural message passing for molecules (Gilmer et al. 2017, section 5). All rounds share one layer.

        h_i <- GRU( input = sum_j A(e_ij) h_j,  hidden = h_i ),   A(e) = MLP(e), reshaped to a matrix

    Args:
        in_dim: width of the input features.
        edge_dim: width of the edge features.
        classes: width of the output.
        dim: width of the node states.
        rounds: number of message passing rounds.
        graph: topology or graph of every layer; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        edge_dim: int,
        classes: int,
        dim: int = 64,
        rounds: int = 3,
        *,
        graph: Topology | Graph | None = None,
    ) -> None:
        super().__init__()
        self.rounds = rounds
        self.embed = nn.Sequential(Linear(in_dim, dim), nn.ReLU())
        message = EdgeNetwork(MLP(edge_dim, dim * dim, hidden=2 * dim), dim, dim)
        self.layer = MessagePassing(graph, "sum", GRU(dim), EdgeMessage(message))
        self.readout = GatedReadout(dim, in_dim, classes)

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        edge_attr: Tensor | None = None,
        pool: Graph | None = None,
    ) -> Tensor:
        """Maps x [..., N, in_dim], edge_attr [E, edge_dim] (default: the graph's) to [..., N, classes], or [..., G,
        classes] with `pool` (see `GatedReadout`)."""
        h = self.embed(x)
        for _ in range(self.rounds):
            h = self.layer(h, graph, edge_attr=edge_attr)
        return self.readout(h, x, pool)


class EdgeNetwork(nn.Module):
    """Messages `A(e_ij) h_j`. `network` returns the entries of A^T, an in_dim x out_dim matrix in row-major order."""

    def __init__(self, network: nn.Module, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.network = network
        self.in_dim = in_dim
        self.out_dim = out_dim

    def forward(self, dst: Tensor, src: Tensor, edge_attr: Tensor | None) -> Tensor:
        features = validation.edge_features("an edge network", edge_attr)
        matrices = self.network(features).unflatten(-1, (self.in_dim, self.out_dim))
        return (src.unsqueeze(-2) @ matrices).squeeze(-2)
