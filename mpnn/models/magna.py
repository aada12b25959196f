"""MAGNA: attention to neighbours diffuses over several hops, so that one layer hears far for the price of edges."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn import check
from mpnn.aggregate import Diffusion
from mpnn.attention import Attention, Terms
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.losses import node_loss
from mpnn.models.saving import Model
from mpnn.scores import AdditiveScore, LeakyReLU
from mpnn.topology import Topology
from mpnn.update import FeedForward, PreNorm


class MAGNA(Model):
    """Multi-hop attention graph network for classifying nodes (Wang et al. 2021, "Multi-hop attention graph neural
    networks").

        A  = softmax of one-hop scores, see `MagnaAttention`
        m  = W_O || _h Z_hops,   Z_0 = V,   Z_{k+1} = (1 - alpha) A Z_k + alpha V
        z  = x + m(norm(x)),     y = z + W_2 relu(W_1 norm'(z))

    Z_hops nears `alpha sum_k (1 - alpha)^k A^k V`, and no power of A is ever taken: a layer costs O(hops * edges). In
    the paper nodes hear themselves: give `graph.with_self_loops()`.

    Args:
        in_dim: width of the features. classes: width of the logits. dim: width of the model, a multiple of `heads`.
        layers: their number. hops: of diffusion within each. alpha: how much each hop keeps of where it began.
        dropout: of what layers add and of attention weights, in training.
        graph: whom nodes hear; None when each call gives it. relations: classes of the graph's edges that take part in
            the score; 0 for none.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        dim: int = 64,
        heads: int = 8,
        layers: int = 6,
        *,
        hops: int = 6,
        alpha: float = 0.1,
        dropout: float = 0.5,
        relations: int = 0,
        graph: Topology | Graph | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(in_dim, dim)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            MessagePassing(
                graph,
                Diffusion(hops, alpha),
                PreNorm(dim, FeedForward(dim, activation=nn.ReLU, dropout=dropout), dropout=dropout),
                MagnaAttention(dim, heads, relations=relations, dropout=dropout),
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """x [..., N, in_dim] -> logits [..., N, classes] over `graph`, or over the model's own when that is None."""
        check.tensor("x", x)
        check.fits("MAGNA", "x", x, check.takes(self.embed))
        h = self.embed(self.dropout(x))
        for layer in self.layers:
            h = layer(h, graph)
        return self.head(self.norm(h))

    def loss(
        self, x: Tensor, target: Tensor, mask: Tensor | None = None, graph: Topology | Graph | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats: x [N, in_dim], target int64 [N], over the nodes of `mask` bool [N], or all."""
        logits = self(x, graph)
        return node_loss(logits, target, mask)


class MagnaAttention(Attention):
    """MAGNA's one-hop attention, with the values that it spreads.

        w_ij = softmax_j( LeakyReLU( v . tanh( W_dst h_i || W_src h_j || W_r r_ij ) ) )
        m_i  = W_O || _h sum_j w_ij W_V h_j

    The product with v falls into a sum, one term from each of the two nodes and one from the edge's class, so nothing
    as wide as a feature is made for an edge.

    Args:
        dim: width of the features, a multiple of `heads`. relations: classes of edges, 0 for none. dropout: of
            attention weights, in training.
    """

    def __init__(self, dim: int, heads: int, *, relations: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        self.heads, self.dropout, self.activation = heads, dropout, LeakyReLU()
        self.to_dst, self.to_src, self.to_value, self.to_out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.by_dst, self.by_src = (nn.Parameter(torch.empty(heads, dim // heads)) for _ in range(2))
        self.relation = nn.Embedding(relations, dim) if relations else None
        self.by_relation = nn.Parameter(torch.empty(heads, dim // heads)) if relations else None
        for vector in (self.by_dst, self.by_src, self.by_relation):
            if vector is not None:
                nn.init.xavier_uniform_(vector)

    def takes(self) -> tuple[check.Takes, check.Takes]:
        return check.takes(self.to_dst), check.takes(self.to_src)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        value = self.to_value(src).unflatten(-1, (self.heads, -1))
        of_dst, of_src = self._part(self.to_dst(dst), self.by_dst), self._part(self.to_src(src), self.by_src)
        return Terms(value, AdditiveScore(of_dst, of_src, self.activation, self._of_edges(graph)))

    def merge(self, out: Tensor) -> Tensor:
        return self.to_out(out.flatten(-2))

    def _of_edges(self, graph: Graph) -> Tensor | None:
        """[E, H] in the caller's edge order."""
        if self.relation is None or self.by_relation is None:
            return None
        if graph.edge_type is None or graph.num_relations > self.relation.num_embeddings:
            raise ValueError(
                f"this attention was made for {self.relation.num_embeddings} relations; the edges of {graph} have "
                f"{graph.num_relations or 'none'}"
            )
        return self._part(self.relation.weight, self.by_relation).index_select(0, graph.edge_type)

    def _part(self, mapped: Tensor, vector: Tensor) -> Tensor:
        """`v_h . tanh(mapped_h)` for each head: [..., H] of [..., H * D]."""
        return torch.einsum("...hd,hd->...h", mapped.unflatten(-1, (self.heads, -1)).tanh(), vector)
