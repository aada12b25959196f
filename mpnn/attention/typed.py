"""A linear map for each class of edges: R-GCN, GGNN, convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn import check
from mpnn.attention.heads import check_integers, joined
from mpnn.attention.spec import Attention, Terms
from mpnn.graph import Graph
from mpnn.graphs.check import at_least


class Typed(Attention):
    """A linear map for each class of edges: R-GCN (Schlichtkrull et al. 2018, eq. 2 without its self-connection), GGNN,
    and convolution, where an edge's class is its relative position.

        m_i = sum_r W_r reduce_{j in N_r(i)} h_j

    The classes are the graph's (`edge_type`, or the rule of its topology); a graph without any has one class. Messages
    are gathered class by class and then mapped, so a convolution costs what im2col costs. With "sum" this is the sum
    of `W_r h_j`; with "mean" each class has its own mean, R-GCN's 1 / |N_r(i)|. Each map begins as Xavier's.
    """

    normalize = "none"

    def __init__(self, in_dim: int, out_dim: int, relations: int, *, bias: bool = True) -> None:
        super().__init__()
        check_integers(in_dim=in_dim, out_dim=out_dim)
        at_least("relations", relations, 1)
        self.in_dim, self.relations = in_dim, relations
        self.weight = nn.Parameter(torch.empty(relations, in_dim, out_dim))
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None
        for one in self.weight:
            nn.init.xavier_uniform_(one)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        check.fits("Typed", "x" if dst is src else "source", src, (self.in_dim, self.weight.dtype))
        by_class = graph.derived(_by_class, self.relations, num_dst=graph.num_dst * self.relations)
        return Terms(src.unsqueeze(-2), graph=by_class)

    def merge(self, out: Tensor) -> Tensor:
        check.widened("Typed", out.shape[-1], self.in_dim)
        return joined((self.gathered(out) @ self.maps().flatten(0, 1)).unsqueeze(-2), True, self.bias)

    def gathered(self, out: Tensor) -> Tensor:
        """What a node heard, class by class and side by side, [..., N, relations * in_dim]."""
        return out.squeeze(-2).unflatten(-2, (-1, self.relations)).flatten(-2)

    def maps(self) -> Tensor:
        """W, [relations, in_dim, out_dim]."""
        return self.weight


def _by_class(graph: Graph, relations: int) -> Graph:
    """Destination i becomes `relations` destinations, one for each class: i * relations + class."""
    if graph.edge_type is None and relations == 1:
        return graph
    if graph.edge_type is None:
        raise ValueError(f"Typed needs a graph whose edges have classes, and {graph} has none: give edge_type")
    if graph.num_relations > relations:
        raise ValueError(f"the graph has {graph.num_relations} classes of edges, but this layer has {relations} maps")
    src, dst = graph.edge_index
    edges = torch.stack([src, dst * relations + graph.edge_type])
    return Graph.from_edges(edges, graph.num_dst * relations, graph.num_src)
