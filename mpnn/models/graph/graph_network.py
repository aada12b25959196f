"""Graph network with edge states, which are updated from both endpoints of the edge."""

from torch import Tensor, nn

from mpnn import Graph, MessagePassing, validation
from mpnn.attention import Typed
from mpnn.graphs import edges_into, ends_of_edges
from mpnn.maps import Linear
from mpnn.models.saving import Model
from mpnn.update import Concat, SelfConnection


class GraphNetwork(Model):
    """Graph network with node and edge states (Battaglia et al. 2018, section 3.2, without global features; Gilmer et
    al. 2017, section 2, with hidden edge states). Each layer updates the edges, then the nodes.

        e_ij <- e_ij + f( W_1 h_j + W_2 h_i + W_3 e_ij ),     h_i <- h_i + g( [h_i || sum_j e_ij] )

    Both updates are message passing over graphs whose nodes include the edges: in `graphs.ends_of_edges` each edge
    receives from its two endpoints, in `graphs.edges_into` each node receives from its incoming edges.

    Args:
        in_dim: width of the nodes' features.
        edge_dim: width of the edges' features.
        classes: width of the nodes' logits.
        edge_classes: width of the edges' logits.
        dim: width of the layers.
        layers: number of layers.
    """

    def __init__(
        self, in_dim: int, edge_dim: int, classes: int, edge_classes: int = 1, dim: int = 64, layers: int = 3
    ) -> None:
        super().__init__()
        self.embed, self.embed_edge = Linear(in_dim, dim), Linear(edge_dim, dim)
        self.layers = nn.ModuleList(GraphNetworkLayer(dim) for _ in range(layers))
        self.head, self.edge_head = Linear(dim, classes), Linear(dim, edge_classes)

    def forward(self, x: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [..., N, in_dim], edge_attr [..., E, edge_dim] in the caller's edge order (default: the graph's) -> logits
        of the nodes [..., N, classes] and of the edges [..., E, edge_classes]."""
        validation.tensor("x", x)
        validation.fits("GraphNetwork", "x", x, validation.takes(self.embed))
        edge_attr = graph.edge_attr if edge_attr is None else edge_attr
        if edge_attr is None:
            raise ValueError("a graph network needs edge features: pass edge_attr, or a graph that has edge_attr")
        h, e = self.embed(x), self.embed_edge(edge_attr)
        e = e.expand(*h.shape[:-2], *e.shape[-2:])
        for layer in self.layers:
            h, e = layer(h, e, graph)
        return self.head(h), self.edge_head(e)


class GraphNetworkLayer(nn.Module):
    """Updates the edges from their endpoints, then the nodes from their incoming edges."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        tail = nn.Sequential(nn.ReLU(), Linear(dim, dim))
        self.edges = MessagePassing(None, "sum", SelfConnection(dim, dim, tail), Typed(dim, dim, 2, bias=False))
        self.nodes = MessagePassing(None, "sum", ConcatMLP(dim))

    def forward(self, x: Tensor, edge: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """x [..., N, dim], edge [..., E, dim] -> the same shapes, updated."""
        edge = edge + self.edges(edge, graph.derive(ends_of_edges, num_dst=graph.num_edges), source=x)
        into = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        return x + self.nodes(x, into, source=edge), edge


class ConcatMLP(Concat):
    """`y = V relu( W [x || m] )`."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)
        self.out = Linear(dim, dim)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.out(super().forward(x, message).relu())
