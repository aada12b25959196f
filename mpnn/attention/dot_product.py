"""Dot-product attention: the transformer's."""

from collections.abc import Sequence

from torch import Tensor, nn

from mpnn.attention.spec import KeyValue, check_integers, edges_by_head
from mpnn.graph import Graph
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge
from mpnn.position import Position
from mpnn.round import Round, validation
from mpnn.scores import Dot
from mpnn.update.maps import Linear


class DotProduct(KeyValue):
    """Multi-head dot-product attention (Vaswani et al. 2017, section 3.2).

        w_ij = softmax_j( <W_Q h_i, W_K h_j> / sqrt(D) ),   m_i = W_O || _h sum_j w_ij W_V h_j

    Args:
        dim: width of the features, a multiple of `heads`.
        bias: whether the four maps have biases.
        dropout: of attention weights, in training.
        edge_dim: width of edge attributes, which a linear map adds to keys and values (Shi et al. 2021, UniMP).
        position: a relative position from `mpnn.position`, or several.
        kv_heads: heads of keys and values, which divide `heads` (grouped queries, Ainslie et al. 2023).
        source_dim, query_dim: widths of the sources' and the destinations' features. Default: `dim`.
        normalize: "softmax", "softmax_dst", "sigmoid", "none", "sparsemax" or "entmax15"; see `mpnn.ops.attend`.
        softcap: logits become `softcap * tanh(logit / softcap)` (Gemma 2).
        head_dim: width D of a head. Default: `dim / heads`.
        scale: factor of the inner products. Default: 1 / sqrt(D).
    """

    depends_on = "node"
    reads = "to_query", "to_key"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        position: Position | Sequence[Position] | None = None,
        kv_heads: int | None = None,
        source_dim: int | None = None,
        query_dim: int | None = None,
        normalize: str = "softmax",
        softcap: float | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_integers(dim=dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, edge_dim=edge_dim)
        check_integers(source_dim=source_dim, query_dim=query_dim)
        kv_heads = heads if kv_heads is None else kv_heads
        source_dim = dim if source_dim is None else source_dim
        if heads < 1 or (head_dim is None and dim % heads):
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{kv_heads} key/value heads do not divide {heads} heads")
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.normalize = normalize
        self.dropout = dropout
        self.softcap = softcap
        self.scale = self.head_dim**-0.5 if scale is None else scale
        wide = heads * self.head_dim
        self.to_query = Linear(dim if query_dim is None else query_dim, wide, bias)
        self.to_key = Linear(source_dim, kv_heads * self.head_dim, bias)
        self.to_value = Linear(source_dim, kv_heads * self.head_dim, bias)
        self.to_out = Linear(wide, dim, bias)
        self.to_edge = None if edge_dim is None else Linear(edge_dim, wide, bias=False)
        positions = () if position is None else tuple(position) if isinstance(position, Sequence) else (position,)
        for p in positions:
            if not isinstance(p, Position):
                raise TypeError(
                    f"position must be one of mpnn.position, such as Rotary(head_dim), or several; got {p!r}"
                )
        self.positions = nn.ModuleList(positions)

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query = self.to_query(dst).unflatten(-1, (self.heads, -1))
        key = self.to_key(src).unflatten(-1, (self.kv_heads, -1))
        value = self.to_value(src).unflatten(-1, (self.kv_heads, -1))
        for position in self.positions:
            assert isinstance(position, Position)
            query, key = position.rotate(query, key, graph)
        return query, key, value

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        edge_key: PerEdge | None = None if self.to_edge is None else edges_by_head(self.to_edge, edge_attr, self.heads)
        edge_value = edge_key
        bias: list[PerEdge] = []
        for position in self.positions:
            assert isinstance(position, Position)
            bias += [b for b in (position.bias(graph, edge_attr),) if b is not None]
            edge_key = _at_most_one("key", edge_key, position.key())
            edge_value = _at_most_one("value", edge_value, position.value())
        score = Dot(query, key, self.scale, edge_key, self.softcap)
        return Round(graph, value, score, tuple(bias), edge_value)

    def merge(self, out: Tensor) -> Tensor:
        message = out.flatten(-2)
        if message.shape[-1] != self.heads * self.head_dim:
            validation.widened("DotProduct", message.shape[-1], self.heads * self.head_dim)
        return self.to_out(message)


def _at_most_one(what: str, a: PerEdge | None, b: EmbeddingTable | None) -> PerEdge | None:
    """The one that is not None. Raises ValueError if both are given: a round has one tensor for each."""
    if a is not None and b is not None:
        raise ValueError(f"only one source of vectors can be added to each edge's {what}; two were given")
    return b if a is None else a
