"""Additive attention: GAT (all destinations rank the sources alike), GATv2 and Bahdanau attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention.spec import KeyValue, check_integers, edges_by_head, join_heads
from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.round import Round
from mpnn.scores import Activation, AdditiveScore, AdditiveV2Score, LeakyReLU
from mpnn.update.maps import Linear


class Additive(KeyValue):
    """Additive attention as in GAT (Velickovic et al. 2018, eq. 1-6).

        w_ij = softmax_j( LeakyReLU( a_dst . W h_i + a_src . W h_j [+ a_edge . W_e e_ij] ) )
        m_i  = || _h sum_j w_ij W h_j

    Args:
        in_dim: width of the features. out_dim: width of each head. heads: number of heads.
        concat: concatenate the heads (`heads * out_dim`); otherwise take their mean (`out_dim`).
        negative_slope: of the LeakyReLU. dropout: of attention weights, in training.
        edge_dim: width of edge attributes that take part in the score.
        bias: whether a learned bias is added to the message.
    """

    depends_on = "node"
    reads = "to_value", "to_value"

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        heads: int = 1,
        *,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_integers(in_dim=in_dim, out_dim=out_dim, edge_dim=edge_dim)
        at_least("heads", heads, 1)
        self.heads = heads
        self.concat = concat
        self.dropout = dropout
        self.activation = LeakyReLU(negative_slope)
        self.to_value = Linear(in_dim, heads * out_dim, bias=False)
        self.by_src = nn.Parameter(torch.empty(heads, out_dim))
        self.by_dst = nn.Parameter(torch.empty(heads, out_dim))
        self.to_edge = None if edge_dim is None else Linear(edge_dim, heads * out_dim, bias=False)
        self.by_edge = None if edge_dim is None else nn.Parameter(torch.empty(heads, out_dim))
        self.bias = nn.Parameter(torch.zeros(heads * out_dim if concat else out_dim)) if bias else None
        for weight in (self.to_value.weight, self.by_src, self.by_dst, self.by_edge):
            if weight is not None:
                nn.init.xavier_uniform_(weight)

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a_dst . W h_i, [..., N_dst, H, 1], a_src . W h_j, [..., N_src, H, 1], and W h_j, [..., N_src, H,
        D]."""
        value = self.to_value(src).unflatten(-1, (self.heads, -1))
        if dst is src:
            by_dst, by_src = _by_head(value, self.by_dst, self.by_src)
        else:
            own = self.to_value(dst).unflatten(-1, (self.heads, -1))
            (by_dst,), (by_src,) = _by_head(own, self.by_dst), _by_head(value, self.by_src)
        return by_dst.unsqueeze(-1), by_src.unsqueeze(-1), value

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        edge = None
        if self.to_edge is not None and self.by_edge is not None:
            (edge,) = _by_head(edges_by_head(self.to_edge, edge_attr, self.heads), self.by_edge)
        return Round(graph, value, AdditiveScore(query.squeeze(-1), key.squeeze(-1), self.activation, edge))

    def merge(self, out: Tensor) -> Tensor:
        return join_heads(out, self.concat, self.bias)


class AdditiveV2(KeyValue):
    """Additive attention whose ranking of sources depends on the destination: GATv2 (Brody et al. 2022, eq. 7), or
    Bahdanau et al. 2015 with `activation=torch.tanh`.

        w_ij = softmax_j( a . act( W_dst h_i + W_src h_j [+ W_e e_ij] ) ),   m_i = || _h sum_j w_ij W_src h_j

    Arguments as for `Additive`. `source_dim` is the width of the sources' features (default: `in_dim`). `share` makes
    W_dst and W_src one map. `bias` adds biases to the maps and the message. If `map_value` is False, values are the
    features themselves (Bahdanau), `m_i = || _h sum_j w_ij h_j`, and the message has no bias.
    """

    depends_on = "node"
    reads = "to_query", "to_value"

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        heads: int = 1,
        *,
        activation: Activation | None = None,
        concat: bool = True,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        source_dim: int | None = None,
        share: bool = False,
        bias: bool = True,
        map_value: bool = True,
    ) -> None:
        super().__init__()
        check_integers(in_dim=in_dim, out_dim=out_dim, edge_dim=edge_dim)
        at_least("heads", heads, 1)
        self.heads = heads
        self.concat = concat
        self.dropout = dropout
        self.map_value = map_value
        self.activation = LeakyReLU() if activation is None else activation
        self.to_value = Linear(in_dim if source_dim is None else source_dim, heads * out_dim, bias)
        self.to_query = self.to_value if share else Linear(in_dim, heads * out_dim, bias)
        self.to_edge = None if edge_dim is None else Linear(edge_dim, heads * out_dim, bias=False)
        self.vector = nn.Parameter(torch.empty(heads, out_dim))
        self.bias = nn.Parameter(torch.zeros(heads * out_dim if concat else out_dim)) if bias and map_value else None
        nn.init.xavier_uniform_(self.vector)

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query = self.to_query(dst)
        key = self.to_value(src).unflatten(-1, (self.heads, -1))
        return query.unflatten(-1, (self.heads, -1)), key, key if self.map_value else src.unsqueeze(-2)

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        edge = None if self.to_edge is None else edges_by_head(self.to_edge, edge_attr, self.heads)
        return Round(graph, value, AdditiveV2Score(query, key, self.vector, self.activation, edge))

    def merge(self, out: Tensor) -> Tensor:
        return join_heads(out, self.concat, self.bias)


def _by_head(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """`<x_h, vector_h>` for each head, [..., H] of x [..., H, D], for each of the vectors [H, D]. Computed as one
    product with a block-diagonal matrix, which reads x once and does not materialize x * vector."""
    blocks = torch.stack(vectors).transpose(1, 2).diag_embed(dim1=1, dim2=2)
    return F.linear(x.flatten(-2), blocks.flatten(2).flatten(0, 1)).chunk(len(vectors), -1)
