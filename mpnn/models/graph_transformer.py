"""Graph Transformer: a node attends to its neighbours by dot products in which the edges take part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn import check
from mpnn.attention import DotProduct, Terms
from mpnn.graph import Graph
from mpnn.graphs import edges_into
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.losses import node_loss
from mpnn.models.saving import Model
from mpnn.scores import Dot
from mpnn.topology import Topology
from mpnn.update import Update


class GraphTransformer(Model):
    """Graph transformer over one hop (UniMP, Shi et al. 2021, section 3.1).

        w_ij = softmax_j( <q_i, k_j + E e_ij> / sqrt(D) ),   m_i = || _h sum_j w_ij (v_j + E e_ij)
        b_i  = sigmoid( w_b . [m_i || r_i || m_i - r_i] ),   r_i = W_r h_i
        h_i <- relu( norm( b_i r_i + (1 - b_i) m_i ) ),      last layer: the mean of its heads, no norm, no relu

    With `edges="weigh"`, edges weigh the scores instead (Dwivedi & Bresson 2021, section 2), see `EdgeScaled`.

    Args:
        in_dim: width of the features. classes: width of the logits. hidden: of each head. heads, layers: their numbers.
        edge_dim: width of the edges' attributes, None where they have none. edges: "add" or "weigh".
        dropout: of attention weights, in training. graph: whom nodes hear; None when each call gives it.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 16,
        heads: int = 4,
        layers: int = 3,
        *,
        edge_dim: int | None = None,
        edges: str = "add",
        dropout: float = 0.0,
        graph: Topology | Graph | None = None,
    ) -> None:
        super().__init__()
        if edges not in KINDS:
            raise ValueError(f"edges must be {' or '.join(map(repr, KINDS))}; got {edges!r}")
        kind, width = KINDS[edges], hidden * heads
        widths = [in_dim] + [width] * (layers - 1)
        rounds = [
            MessagePassing(
                graph,
                "sum",
                GatedResidual(d, width, nn.Sequential(nn.LayerNorm(width), nn.ReLU())),
                kind(d, hidden, heads, edge_dim=edge_dim, dropout=dropout),
            )
            for d in widths[:-1]
        ]
        decide = kind(widths[-1], classes, heads, edge_dim=edge_dim, dropout=dropout, concat=False)
        self.layers = nn.ModuleList([*rounds, MessagePassing(graph, "sum", GatedResidual(widths[-1], classes), decide)])

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, edge_attr: Tensor | None = None) -> Tensor:
        """x [..., N, in_dim] -> logits [..., N, classes]; edge_attr: [E, edge_dim], default: the graph's."""
        check.tensor("x", x)
        for layer in self.layers:
            x = layer(x, graph, edge_attr=edge_attr)
        return x

    def loss(
        self,
        x: Tensor,
        target: Tensor,
        mask: Tensor | None = None,
        graph: Topology | Graph | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats: x [N, in_dim], target int64 [N], over the nodes of `mask` bool [N], or all."""
        logits = self(x, graph, edge_attr)
        return node_loss(logits, target, mask)


class HeadsOf(DotProduct):
    """`DotProduct` from any width to heads of any width, which the message holds side by side or averaged, unmixed.

    Args:
        in_dim: width of the destinations' features. head_dim: of each head. source_dim: of the sources' features where
            it differs. concat: heads side by side, else their mean. The rest as `DotProduct`.
    """

    def __init__(
        self,
        in_dim: int,
        head_dim: int,
        heads: int,
        *,
        source_dim: int | None = None,
        edge_dim: int | None = None,
        concat: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        source_dim = in_dim if source_dim is None else source_dim
        super().__init__(heads * head_dim, heads, bias=bias, dropout=dropout, edge_dim=edge_dim, source_dim=source_dim)
        self.to_query = nn.Linear(in_dim, heads * head_dim, bias)
        del self.to_out
        self.concat = concat

    def merge(self, out: Tensor) -> Tensor:
        return out.flatten(-2) if self.concat else out.mean(-2)


class EdgeScaled(HeadsOf):
    """Scores in which edges weigh the parts of the product of query and key (Dwivedi & Bresson 2021, section 2):

        w_ij = softmax_j( sum_d q_id k_jd (E e_ij)_d / sqrt(D) )

    A key belongs to an edge then, not to a node, so edges become the sources, as in `mpnn.attention.EdgeMessage`.
    """

    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        if self.to_edge is None or edge_attr is None:
            raise ValueError("edges that weigh scores need edge_dim, and the graph or the call must give edge_attr")
        key, value = (x.index_select(-3, graph.edge_index[0]) for x in (key, value))
        weighed = key * self.to_edge(edge_attr).unflatten(-1, (self.heads, -1))
        into = graph.derived(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        return Terms(value, Dot(query, weighed, self.scale), graph=into)


KINDS = {"add": HeadsOf, "weigh": EdgeScaled}


class GatedResidual(Update):
    """`y = f( b r + (1 - b) m )`, r = W x, and b a number for each node that a linear map of m, r and m - r gives
    (UniMP, section 3.1); `f` None is the identity."""

    def __init__(self, dim: int, out_dim: int, f: nn.Module | None = None, bias: bool = True) -> None:
        super().__init__()
        self.own, self.gate, self.f = nn.Linear(dim, out_dim, bias), nn.Linear(3 * out_dim, 1, bias=False), f

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        own = self.own(x)
        share = self.gate(torch.cat([message, own, message - own], -1)).sigmoid()
        y = share * own + (1 - share) * message
        return y if self.f is None else self.f(y)
