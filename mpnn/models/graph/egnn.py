"""EGNN: states and positions of nodes, which rotate and move with the input."""

from torch import Tensor, nn

from mpnn import Graph, MessagePassing, ops
from mpnn.graphs import edges_into
from mpnn.models.layers.interaction import ResidualConcat
from mpnn.models.layers.molecules import vectors_of
from mpnn.models.saving import Model
from mpnn.update import EdgeUpdate
from mpnn.update.maps import Linear


class EGNN(Model):
    """E(n)-equivariant graph network (Satorras et al. 2021, arXiv:2102.09844, eq. 3 to 6).

        m_ij = f_e( h_i, h_j, |p_i - p_j|^2 )          p_i <- p_i + mean_j (p_i - p_j) f_p(m_ij)
        h_i <- h_i + f_h( h_i, sum_j m_ij )

    - topology: any, such as `graphs.radius(positions, r)` or a complete graph
    - attention: none; the message of an edge is its state
    - aggregate: sum; mean for positions
    - update: residual MLPs

    Args:
        in_dim, out_dim: widths of the features of nodes and of the result.
        dim: width of the states. layers: number of rounds.
    """

    def __init__(self, in_dim: int, out_dim: int, dim: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = Linear(in_dim, dim), Linear(dim, out_dim)
        self.layers = nn.ModuleList(EGNNLayer(dim) for _ in range(layers))

    def forward(self, x: Tensor, positions: Tensor, graph: Graph, cell: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps x [N, in_dim], positions [N, n] to [N, out_dim], and the new positions [N, n]. `cell` [n, n] is that of
        a periodic graph of `graphs.radius`, [G, n, n] those of the graphs of a batch."""
        h = self.embed(x)
        for layer in self.layers:
            h, positions = layer(h, positions, graph, cell)
        return self.head(h), positions


class EGNNLayer(nn.Module):
    """One round: messages from states and distances, then states and positions from messages."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        edges = EdgeUpdate(dim, 1, dim, nn.Sequential(nn.SiLU(), Linear(dim, dim), nn.SiLU()))
        update = ResidualConcat(dim, nn.Sequential(nn.SiLU(), Linear(dim, dim)))
        self.states = MessagePassing(None, "sum", update, edges=edges)
        last = Linear(dim, 1, bias=False)
        nn.init.xavier_uniform_(last.weight, gain=0.001)  # positions hardly move at first, as in the authors' code
        self.move = nn.Sequential(Linear(dim, dim), nn.SiLU(), last)

    def forward(self, h: Tensor, positions: Tensor, graph: Graph, cell: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h [N, dim], positions [N, n] -> the same shapes, updated."""
        vectors = vectors_of(graph, positions, cell)
        h, message = self.states(h, graph, edge_attr=vectors.square().sum(-1, keepdim=True))
        into = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        return h, positions + ops.aggregate(into, -vectors * self.move(message), "mean")
