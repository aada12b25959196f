"""Linear maps for each edge type: R-GCN, GGNN, convolution, and R-GAT, whose attention depends on the type, too."""

import torch
from torch import Tensor, nn

from mpnn.attention.spec import Attention, check_integers, join_heads
from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.round import Round, validation
from mpnn.scores import AdditiveScore, LeakyReLU


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
        self.in_dim = in_dim
        self.relations = relations
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
        """Returns the aggregated messages of each node, concatenated over edge types, [..., N, relations * in_dim]."""
        return out.squeeze(-2).unflatten(-2, (-1, self.relations)).flatten(-2)

    def maps(self) -> Tensor:
        """Returns the maps W_r, [relations, in_dim, out_dim]."""
        return self.weight


class TypedAdditive(Attention):
    """Additive attention with maps for each edge type r: R-GAT (Busbridge et al. 2019, arXiv:1904.05811, eq. 3 to 6).

        w_ij = softmax_j( LeakyReLU( a_r . W_r h_i + b_r . W_r h_j ) )          m_i = || _h sum_j w_ij W_r h_j

    `W_r h_j` is computed for the pairs of a node and an edge type that occur, not for each edge.

    Args:
        in_dim: width of the features. out_dim: width of each head. relations: number of edge types.
        heads: number of heads.
        within: whether a softmax runs over the in-neighbors of each type, and their messages are summed (WIRGAT);
            otherwise one runs over all (ARGAT).
        negative_slope: of the LeakyReLU. dropout: of attention weights, in training.
        bias: whether a learned bias is added to the message.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        relations: int,
        heads: int = 1,
        *,
        within: bool = False,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_integers(in_dim=in_dim, out_dim=out_dim)
        at_least("relations", relations, 1)
        at_least("heads", heads, 1)
        self.within = within
        self.relations = relations
        self.dropout = dropout
        self.negative_slope = negative_slope
        self.weight = nn.Parameter(torch.empty(relations, in_dim, heads, out_dim))
        self.by_dst, self.by_src = (nn.Parameter(torch.empty(relations, heads, out_dim)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * out_dim)) if bias else None
        for parameter, width in ((self.weight, in_dim), (self.by_dst, heads), (self.by_src, heads)):
            bound = (6 / max(width + heads * out_dim, 1)) ** 0.5
            nn.init.uniform_(parameter, -bound, bound)

    def takes(self) -> tuple[validation.Takes, validation.Takes]:
        own = (self.weight.shape[1], self.weight.dtype)
        return own, own

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        by_dst, by_src = (torch.einsum("rihd,rhd->rih", self.weight, by) for by in (self.by_dst, self.by_src))
        return typed_round(graph, dst, src, self.weight, by_dst, by_src, self.negative_slope, self.within)

    def merge(self, out: Tensor) -> Tensor:
        return join_heads(out.unflatten(-3, (-1, self.relations)).sum(-3) if self.within else out, True, self.bias)


def typed_round(
    graph: Graph,
    dst: Tensor,
    src: Tensor,
    maps: Tensor,
    by_dst: Tensor,
    by_src: Tensor,
    negative_slope: float,
    within: bool,
    by_edge: Tensor | None = None,
) -> Round:
    """The round of R-GAT. Its sources are the pairs of an edge type and a node that occur; `within`, its destinations
    are the pairs i * relations + edge type.

    Args:
        dst, src: [..., N, in_dim]. maps: W, [relations, in_dim, H, D].
        by_dst, by_src: [relations, in_dim, H], the terms of the two ends in the logit. by_edge: that of edges, [E, H].
    """
    typed, sources = graph.cached(
        ("by type and source", len(maps), within), lambda: _by_source(graph, len(maps), within)
    )
    terms = [torch.einsum("...ni,rih->...nrh", x, by).flatten(-3, -2) for x, by in ((dst, by_dst), (src, by_src))]
    kinds = [(own, nodes) for own, nodes in zip(maps, sources, strict=True) if len(nodes)]
    values = [(src.index_select(-2, nodes) @ own.flatten(1)).unflatten(-1, own.shape[1:]) for own, nodes in kinds]
    value = torch.cat(values, -3) if values else src.new_zeros(*src.shape[:-2], 0, *maps.shape[2:])
    rows = torch.cat([nodes * len(maps) + r for r, nodes in enumerate(sources)])
    of_src = terms[1].index_select(-2, rows)
    of_dst = terms[0]
    if not within:  # the term of i differs from edge to edge
        each = of_dst.index_select(-2, graph.ends[1] * len(maps) + graph.edge_type)
        by_edge = each if by_edge is None else each + by_edge
        of_dst = of_dst.new_zeros(*dst.shape[:-1], of_dst.shape[-1])
    return Round(typed, value, AdditiveScore(of_dst, of_src, LeakyReLU(negative_slope), by_edge))


def _by_source(graph: Graph, relations: int, within: bool) -> tuple[Graph, tuple[Tensor, ...]]:
    """The graph from pairs of an edge type and a source, type by type, and the sources of each type."""
    (src, dst), types = graph.ends, _types(graph, relations)
    pairs, rank = torch.unique(types * graph.num_src + src, return_inverse=True)
    kinds = pairs // max(graph.num_src, 1)
    sources = (pairs % max(graph.num_src, 1)).split(torch.bincount(kinds, minlength=relations).tolist())
    ends = torch.stack([rank, dst * relations + types if within else dst])
    return Graph.from_edges(ends, graph.num_dst * (relations if within else 1), len(pairs)), sources


def _types(graph: Graph, relations: int) -> Tensor:
    """The type of each edge, int64 [E], of `relations`."""
    if graph.edge_type is None:
        raise ValueError(f"Typed needs a graph with edge types, and {graph} has none: pass edge_type")
    if graph.num_edge_types > relations:
        raise ValueError(f"the graph has {graph.num_edge_types} edge types, but this layer has {relations} maps")
    return graph.edge_type


def _by_type(graph: Graph, relations: int) -> Graph:
    """Splits destination i into `relations` destinations, one per edge type: i * relations + edge_type."""
    if graph.edge_type is None and relations == 1:
        return graph
    src, dst = graph.ends
    edges = torch.stack([src, dst * relations + _types(graph, relations)])
    return Graph.from_edges(edges, graph.num_dst * relations, graph.num_src)
