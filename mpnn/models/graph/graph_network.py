"""Graph networks with states of edges, which are updated from both endpoints of the edge, and of whole graphs."""

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, ops
from mpnn.graphs import edges_into
from mpnn.models.layers.interaction import Processor, interaction
from mpnn.models.layers.readout import pooled
from mpnn.update import MLP, Concat, EdgeUpdate
from mpnn.update.maps import Linear


class GraphNetwork(Processor):
    """Graph network with node and edge states (Battaglia et al. 2018, section 3.2, without global features; Gilmer et
    al. 2017, section 2, with hidden edge states). Each layer updates the edges, then the nodes.

        e_ij <- e_ij + f( W_1 h_j + W_2 h_i + W_3 e_ij ),     h_i <- h_i + g( [h_i || sum_j e_ij] )

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
        self.layers = nn.ModuleList(interaction(dim, norm=False) for _ in range(layers))
        self.head, self.edge_head = Linear(dim, classes), Linear(dim, edge_classes)

    def forward(self, x: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps x [..., N, in_dim], edge_attr [..., E, edge_dim] in the caller's edge order (default: the graph's) to
        logits of the nodes [..., N, classes] and of the edges [..., E, edge_classes]."""
        h, e = self.states(x, graph, edge_attr)
        return self.head(h), self.edge_head(e)


class GraphBlock(nn.Module):
    """The full block of graph networks (Battaglia et al. 2018, algorithm 1), for a batch of graphs, each
    with global features u.

        e_ij <- f_e( [e_ij || x_i || x_j || u] )     x_i <- f_v( [x_i || u || sum_j e_ij] )
        u <- f_u( [u || mean_i x_i || mean_ij e_ij] )

    f_e, f_v and f_u are MLPs with one hidden layer.

    Args:
        dim, edge_dim, global_dim: widths of the features of nodes, edges and graphs.
        hidden: width of the hidden layers; default dim.
    """

    def __init__(self, dim: int, edge_dim: int, global_dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = dim if hidden is None else hidden
        rest = nn.Sequential(nn.ReLU(), Linear(hidden, edge_dim))
        edges = EdgeUpdate(dim + global_dim, edge_dim, hidden, rest, src_dim=dim)
        self.nodes = MessagePassing(None, "sum", Concat(dim + global_dim, hidden, edge_dim), edges=edges)
        self.rest_of_nodes = nn.Sequential(nn.ReLU(), Linear(hidden, dim))
        self.globals = MLP(global_dim + dim + edge_dim, global_dim, hidden)

    def forward(
        self, x: Tensor, edge_attr: Tensor, u: Tensor, graph: Graph, pool: Graph
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Maps x [..., N, dim], edge_attr [..., E, edge_dim], u [..., G, global_dim] to the same shapes, updated. In
        `pool`, each of G destinations receives from the nodes of one graph."""
        of_graph = ops.aggregate(pool.derive(Graph.reverse, num_dst=pool.num_src, num_src=pool.num_dst), u)
        h, edge_attr = self.nodes(torch.cat([x, of_graph], -1), graph, source=x, edge_attr=edge_attr)
        x = self.rest_of_nodes(h)
        into = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        num_edges = ops.aggregate(pool, graph.degree().to(x.dtype)[:, None]).clamp(min=1)
        mean_edge = ops.aggregate(pool, ops.aggregate(into, edge_attr)) / num_edges
        return x, edge_attr, self.globals(torch.cat([u, pooled(pool, x, "mean"), mean_edge], -1))
