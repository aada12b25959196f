"""MeshGraphNets: simulation on a mesh, whose nodes and edges have states."""

from torch import Tensor, nn

from mpnn import Graph, Topology
from mpnn.models.layers.interaction import Processor, interaction, mlp


class MeshGraphNet(Processor):
    """MeshGraphNets (Pfaff et al. 2021, arXiv:2010.03409, section 3.2): encode, process, decode.

        e_ij <- e_ij + f( W [e_ij || h_i || h_j] )          h_i <- h_i + g( V [h_i || sum_j e_ij] )

    - topology: the mesh, an edge for each direction
    - attention: none; the message of an edge is its state
    - aggregate: sum
    - update: residual MLPs with a layer norm, of edges and of nodes

    Args:
        in_dim, edge_dim, out_dim: widths of the features of nodes and of edges (the vector between its ends and its
            length), and of the result, such as an acceleration.
        dim: width of all states. layers: number of rounds. hidden: number of hidden layers of each MLP.
        graph: the mesh of every layer; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        edge_dim: int,
        out_dim: int,
        dim: int = 128,
        layers: int = 15,
        *,
        hidden: int = 2,
        graph: Topology | Graph | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.embed_edge = (mlp(width, dim, hidden=hidden) for width in (in_dim, edge_dim))
        self.layers = nn.ModuleList(interaction(dim, hidden, graph=graph) for _ in range(layers))
        self.head = mlp(dim, dim, out_dim, hidden)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, edge_attr: Tensor | None = None) -> Tensor:
        """Maps x [..., N, in_dim], edge_attr [..., E, edge_dim] in the caller's order (default: the graph's) to [...,
        N, out_dim]."""
        return self.head(self.states(x, graph, edge_attr)[0])
