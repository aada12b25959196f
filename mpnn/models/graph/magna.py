"""MAGNA: attention diffused over several hops, so one layer reaches distant nodes at a cost linear in the edges."""

import torch
from torch import Tensor, nn

from mpnn import Graph, Topology
from mpnn.attention import Attention
from mpnn.models.layers.propagation import Propagation
from mpnn.models.layers.stack import Stack
from mpnn.round import Round, validation
from mpnn.scores import AdditiveScore, LeakyReLU
from mpnn.update import FeedForward, PreNorm
from mpnn.update.maps import Linear


class MAGNA(Stack):
    """Multi-hop attention graph network for node classification (Wang et al. 2021, "Multi-hop attention graph neural
    networks").

        A  = softmax of one-hop scores, see `MagnaAttention`
        m  = W_O || _h Z_hops,   Z_0 = V,   Z_{k+1} = (1 - alpha) A Z_k + alpha V
        z  = x + m(norm(x)),     y = z + W_2 relu(W_1 norm'(z))

    Z_hops approximates `alpha sum_k (1 - alpha)^k A^k V` without computing powers of A: a layer costs O(hops * edges).
    In the paper each node also attends to itself: pass `graph.with_self_loops()`.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        dim: width of the layers, a multiple of `heads`.
        heads: number of attention heads.
        layers: number of layers.
        hops: number of diffusion steps in each layer.
        alpha: weight of the initial values in each diffusion step.
        dropout: dropout probability of the residual branches and of the attention weights, in training.
        relations: number of edge types that enter the score; 0 for none.
        graph: topology or graph of every layer; None if each call passes one.
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
        embed = Linear(in_dim, dim)
        rounds = (
            Propagation(
                graph,
                "sum",
                PreNorm(dim, FeedForward(dim, activation=nn.ReLU, dropout=dropout), dropout=dropout),
                MagnaAttention(dim, heads, relations=relations, dropout=dropout),
                hops=hops,
                teleport=alpha,
            )
            for _ in range(layers)
        )
        super().__init__(rounds, dropout)
        self.embed = embed
        self.norm = nn.LayerNorm(dim)
        self.head = Linear(dim, classes)

    def forward(  # type: ignore[override]
        self, x: Tensor, graph: Topology | Graph | None = None
    ) -> Tensor:
        """Maps x [..., N, in_dim] to logits [..., N, classes] over `graph`; default: the graph of the model."""
        validation.input_features("x", x)
        validation.fits("MAGNA", "x", x, validation.takes(self.embed))
        h = self.embed(self.dropout(x))
        for layer in self.layers:
            h = layer(h, graph)
        return self.head(self.norm(h))


class MagnaAttention(Attention):
    """One-hop attention of MAGNA.

        w_ij = softmax_j( LeakyReLU( v . tanh( W_dst h_i || W_src h_j || W_r r_ij ) ) )
        m_i  = W_O || _h sum_j w_ij W_V h_j

    The product with v is a sum of three terms: one of the destination, one of the source, one of the edge type. So no
    E x D tensor is materialized.

    Args:
        dim: width of the features, a multiple of `heads`.
        heads: number of attention heads.
        relations: number of edge types; 0 for none.
        dropout: dropout probability of the attention weights, in training.
    """

    depends_on = "node"
    reads = "to_dst", "to_src"

    def __init__(self, dim: int, heads: int, *, relations: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        self.heads = heads
        self.dropout = dropout
        self.activation = LeakyReLU()
        self.to_dst, self.to_src, self.to_value, self.to_out = (Linear(dim, dim, bias=False) for _ in range(4))
        self.by_dst, self.by_src = (nn.Parameter(torch.empty(heads, dim // heads)) for _ in range(2))
        self.relation = nn.Embedding(relations, dim) if relations else None
        self.by_relation = nn.Parameter(torch.empty(heads, dim // heads)) if relations else None
        for vector in (self.by_dst, self.by_src, self.by_relation):
            if vector is not None:
                nn.init.xavier_uniform_(vector)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        value = self.to_value(src).unflatten(-1, (self.heads, -1))
        dst_term, src_term = self._term(self.to_dst(dst), self.by_dst), self._term(self.to_src(src), self.by_src)
        return Round(graph, value, AdditiveScore(dst_term, src_term, self.activation, self._edge_term(graph)))

    def merge(self, out: Tensor) -> Tensor:
        return self.to_out(out.flatten(-2))

    def _edge_term(self, graph: Graph) -> Tensor | None:
        """The edge types' term of the score: [E, H], in the caller's edge order."""
        if self.relation is None or self.by_relation is None:
            return None
        if graph.edge_type is None or graph.num_edge_types > self.relation.num_embeddings:
            raise ValueError(
                f"MagnaAttention has {self.relation.num_embeddings} edge types; {graph} has "
                f"{graph.num_edge_types or 'none'}"
            )
        return self._term(self.relation.weight, self.by_relation).index_select(0, graph.edge_type)

    def _term(self, mapped: Tensor, vector: Tensor) -> Tensor:
        """`v_h . tanh(mapped_h)` for each head: [..., H * D] -> [..., H]."""
        return torch.einsum("...hd,hd->...h", mapped.unflatten(-1, (self.heads, -1)).tanh(), vector)
