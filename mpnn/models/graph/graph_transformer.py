"""Graph Transformer: dot-product attention over in-neighbors, with edge features in the keys and values."""

from typing import Any

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.attention.spec import edges_by_head
from mpnn.graphs import edges_into
from mpnn.models.layers.stack import Stack
from mpnn.round import Round, validation
from mpnn.scores import Dot
from mpnn.update import Update
from mpnn.update.maps import Linear


class GraphTransformer(Stack):
    """Graph transformer over in-neighbors (UniMP, Shi et al. 2021, section 3.1).

        w_ij = softmax_j( <q_i, k_j + E e_ij> / sqrt(D) ),   m_i = || _h sum_j w_ij (v_j + E e_ij)
        b_i  = sigmoid( w_b . [m_i || r_i || m_i - r_i] ),   r_i = W_r h_i
        h_i <- relu( norm( b_i r_i + (1 - b_i) m_i ) ),      last layer: mean over the heads, no norm, no relu

    With `edges="weigh"` the edge features multiply the scores instead (Dwivedi & Bresson 2021, section 2), see
    `EdgeScaled`.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        hidden: width of each head.
        heads: number of attention heads.
        layers: number of layers.
        edge_dim: width of the edge features; None if there are none.
        edges: "add" or "weigh".
        dropout: dropout probability of the attention weights, in training.
        graph: topology or graph of every layer; None if each call passes one.
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
        if edges not in KINDS:
            raise ValueError(f"edges must be {' or '.join(map(repr, KINDS))}; got {edges!r}")
        kind = KINDS[edges]
        width = hidden * heads
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
        output_attention = kind(widths[-1], classes, heads, edge_dim=edge_dim, dropout=dropout, concat=False)
        last = MessagePassing(graph, "sum", GatedResidual(widths[-1], classes), output_attention)
        super().__init__([*rounds, last])

    def forward(  # type: ignore[override]
        self, x: Tensor, graph: Topology | Graph | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Maps x [..., N, in_dim] to logits [..., N, classes]. edge_attr: [E, edge_dim]; default: the graph's."""
        validation.input_features("x", x)
        for layer in self.layers:
            x = layer(x, graph, edge_attr=edge_attr)
        return x


class HeadsOf(DotProduct):
    """`DotProduct` with input and head widths of any size and without an output map.

    Args:
        in_dim, head_dim, heads: width of the features and of each head, and number of heads.
        concat: whether the message concatenates the heads; otherwise it is their mean.
        shared: whether keys and values of edges share a map.
        options: of `DotProduct`.
    """

    depends_on = "node"

    def __init__(
        self, in_dim: int, head_dim: int, heads: int, *, concat: bool = True, shared: bool = True, **options: Any
    ) -> None:
        super().__init__(heads * head_dim, heads, **{"source_dim": in_dim, "query_dim": in_dim, **options})
        del self.to_out
        self.concat = concat
        wide = heads * head_dim
        self.to_edge_value = None if shared else Linear(options["edge_dim"], wide, bias=False)

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        round = super().round(query, key, value, graph, edge_attr)
        if self.to_edge_value is not None:
            round.edge_value = edges_by_head(self.to_edge_value, edge_attr, self.heads)
        return round

    def merge(self, out: Tensor) -> Tensor:
        return out.flatten(-2) if self.concat else out.mean(-2)


class EdgeScaled(HeadsOf):
    """Scores in which edge features scale each component of the dot product (Dwivedi & Bresson 2021, section 2):

        w_ij = softmax_j( sum_d q_id k_jd (E e_ij)_d / sqrt(D) )

    There is one key per edge instead of one per node, so edges become the sources, as in
    `mpnn.attention.EdgeMessage`.
    """

    depends_on = "row"  # keys are those of edges

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        if self.to_edge is None or edge_attr is None:
            raise ValueError("EdgeScaled needs edge_dim, and edge_attr from the call or the graph")
        key, value = (x.index_select(-3, graph.ends[0]) for x in (key, value))
        edge_key = key * self.to_edge(edge_attr).unflatten(-1, (self.heads, -1))
        into = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        return Round(into, value, Dot(query, edge_key, self.scale))


KINDS = {"add": HeadsOf, "weigh": EdgeScaled}


class GatedResidual(Update):
    """`y = f( b r + (1 - b) m )` with r = W x and b = sigmoid(w . [m || r || m - r]), a scalar per node (UniMP, section
    3.1). If `f` is None it is the identity."""

    def __init__(self, dim: int, out_dim: int, f: nn.Module | None = None) -> None:
        super().__init__()
        self.own = Linear(dim, out_dim)
        self.gate = Linear(3 * out_dim, 1, bias=False)
        self.f = f

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        own = self.own(x)
        gate = self.gate(torch.cat([message, own, message - own], -1)).sigmoid()
        y = gate * own + (1 - gate) * message
        return y if self.f is None else self.f(y)
