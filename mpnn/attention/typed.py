"""A linear map for each edge type: R-GCN, GGNN, convolution."""

import torch
from torch import Tensor, nn

from mpnn import validation
from mpnn.attention.spec import Attention, check_integers, join_heads
from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.round import Round


class Typed(Attention):
    """A linear map for each edge type: R-GCN (Schlichtkrull et al. 2018, eq. 2 without its self-connection), GGNN, and
    convolution, where the edge type is the relative position.

        m_i = sum_r W_r reduce_{j in N_r(i)} h_j

    The edge types are those of the graph (`edge_type`, or the rule of its topology); all edges of a graph without them
    have type 0. Messages are aggregated per edge type and then mapped, so a convolution costs as much as im2col. With
    "sum" this is the sum of `W_r h_j`; with "mean" each edge type has its own mean, R-GCN's 1 / |N_r(i)|. Maps are
    initialized as Xavier's.
    """

    normalize = "none"
    depends_on = "node"

    def __init__(self, in_dim: int, out_dim: int, relations: int, *, bias: bool = True) -> None:
        super().__init__()
        check_integers(in_dim=in_dim, out_dim=out_dim)
        at_least("relations", relations, 1)
        self.in_dim, self.relations = in_dim, relations
        self.weight = nn.Parameter(torch.empty(relations, in_dim, out_dim))
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None
        bound = (6 / max(in_dim + out_dim, 1)) ** 0.5  # xavier_uniform_ of each matrix, at once
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        validation.fits("Typed", "x" if dst is src else "source", src, (self.in_dim, self.weight.dtype))
        by_type = graph.derive(_by_type, self.relations, num_dst=graph.num_dst * self.relations)
        return Round(by_type, src.unsqueeze(-2))

    def merge(self, out: Tensor) -> Tensor:
        validation.widened("Typed", out.shape[-1], self.in_dim)
        return join_heads((self.concat_types(out) @ self.maps().flatten(0, 1)).unsqueeze(-2), True, self.bias)

    def concat_types(self, out: Tensor) -> Tensor:
        """The aggregated messages of each node, concatenated over edge types, [..., N, relations * in_dim]."""
        return out.squeeze(-2).unflatten(-2, (-1, self.relations)).flatten(-2)

    def maps(self) -> Tensor:
        """W, [relations, in_dim, out_dim]."""
        return self.weight


def _by_type(graph: Graph, relations: int) -> Graph:
    """Splits destination i into `relations` destinations, one per edge type: i * relations + edge_type."""
    if graph.edge_type is None and relations == 1:
        return graph
    if graph.edge_type is None:
        raise ValueError(f"Typed needs a graph with edge types, and {graph} has none: pass edge_type")
    if graph.num_edge_types > relations:
        raise ValueError(f"the graph has {graph.num_edge_types} edge types, but this layer has {relations} maps")
    src, dst = graph.ends
    edges = torch.stack([src, dst * relations + graph.edge_type])
    return Graph.from_edges(edges, graph.num_dst * relations, graph.num_src)
