"""Graph network with edge activations: edges know something too, and learn from both their ends."""

from __future__ import annotations

from torch import Tensor, nn

from mpnn import check
from mpnn.attention import Typed
from mpnn.graph import Graph
from mpnn.graphs import edges_into, ends_of_edges
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.update import Concat, SelfConnection


class GraphNetwork(Model):
    """Rounds in which edges hear their ends, then nodes hear their edges (Battaglia et al. 2018, section 3.2 without
    global features; Gilmer et al. 2017, section 2, where edges have hidden states).

        e_ij <- e_ij + f( W_1 h_j + W_2 h_i + W_3 e_ij ),     h_i <- h_i + g( [h_i || sum_j e_ij] )

    Edges are nodes here: of the graph in which each hears two others (`graphs.ends_of_edges`), and of the one in which
    each is heard by one (`graphs.edges_into`).

    Args:
        in_dim: width of the nodes' features. edge_dim: of the edges'. classes, edge_classes: of what is said of each
            node and of each edge. dim: of the layers. layers: their number.
    """

    def __init__(
        self, in_dim: int, edge_dim: int, classes: int, edge_classes: int = 1, dim: int = 64, layers: int = 3
    ) -> None:
        super().__init__()
        self.embed, self.embed_edge = nn.Linear(in_dim, dim), nn.Linear(edge_dim, dim)
        self.layers = nn.ModuleList(GraphNetworkLayer(dim) for _ in range(layers))
        self.head, self.edge_head = nn.Linear(dim, classes), nn.Linear(dim, edge_classes)

    def forward(self, x: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [..., N, in_dim], edge_attr [..., E, edge_dim] in the caller's edge order (default: the graph's) ->
        (of nodes [..., N, classes], of edges [..., E, edge_classes])."""
        check.tensor("x", x)
        check.fits("GraphNetwork", "x", x, check.takes(self.embed))
        edge_attr = graph.edge_attr if edge_attr is None else edge_attr
        if edge_attr is None:
            raise ValueError("edges start from their features: the graph or the call must give edge_attr")
        h, e = self.embed(x), self.embed_edge(edge_attr)
        e = e.expand(*h.shape[:-2], *e.shape[-2:])
        for layer in self.layers:
            h, e = layer(h, e, graph)
        return self.head(h), self.edge_head(e)


class GraphNetworkLayer(nn.Module):
    """One round over edges, one over nodes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        tail = nn.Sequential(nn.ReLU(), nn.Linear(dim, dim))
        self.edges = MessagePassing(None, "sum", SelfConnection(dim, dim, tail), Typed(dim, dim, 2, bias=False))
        self.nodes = MessagePassing(None, "sum", ConcatMLP(dim))

    def forward(self, x: Tensor, edge: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """x [..., N, dim] and edge [..., E, dim], both as they are after the round."""
        edge = edge + self.edges(edge, graph.derived(ends_of_edges, num_dst=graph.num_edges), source=x)
        into = graph.derived(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        return x + self.nodes(x, into, source=edge), edge


class ConcatMLP(Concat):
    """`y = V relu( W [x || m] )`."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.out(super().forward(x, message).relu())
