"""Relative positions: what an edge's offset adds to its score.

A position spec turns queries and keys (rotary), adds a number per relation and head to the score (ALiBi, T5), or adds
a vector per relation to keys and values (Shaw). All of them speak of the offset between the two ends of an edge, so
they hold on any graph over a sequence, and none builds an N x N matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.relation import Offset, Relation
from mpnn.scores import Lookup, PerEdge


class Position(nn.Module):
    """A relative position; subclasses override the parts they use."""

    def turn(self, query: Tensor, key: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """Queries [..., N_dst, H, D] and keys [..., N_src, H_kv, D] before their products are taken."""
        return query, key

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> PerEdge | None:
        """A number per relation and head, [relations, H], or per edge and head, [E, H] in the caller's order."""
        return None

    def key(self) -> Lookup | None:
        """A vector per relation added to keys, [relations, 1 or H, D]."""
        return None

    def value(self) -> Lookup | None:
        """A vector per relation added to values, [relations, 1 or H, D]."""
        return None


class Rotary(Position):
    """Rotary positions (Su et al. 2021): each pair of components turned by an angle that grows with the position, so
    that a score depends on the offset alone.

        angle_k(p) = p * base^(-2k / D) / factor

    Pairs are (k, k + D/2), as in Llama. `dim` is the width of a head, an even number. A `factor` above 1 squeezes as
    many times longer sequences into the angles that a model was trained on (position interpolation, Chen et al. 2023).
    """

    def __init__(self, dim: int, base: float = 10000.0, factor: float = 1.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary positions need an even head width; got {dim}")
        self.dim = dim
        self.frequencies = tuple(base ** (-2 * k / dim) / factor for k in range(dim // 2))

    def turn(self, query: Tensor, key: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        for x in (query, key):
            if x.shape[-1] != self.dim:
                raise ValueError(f"these rotary positions are for heads of width {self.dim}; got {x.shape[-1]}")
        of_dst, of_src = graph.memo(("rotary", self.frequencies), lambda: self._angles(graph))
        return _turned(query, of_dst), _turned(key, of_src)

    def _angles(self, graph: Graph) -> list[tuple[Tensor, Tensor]]:
        """Cosine and sine of destinations and of sources, [N, 1, D / 2]; in float64, as a position times a rounded
        frequency is far off at long range."""
        frequency = torch.tensor(self.frequencies, dtype=torch.float64, device=graph.device)
        angles = [(at[:, None] * frequency)[:, None] for at in graph.where()]
        return [(angle.cos(), angle.sin()) for angle in angles]


class Llama3Rotary(Rotary):
    """Rotary positions that stretch a model's reach as Llama 3.1 does (Grattafiori et al. 2024, section 3.4.2; the rule
    is that of its published code): pairs that turn more than `fast` times over the `context` of the training keep their
    frequency, those that turn less than `slow` times have it divided by `factor`, and those between are blended.
    """

    def __init__(
        self,
        dim: int,
        base: float = 500000.0,
        factor: float = 8.0,
        slow: float = 1.0,
        fast: float = 4.0,
        context: int = 8192,
    ) -> None:
        super().__init__(dim, base)

        def stretched(frequency: float) -> float:
            turns = context * frequency / (2 * math.pi)
            kept = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
            return frequency * (kept + (1 - kept) / factor)

        self.frequencies = tuple(map(stretched, self.frequencies))


class ALiBi(Position):
    """A penalty linear in the distance, with a slope for each head (Press et al. 2022): `-slope_h * |i - j|`.

    Slopes are the geometric sequence of the paper, 2^(-8 / H), 2^(-16 / H), ...; for H no power of two, those of the
    next smaller power of two and then every other one of twice that.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads must be at least 1; got {heads}")
        self.slopes = _alibi_slopes(heads)

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> PerEdge:
        return graph.memo(("alibi", len(self.slopes)), lambda: _by_offset(graph, self._penalty))

    def _penalty(self, offset: Tensor) -> Tensor:
        return -offset.abs()[:, None] * torch.tensor(self.slopes, dtype=torch.float64, device=offset.device)


class Shaw(Position):
    """A learned vector for each clipped offset, added to keys and to values (Shaw et al. 2018, eq. 3 and 4).

    `dim` is the width of a head; offsets beyond `max_distance` share their vectors; all heads share one table.
    """

    def __init__(self, dim: int, max_distance: int, values: bool = True) -> None:
        super().__init__()
        if max_distance < 0:
            raise ValueError(f"max_distance must not be negative; got {max_distance}")
        self.relation = Offset(max_distance)
        self.keys = nn.Parameter(torch.randn(self.relation.count, 1, dim) * dim**-0.5)
        self.values = nn.Parameter(torch.randn(self.relation.count, 1, dim) * dim**-0.5) if values else None

    def key(self) -> Lookup:
        return Lookup(self.keys, self.relation)

    def value(self) -> Lookup | None:
        return None if self.values is None else Lookup(self.values, self.relation)


class Table(Position):
    """A learned number for each relation and head (Swin's table, Graphormer's spatial encoding, clipped offsets).

    `relation` is the rule of the classes; with None they are those of the graph's edges, `relations` in number.
    """

    def __init__(self, heads: int, relation: Relation | None = None, relations: int | None = None) -> None:
        super().__init__()
        count = relations if relation is None else relation.count
        if count is None:
            raise ValueError("give the relation, or the number of relations that the graph's edges have")
        self.relation = relation
        self.table = nn.Parameter(torch.zeros(count, heads))

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> Lookup:
        return Lookup(self.table, graph.class_rule if self.relation is None else self.relation)


class T5(Position):
    """A learned number for each bucket of offsets and head (Raffel et al. 2020): one bucket for each near offset, then
    wider ones, logarithmic up to `max_distance`.

    `bidirectional` gives half of the buckets to later sources; otherwise those fall into the first.
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        exact = buckets // 2 // (2 if bidirectional else 1)
        if not 0 < exact < max_distance:
            raise ValueError(
                f"of {buckets} buckets {exact} hold one offset each; there must be at least one such, and fewer than "
                f"max_distance, {max_distance}"
            )
        self.table = nn.Parameter(torch.zeros(buckets, heads))
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> PerEdge:
        wide = torch.promote_types(self.table.dtype, torch.float32)  # in which the gradients of a bucket are summed
        return _by_offset(graph, lambda offset: self.table.to(wide).index_select(0, self.bucket(offset)))

    def bucket(self, offset: Tensor) -> Tensor:
        """The bucket of each offset j - i, int64."""
        buckets = len(self.table)
        if self.bidirectional:
            buckets //= 2
            later, distance = (offset > 0) * buckets, offset.abs()
        else:
            later, distance = torch.zeros_like(offset), (-offset).clamp(min=0)
        exact = buckets // 2
        ratio = (distance.clamp(min=1) / exact).log() / math.log(self.max_distance / exact)
        wide = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return later + torch.where(distance < exact, distance, wide)


class EdgeBias(Position):
    """A number for each edge and head, linear in the edge's attributes (Ying et al. 2021, 3.1): [E, edge_dim], or [E]
    when there is one an edge."""

    def __init__(self, edge_dim: int, heads: int) -> None:
        super().__init__()
        self.to_bias = nn.Linear(edge_dim, heads, bias=False)

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> Tensor:
        if edge_attr is None:
            raise ValueError("EdgeBias needs edge attributes; the graph or the call must give edge_attr")
        given = list(edge_attr.shape)
        edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
        if edge_attr.shape[-1] != self.to_bias.in_features:
            raise ValueError(f"EdgeBias was made with edge_dim={self.to_bias.in_features}; got {given}")
        return self.to_bias(edge_attr)


def _turned(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t.to(x.dtype) for t in by)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _by_offset(graph: Graph, number: Callable[[Tensor], Tensor]) -> PerEdge:
    """What `number` makes of offsets j - i, [n] -> [n, H]: a table of all that this graph can have; edge by edge
    where its nodes have places of their own, which may lie far apart."""
    if graph.places is not None:
        dst, src = graph.ends()
        return number(src - dst)
    relation = Offset(max(graph.num_dst + abs(graph.shift), graph.num_src, 1) - 1)
    return Lookup(number(torch.arange(relation.count, device=graph.device) - relation.clip), relation)


def _alibi_slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (k + 1) / power) for k in range(power)]
    between = [2.0 ** (-4.0 * (k + 1) / power) for k in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]
