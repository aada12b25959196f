"""Attention in which each head has its own graph: `PerHead` and Reformer's `SharedKey`.

The edge type of an edge is the head that uses it, so that all heads are described by one graph. To compute them, heads
become nodes: node i of head h is node h * N + i of a larger graph without edges between heads.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph
from mpnn.attention import DotProduct
from mpnn.round import Round
from mpnn.scores import Dot


class PerHead(DotProduct):
    """`DotProduct` in which head h uses only the edges of type h. Without edge types, all heads use all edges."""

    depends_on = "row"  # heads become nodes

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        round = super().round(query, key, value, graph, edge_attr)
        return heads_to_nodes(round, graph, self.heads) if graph.has_edge_types else round

    def merge(self, out: Tensor) -> Tensor:
        return super().merge(nodes_to_heads(out, self.heads))


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


def heads_to_nodes(round: Round, graph: Graph, heads: int) -> Round:
    """Returns the round with heads as nodes: query, key and value [..., N, H, D] become [..., H * N, 1, D]."""
    score = round.score
    if type(score) is not Dot or score.edge_key is not None or round.biased or round.edge_value is not None:
        raise ValueError("per-head graphs need plain dot-product attention, without positions, edge features or biases")
    if {x.shape[-2] for x in (score.query, score.key, round.value)} != {heads}:
        raise ValueError(f"per-head graphs need as many key and value heads as query heads; expected {heads} of each")
    score = replace(score, query=_as_nodes(score.query), key=_as_nodes(score.key))
    head_graph = graph.derive(_graph_of_heads, heads, num_dst=graph.num_dst * heads, num_src=graph.num_src * heads)
    return replace(round, graph=head_graph, value=_as_nodes(round.value), score=score)


def nodes_to_heads(out: Tensor, heads: int) -> Tensor:
    """Returns messages [..., H * N, 1, D] as [..., N, H, D]. Messages [..., N, H, D] are returned unchanged."""
    if out.shape[-2] == heads:
        return out
    return out.squeeze(-2).unflatten(-2, (heads, -1)).movedim(-3, -2)


def _as_nodes(x: Tensor) -> Tensor:
    return x.movedim(-2, -3).flatten(-3, -2).unsqueeze(-2)


def _graph_of_heads(graph: Graph, heads: int) -> Graph:
    if graph.num_edge_types > heads:
        raise ValueError(
            f"edge types are head numbers, so there can be at most {heads}; the graph has {graph.num_edge_types}"
        )
    src, dst = graph.edge_index
    head = graph.edge_type
    assert head is not None
    edges = torch.stack([src + head * graph.num_src, dst + head * graph.num_dst])
    return Graph.from_edges(edges, graph.num_dst * heads, graph.num_src * heads)
