"""Attention in which each head has its own graph: `PerHead` and Reformer's `SharedKey`.

The edge type of an edge is the head that uses it, so that one graph, which can be cut and packed, describes all heads.
"""

from typing import cast

from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph
from mpnn.attention import DotProduct
from mpnn.graph.stacked import by_edge_type
from mpnn.round import Round


class PerHead(DotProduct):
    """`DotProduct` in which head h uses only the edges of type h. Without edge types, all heads use all edges."""

    depends_on = "row"  # heads become nodes

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        if graph.has_edge_types:
            graph = cast(Graph, graph.derive(by_edge_type, self.heads, num_dst=graph.num_dst))
        return super().round(query, key, value, graph, edge_attr)


class SharedKey(PerHead):
    """Attention with shared queries and keys, in which each head has its own graph (Reformer, Kitaev et al. 2020,
    section 2). Keys are normalized queries:

        q_j = W_Q h_j,   k_j = q_j / rms(q_j),   w_ij = softmax_j( <q_i, k_j> / sqrt(D) )
    """

    depends_on = "row"

    def __init__(self, dim: int, heads: int, *, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, head_dim=head_dim, bias=False, dropout=dropout)
        del self.to_key

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query, key = self.queries(dst), self.queries(src)
        value = self.to_value(src).unflatten(-1, (self.heads, -1))
        return query, F.rms_norm(key, key.shape[-1:], eps=1e-6), value

    def queries(self, x: Tensor) -> Tensor:
        """Returns the queries [..., N, H, D], which are also hashed."""
        return self.to_query(x).unflatten(-1, (self.heads, -1))
