"""Attention specs: how much a destination listens to each source, and what it hears.

Each owns its weights. `forward` turns features into `Terms`, the numbers that go along the edges; `merge` turns what
arrived into the message. Backends run the terms; a spec never computes an edge itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.position import Position
from mpnn.scores import Activation, AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Lookup, PerEdge, Score


@dataclass(frozen=True, eq=False)
class Terms:
    """What an attention spec says of a graph's edges; see `mpnn.scores.Request` for shapes.

    `graph` replaces the operator's where a spec spreads its messages over other destinations.
    """

    value: Tensor
    score: Score | None = None
    bias: tuple[PerEdge, ...] = ()
    edge_value: PerEdge | None = None
    graph: Graph | None = None


class Attention(nn.Module, ABC):
    """An attention spec: `forward` gives the terms, `merge` the message; `normalize` and `dropout` say the rest.

    To add one, subclass this. A score that none of `mpnn.scores` expresses is given as a bias, [..., E, H] in the
    caller's edge order, made from `graph.edge_index`.
    """

    normalize: str = "softmax"
    dropout: float = 0.0

    @abstractmethod
    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        """Terms for destinations [..., N_dst, d] and sources [..., N_src, d]; edge_attr [E, ...] in caller's order."""

    def merge(self, out: Tensor) -> Tensor:
        """What arrived, [..., N_dst, H, D], as the message [..., N_dst, F]; default: heads side by side."""
        return out.flatten(-2)


class KeyValue(Attention):
    """Attention by queries, keys and values that follow from each node alone, so that those of nodes that were there
    before can be kept (`mpnn.decoding`)."""

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        return self.terms(*self.mapped(dst, src, graph), graph, edge_attr)

    @abstractmethod
    def mapped(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., N_dst, H, D], keys and values [..., N_src, H_kv, D], turned to where their nodes stand: what
        follows from each node alone, edges aside."""

    @abstractmethod
    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        """The terms of what `mapped` gave."""


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
        source_dim, query_dim: widths of the sources' and the destinations' features where they differ from `dim`.
        normalize: "softmax", "sigmoid" or "none".
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        head_dim: width D of a head where it differs from `dim / heads`.
        scale: of the scores where it differs from 1 / sqrt(D).
    """

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
        kv_heads = heads if kv_heads is None else kv_heads
        source_dim = dim if source_dim is None else source_dim
        if heads < 1 or (head_dim is None and dim % heads):
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{kv_heads} key/value heads do not divide {heads} heads")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads if head_dim is None else head_dim
        self.normalize, self.dropout, self.softcap = normalize, dropout, softcap
        self.scale = self.head_dim**-0.5 if scale is None else scale
        wide = heads * self.head_dim
        self.to_query = nn.Linear(dim if query_dim is None else query_dim, wide, bias)
        self.to_key = nn.Linear(source_dim, kv_heads * self.head_dim, bias)
        self.to_value = nn.Linear(source_dim, kv_heads * self.head_dim, bias)
        self.to_out = nn.Linear(wide, dim, bias)
        self.to_edge = None if edge_dim is None else nn.Linear(edge_dim, wide, bias=False)
        given = () if position is None else (position,) if isinstance(position, Position) else tuple(position)
        self.positions = nn.ModuleList(given)

    def mapped(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query = self.to_query(dst).unflatten(-1, (self.heads, -1))
        key = self.to_key(src).unflatten(-1, (self.kv_heads, -1))
        value = self.to_value(src).unflatten(-1, (self.kv_heads, -1))
        for position in self.positions:
            assert isinstance(position, Position)
            query, key = position.turn(query, key, graph)
        return query, key, value

    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        on_key: PerEdge | None = None if self.to_edge is None else _mapped(self.to_edge, edge_attr, self.heads)
        on_value = on_key
        bias: list[PerEdge] = []
        for position in self.positions:
            assert isinstance(position, Position)
            bias += [b for b in (position.bias(graph, edge_attr),) if b is not None]
            on_key = _one("key", on_key, position.key())
            on_value = _one("value", on_value, position.value())
        score = Dot(query, key, self.scale, on_key, self.softcap)
        return Terms(value, score, tuple(bias), on_value)

    def merge(self, out: Tensor) -> Tensor:
        return self.to_out(out.flatten(-2))


def _mapped(to_edge: nn.Linear, edge_attr: Tensor | None, heads: int) -> Tensor:
    """A vector for each edge and head, [E, H, D], from attributes [E, edge_dim], or [E] when there is one an edge."""
    if edge_attr is None:
        raise ValueError("this attention was made with edge_dim, so the graph or the call must give edge_attr")
    return to_edge(edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr).unflatten(-1, (heads, -1))


def _one(what: str, a: PerEdge | None, b: Lookup | None) -> PerEdge | None:
    if a is not None and b is not None:
        raise ValueError(f"only one source of vectors can be added to each edge's {what}; two were given")
    return b if a is None else a


class Additive(Attention):
    """Additive attention as in GAT (Velickovic et al. 2018, eq. 1-6).

        w_ij = softmax_j( LeakyReLU( a_dst . W h_i + a_src . W h_j [+ a_edge . W_e e_ij] ) )
        m_i  = || _h sum_j w_ij W h_j

    Args:
        in_dim: width of the features. out_dim: width of each head. heads: their number.
        concat: heads side by side (`heads * out_dim`), else their mean (`out_dim`).
        negative_slope: of the LeakyReLU. dropout: of attention weights, in training.
        edge_dim: width of edge attributes that take part in the score.
        bias: whether a learned bias is added to the message.
    """

    one_map = True  # listeners and sources go through the same one

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
        self.heads, self.concat, self.dropout = heads, concat, dropout
        self.activation = LeakyReLU(negative_slope)
        self.to_value = nn.Linear(in_dim, heads * out_dim, bias=False)
        self.by_src = nn.Parameter(torch.empty(heads, out_dim))
        self.by_dst = nn.Parameter(torch.empty(heads, out_dim))
        self.to_edge = None if edge_dim is None else nn.Linear(edge_dim, heads * out_dim, bias=False)
        self.by_edge = None if edge_dim is None else nn.Parameter(torch.empty(heads, out_dim))
        self.bias = nn.Parameter(torch.zeros(heads * out_dim if concat else out_dim)) if bias else None
        for weight in (self.to_value.weight, self.by_src, self.by_dst, self.by_edge):
            if weight is not None:
                nn.init.xavier_uniform_(weight)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        value = self.to_value(src).unflatten(-1, (self.heads, -1))
        listener = value if dst is src and self.one_map else self.query(dst)
        edge = None
        if self.to_edge is not None and self.by_edge is not None:
            edge = _by_head(_mapped(self.to_edge, edge_attr, self.heads), self.by_edge)
        by_dst, by_src = _by_head(listener, self.by_dst), _by_head(value, self.by_src)
        return Terms(value, AdditiveScore(by_dst, by_src, self.activation, edge))

    def query(self, dst: Tensor) -> Tensor:
        """W h_i, [..., N_dst, H, D]."""
        return self.to_value(dst).unflatten(-1, (self.heads, -1))

    def merge(self, out: Tensor) -> Tensor:
        return _joined(out, self.concat, self.bias)


def _by_head(x: Tensor, vector: Tensor) -> Tensor:
    """`<x_h, vector_h>` for each head, [..., H] of x [..., H, D] and vector [H, D]: one product with a matrix that is
    zero between heads, which takes no room for x times vector."""
    heads = len(vector)
    apart = torch.eye(heads, dtype=vector.dtype, device=vector.device)[:, :, None] * vector
    return F.linear(x.flatten(-2), apart.flatten(1))


class AdditiveV2(KeyValue):
    """Additive attention whose ranking of sources depends on the listener: GATv2 (Brody et al. 2022, eq. 7) and, with
    `activation=torch.tanh`, Bahdanau et al. 2015.

        w_ij = softmax_j( a . act( W_dst h_i + W_src h_j [+ W_e e_ij] ) ),   m_i = || _h sum_j w_ij W_src h_j

    Args as `Additive`; `source_dim` is the width of the sources' features where it differs from `in_dim`, `share` makes
    W_dst and W_src one map, `bias` gives the maps and the message biases. Without `map_value` the sources are heard as
    they are (Bahdanau), `m_i = || _h sum_j w_ij h_j`, and the message has no bias.
    """

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
        self.heads, self.concat, self.dropout, self.map_value = heads, concat, dropout, map_value
        self.activation = LeakyReLU() if activation is None else activation
        self.to_value = nn.Linear(in_dim if source_dim is None else source_dim, heads * out_dim, bias)
        self.to_query = self.to_value if share else nn.Linear(in_dim, heads * out_dim, bias)
        self.to_edge = None if edge_dim is None else nn.Linear(edge_dim, heads * out_dim, bias=False)
        self.vector = nn.Parameter(torch.empty(heads, out_dim))
        self.bias = nn.Parameter(torch.zeros(heads * out_dim if concat else out_dim)) if bias and map_value else None
        nn.init.xavier_uniform_(self.vector)

    def mapped(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query, key = self.to_query(dst), self.to_value(src).unflatten(-1, (self.heads, -1))
        return query.unflatten(-1, (self.heads, -1)), key, key if self.map_value else src.unsqueeze(-2)

    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        edge = None if self.to_edge is None else _mapped(self.to_edge, edge_attr, self.heads)
        return Terms(value, AdditiveV2Score(query, key, self.vector, self.activation, edge))

    def merge(self, out: Tensor) -> Tensor:
        return _joined(out, self.concat, self.bias)


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
        return _joined(out, True, self.bias)


def degree_weights(graph: Graph, weight: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """`a_ij / sqrt(d_i d_j)` for each edge, [E] in the caller's order; isolated ends count as weight 0."""
    src, dst = graph.edge_index
    weight = torch.ones(graph.num_edges, dtype=dtype, device=graph.device) if weight is None else weight
    degree = weight.new_zeros(graph.num_dst).index_add(0, dst, weight)
    inverse = torch.where(
        degree > 0, degree.clamp(min=torch.finfo(degree.dtype).tiny).rsqrt(), torch.zeros_like(degree)
    )
    return inverse[dst] * weight * inverse[src]


class Kernel(KeyValue):
    """Linear attention: weights are products of positive features, so that sums over sources can be taken before any
    destination is known; over complete and causal graphs the cost is linear in the nodes.

        w_ij = <phi(W_Q h_i), phi(W_K h_j)>,   m_i = W_O || _h ( sum_j w_ij W_V h_j / sum_j w_ij )

    With a number of `features`, Performer's (Choromanski et al. 2021), softmax's weights in expectation (lemma 1):

        phi(x) = exp(omega x - |x|^2 / 2) / sqrt(features) of x / D^(1/4),   omega random and orthogonal in blocks

    With "elu", those of Katharopoulos et al. 2020 (eq. 7): phi(x) = elu(x) + 1, as many features as a head is wide.
    The sum of weights travels as one more value; weights that are asked for come without it, each row up to a factor.

    Args:
        dim: width of the features, a multiple of `heads`. features: how many random directions, more being closer to
            softmax; or "elu". bias: whether the four maps have biases. seed: of the directions, which are saved with
            the module.
    """

    normalize = "none"
    directions: Tensor | None

    def __init__(
        self, dim: int, heads: int, *, features: int | Literal["elu"] = 256, bias: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if features != "elu" and (not isinstance(features, int) or features < 1):
            raise ValueError(f'features must be at least 1, or "elu"; got {features!r}')
        self.heads, self.head_dim = heads, dim // heads
        self.to_query, self.to_key, self.to_value, self.to_out = (nn.Linear(dim, dim, bias) for _ in range(4))
        self.register_buffer("directions", None if features == "elu" else _orthogonal(features, self.head_dim, seed))

    def mapped(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            to(x).unflatten(-1, (self.heads, -1))
            for to, x in ((self.to_query, dst), (self.to_key, src), (self.to_value, src))
        )
        return query, key, value

    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        # A factor for each query, and one for all keys of a head, cancel; they keep exponentials from overflowing.
        score = Dot(self._features(query, (-1,)), self._features(key, (-3, -1)), 1.0)
        return Terms(value, score)

    def merge(self, out: Tensor) -> Tensor:
        total = out[..., -1:]
        return self.to_out((out[..., :-1] / torch.where(total == 0, torch.ones_like(total), total)).flatten(-2))

    def _features(self, x: Tensor, common: tuple[int, ...]) -> Tensor:
        """phi(x) [..., N, H, features] of x [..., N, H, D], up to a factor that is common to these dimensions."""
        if self.directions is None:
            return F.elu(x) + 1
        x = x * self.head_dim**-0.25
        half = x.square().sum(-1, keepdim=True) / 2
        exponent = x @ self.directions.to(x.dtype).T
        if not exponent.numel():
            return exponent
        top = (exponent.detach().amax(-1, keepdim=True) - half.detach()).amax(common, keepdim=True)
        # In place: the features are the largest tensor of a layer, and its room is taken once.
        return exponent.sub_(half + top + log(len(self.directions)) / 2).exp_()


def _orthogonal(count: int, dim: int, seed: int) -> Tensor:
    """[count, dim]: normal vectors, orthogonal to one another in blocks of `dim` (the paper's section 2.4)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(-(-count // dim)):
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
        blocks.append((q * r.diagonal().sign()).T)  # without the signs, directions would lean to one side
    lengths = torch.randn(count, dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:count] * lengths


class Typed(Attention):
    """A linear map for each class of edges: R-GCN (Schlichtkrull et al. 2018, eq. 2 without its self-connection), GGNN,
    and convolution, where an edge's class is its relative position.

        m_i = sum_r W_r reduce_{j in N_r(i)} h_j

    The classes are the graph's (`edge_type`, or the rule of its topology); a graph without any has one class. Messages
    are gathered class by class and then mapped, so a convolution costs what im2col costs. With "sum" this is the sum
    of `W_r h_j`; with "mean" each class has its own mean, R-GCN's 1 / |N_r(i)|.
    """

    normalize = "none"

    def __init__(self, in_dim: int, out_dim: int, relations: int, *, bias: bool = True) -> None:
        super().__init__()
        self.relations = relations
        self.weight = nn.Parameter(torch.empty(relations, in_dim, out_dim))
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        by_class = graph.derived(_by_class, self.relations, num_dst=graph.num_dst * self.relations)
        return Terms(src.unsqueeze(-2), graph=by_class)

    def merge(self, out: Tensor) -> Tensor:
        return _joined((self.gathered(out) @ self.maps().flatten(0, 1)).unsqueeze(-2), True, self.bias)

    def gathered(self, out: Tensor) -> Tensor:
        """What a node heard, class by class and side by side, [..., N, relations * in_dim]."""
        return out.squeeze(-2).unflatten(-2, (-1, self.relations)).flatten(-2)

    def maps(self) -> Tensor:
        """W, [relations, in_dim, out_dim]."""
        return self.weight


def _by_class(graph: Graph, relations: int) -> Graph:
    """Destination i becomes `relations` destinations, one for each class: i * relations + class."""
    if graph.edge_type is None and relations == 1:
        return graph
    if graph.edge_type is None:
        raise ValueError(f"Typed needs a graph whose edges have classes, and {graph} has none: give edge_type")
    if graph.num_relations > relations:
        raise ValueError(f"the graph has {graph.num_relations} classes of edges, but this layer has {relations} maps")
    src, dst = graph.edge_index
    edges = torch.stack([src, dst * relations + graph.edge_type])
    return Graph.from_edges(edges, graph.num_dst * relations, graph.num_src)


def _joined(out: Tensor, concat: bool, bias: Tensor | None) -> Tensor:
    out = out.flatten(-2) if concat else out.mean(-2)
    return out if bias is None else out + bias
