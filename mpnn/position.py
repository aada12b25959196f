"""Relative positions: terms that depend on the offset between the two ends of an edge.

A position spec rotates queries and keys (rotary), adds a number per edge type and head to the score (ALiBi, T5), or
adds a vector per edge type to keys and values (Shaw). Each depends on offsets only, so it works on any graph over a
sequence, and none builds an N x N matrix.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable, PerEdge
from mpnn.graph.relations import Offset, Relation


class Position(nn.Module):
    """A relative position. Subclasses override the methods they use."""

    def rotate(self, query: Tensor, key: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """Transforms queries [..., N_dst, H, D] and keys [..., N_src, H_kv, D] before their inner products."""
        return query, key

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> PerEdge | None:
        """Returns a number per edge type and head, [edge types, H], or per edge and head, [E, H] in the caller's
        order."""
        return None

    def key(self) -> EmbeddingTable | None:
        """Returns a vector per edge type that is added to keys, [edge types, 1 or H, D]."""
        return None

    def value(self) -> EmbeddingTable | None:
        """Returns a vector per edge type that is added to values, [edge types, 1 or H, D]."""
        return None


class Rotary(Position):
    """Rotary positions (Su et al. 2021): each pair of components is rotated by an angle proportional to the
    position, so that a score depends on the offset only.

        angle_k(p) = p * base^(-2k / D) / factor

    Pairs are (k, k + D/2), as in Llama. `dim` is the width of a head, an even number. A `factor` above 1 maps
    sequences that are `factor` times longer to the angles of training (position interpolation, Chen et al. 2023).
    """

    def __init__(self, dim: int, base: float = 10000.0, factor: float = 1.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary positions need an even head width; got {dim}")
        self.dim = dim
        self.frequencies = tuple(base ** (-2 * k / dim) / factor for k in range(dim // 2))

    def rotate(self, query: Tensor, key: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        for x in (query, key):
            if x.shape[-1] != self.dim:
                raise ValueError(f"these rotary positions are for heads of width {self.dim}; got {x.shape[-1]}")
        if type(self).angles is Rotary.angles and "angles" not in vars(self):
            of_dst, of_src = graph.cached(("rotary", tuple(self.frequencies)), lambda: self.angles(graph))
        else:  # a subclass may read more than frequencies
            of_dst, of_src = self.angles(graph)
        return _rotate(query, of_dst), _rotate(key, of_src)

    def angles(self, graph: Graph) -> list[tuple[Tensor, Tensor]]:
        """Returns cosine and sine for destinations and for sources, [N, 1, D / 2]. In float64, because rounded
        frequencies give wrong angles at large positions."""
        frequency = torch.tensor(self.frequencies, dtype=torch.float64, device=graph.device)
        angles = [(positions[:, None] * frequency)[:, None] for positions in graph.node_positions()]
        return [(angle.cos(), angle.sin()) for angle in angles]


class Llama3Rotary(Rotary):
    """Rotary positions with Llama 3.1's context extension (Grattafiori et al. 2024, section 3.4.2; the rule is that of
    the published code). Pairs with more than `fast` rotations over the `context` of training keep their frequency. The
    frequency of pairs with fewer than `slow` rotations is divided by `factor`. Those between are interpolated.
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

        def scale(frequency: float) -> float:
            rotations = context * frequency / (2 * math.pi)
            share = min(max((rotations - slow) / (fast - slow), 0.0), 1.0)
            return frequency * (share + (1 - share) / factor)

        self.frequencies = tuple(map(scale, self.frequencies))


class ALiBi(Position):
    """A penalty linear in the distance, with a slope for each head (Press et al. 2022): `-slope_h * |i - j|`.

    Slopes are the paper's geometric sequence, 2^(-8 / H), 2^(-16 / H), .... If H is not a power of two, they are those
    of the next smaller power of two P, followed by every second slope of 2 P heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        at_least("heads", heads, 1)
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2.0 ** (-8.0 * (k + 1) / power) for k in range(power)]
        between = [2.0 ** (-4.0 * (k + 1) / power) for k in range(0, 2 * power, 2)]
        self.slopes = slopes + between[: heads - power]

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> PerEdge:
        slopes = tuple(map(float, self.slopes))
        return graph.cached(("alibi", type(self), slopes), lambda: _by_offset(graph, self._penalty))

    def _penalty(self, offset: Tensor) -> Tensor:
        return -offset.abs()[:, None] * torch.tensor(self.slopes, dtype=torch.float64, device=offset.device)


class Shaw(Position):
    """A learned vector for each clipped offset, added to keys and to values (Shaw et al. 2018, eq. 3 and 4).

    `dim` is the width of a head; offsets beyond `max_distance` share their vectors; all heads share one table.
    """

    def __init__(self, dim: int, max_distance: int, values: bool = True) -> None:
        super().__init__()
        self.relation = Offset(at_least("max_distance", max_distance, 0))
        self.keys = nn.Parameter(torch.randn(self.relation.count, 1, dim) * dim**-0.5)
        self.values = nn.Parameter(torch.randn(self.relation.count, 1, dim) * dim**-0.5) if values else None

    def key(self) -> EmbeddingTable:
        return EmbeddingTable(self.keys, self.relation)

    def value(self) -> EmbeddingTable | None:
        return None if self.values is None else EmbeddingTable(self.values, self.relation)


class Table(Position):
    """A learned number for each edge type and head (Swin's table, Graphormer's spatial encoding, clipped offsets).

    `relation` is the rule that gives the edge types. If it is None, they are the graph's, and `relations` is their
    number.
    """

    def __init__(self, heads: int, relation: Relation | None = None, relations: int | None = None) -> None:
        super().__init__()
        count = relations if relation is None else relation.count
        if count is None:
            raise ValueError("pass relation, or relations, the number of the graph's edge types")
        self.relation = relation
        self.table = nn.Parameter(torch.zeros(count, heads))

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> BiasTable:
        return BiasTable(self.table, graph.edge_type_rule if self.relation is None else self.relation)


class T5(Position):
    """A learned number for each bucket of offsets and head (Raffel et al. 2020): one bucket for each small offset, then
    logarithmically wider buckets up to `max_distance`.

    If `bidirectional`, half of the buckets are for later sources; otherwise all later sources are in the first bucket.
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        exact = buckets // 2 // (2 if bidirectional else 1)
        if not 0 < exact < max_distance:
            raise ValueError(
                f"of {buckets} buckets {exact} hold one offset each; there must be at least one, and fewer than "
                f"max_distance={max_distance}"
            )
        self.table = nn.Parameter(torch.zeros(buckets, heads))
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> PerEdge:
        accumulate_dtype = torch.promote_types(self.table.dtype, torch.float32)  # for the sum of a bucket's gradients
        return _by_offset(graph, lambda offset: self.table.to(accumulate_dtype).index_select(0, self.bucket(offset)))

    def bucket(self, offset: Tensor) -> Tensor:
        """Returns the bucket of each offset j - i, int64."""
        buckets = len(self.table)
        if self.bidirectional:
            buckets //= 2
            later = (offset > 0) * buckets
            distance = offset.abs()
        else:
            later = torch.zeros_like(offset)
            distance = (-offset).clamp(min=0)
        exact = buckets // 2
        ratio = (distance.clamp(min=1) / exact).log() / math.log(self.max_distance / exact)
        wide = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return later + torch.where(distance < exact, distance, wide)


class EdgeBias(Position):
    """A number for each edge and head, linear in the edge's attributes (Ying et al. 2021, 3.1): [E, edge_dim], or [E]
    if edge_dim is 1."""

    def __init__(self, edge_dim: int, heads: int) -> None:
        super().__init__()
        self.to_bias = nn.Linear(edge_dim, heads, bias=False)

    def bias(self, graph: Graph, edge_attr: Tensor | None = None) -> Tensor:
        if edge_attr is None:
            raise ValueError("EdgeBias needs edge attributes; the graph or the call must provide edge_attr")
        shape = list(edge_attr.shape)
        edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
        if edge_attr.shape[-1] != self.to_bias.in_features:
            raise ValueError(f"EdgeBias has edge_dim={self.to_bias.in_features}; got edge_attr {shape}")
        return self.to_bias(edge_attr)


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (k, k + D/2) of x by angles, given as cosines and sines."""
    cos, sin = (t.to(x.dtype) for t in angles)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _by_offset(graph: Graph, number: Callable[[Tensor], Tensor]) -> PerEdge:
    """The bias `number(j - i)`, where `number` maps offsets [n] to [n, H]: a table of all offsets the graph can have,
    or one row per edge if the graph has explicit positions, which may be far apart."""
    if graph.positions is not None:
        dst, src = graph.edge_positions()
        return number(src - dst)
    relation = Offset(max(graph.num_dst + abs(graph.shift), graph.num_src, 1) - 1)
    return BiasTable(number(torch.arange(relation.count, device=graph.device) - relation.clip), relation)
