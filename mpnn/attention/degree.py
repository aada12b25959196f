"""Weights that follow from the graph alone: GCN's normalisation by degrees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn.attention.heads import joined
from mpnn.attention.spec import Attention, Terms
from mpnn.graph import Graph


class Degree(Attention):
    """GCN's fixed weights (Kipf & Welling 2017, eq. 2): `w_ij = a_ij / sqrt(d_i d_j)`, value `W h_j`.

    d is the number of edges that a node hears, or the sum of their weights a_ij where edges have one-dimensional
    attributes. The paper's self-loops are the graph's business: `graph.with_self_loops(fill=1.0)`.
    """

    normalize = "none"

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.to_value = nn.Linear(in_dim, out_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None
        nn.init.xavier_uniform_(self.to_value.weight)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        if graph.num_dst != graph.num_src:
            raise ValueError(f"Degree needs one set of nodes; the graph is {graph.num_dst} x {graph.num_src}")
        if edge_attr is None:
            weight = graph.memo(("degree weights", src.dtype), lambda: degree_weights(graph, dtype=src.dtype))
        else:
            weight = degree_weights(graph, edge_attr.reshape(graph.num_edges).to(src.dtype))
        return Terms(self.to_value(src).unsqueeze(-2), bias=(weight[:, None],))

    def merge(self, out: Tensor) -> Tensor:
        return joined(out, True, self.bias)


def degree_weights(graph: Graph, weight: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """`a_ij / sqrt(d_i d_j)` for each edge, [E] in the caller's order; isolated ends count as weight 0."""
    src, dst = graph.edge_index
    weight = torch.ones(graph.num_edges, dtype=dtype, device=graph.device) if weight is None else weight
    degree = weight.new_zeros(graph.num_dst).index_add(0, dst, weight)
    inverse = torch.where(
        degree > 0, degree.clamp(min=torch.finfo(degree.dtype).tiny).rsqrt(), torch.zeros_like(degree)
    )
    return inverse[dst] * weight * inverse[src]
