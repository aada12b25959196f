"""Heads that hear over graphs of their own.

Head h of N nodes is N nodes more: node i of head h is node h * N + i of a graph in which nothing passes between heads.
Which head hears along an edge is the edge's class, so that who hears whom stays one graph that can be looked at.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mpnn.attention import DotProduct, Terms
from mpnn.graph import Graph
from mpnn.scores import Dot


class PerHead(DotProduct):
    """`DotProduct` in which head h hears along the edges of class h alone, where the graph's edges have classes."""

    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        terms = super().terms(query, key, value, graph, edge_attr)
        return heads_apart(terms, graph, self.heads) if graph.has_classes else terms

    def merge(self, out: Tensor) -> Tensor:
        return super().merge(heads_together(out, self.heads))


def heads_apart(terms: Terms, graph: Graph, heads: int) -> Terms:
    """The same terms with the heads as nodes: query, key and value [..., N, H, D] as [..., H * N, 1, D]."""
    score = terms.score
    if not isinstance(score, Dot) or score.edge_key is not None or terms.bias or terms.edge_value is not None:
        raise ValueError("heads hear over graphs of their own in plain dot-product attention only, without positions")
    if {x.shape[-2] for x in (score.query, score.key, terms.value)} != {heads}:
        raise ValueError(f"heads that hear over graphs of their own share no keys; expected {heads} heads of keys, too")
    score = replace(score, query=_as_nodes(score.query), key=_as_nodes(score.key))
    apart = graph.derived(_apart, heads, num_dst=graph.num_dst * heads, num_src=graph.num_src * heads)
    return Terms(_as_nodes(terms.value), score, graph=apart)


def heads_together(out: Tensor, heads: int) -> Tensor:
    """[..., N, H, D] again, of what arrived at heads as nodes; what arrived at heads stays as it is."""
    if out.shape[-2] == heads:
        return out
    return out.squeeze(-2).unflatten(-2, (heads, -1)).movedim(-3, -2)


def _as_nodes(x: Tensor) -> Tensor:
    return x.movedim(-2, -3).flatten(-3, -2).unsqueeze(-2)


def _apart(graph: Graph, heads: int) -> Graph:
    if graph.num_relations > heads:
        raise ValueError(f"the classes of edges are the heads that hear along them: {graph.num_relations}, not {heads}")
    src, dst = graph.edge_index
    head = graph.edge_type
    assert head is not None
    edges = torch.stack([src + head * graph.num_src, dst + head * graph.num_dst])
    return Graph.from_edges(edges, graph.num_dst * heads, graph.num_src * heads)
