"""Transformer-XL's relative positions, which XLNet takes over and adds segments to: an attention by offsets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mpnn.attention import DotProduct, Terms
from mpnn.graph import Graph
from mpnn.models.parts.positions import sinusoid
from mpnn.relation import Offset, Relation
from mpnn.scores import Dot, Lookup


@dataclass(frozen=True, eq=False)
class Placed(Relation):
    """Offsets between nodes that are given their places and, it may be, segments:

        clamp(place_j - place_i, -clip, clip) + clip,   and 2 clip + 1 more where the segments differ

    `dst` and `src`: the place of each node, int64 [1, num_dst] and [1, num_src], or place and segment, [2, ...] each.
    """

    clip: int
    dst: Tensor
    src: Tensor

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.dst) * (2 * self.clip + 1)

    @property
    def has_segments(self) -> bool:
        return len(self.dst) == 2

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        offset = (self.src[0, src] - self.dst[0, dst]).clamp(-self.clip, self.clip) + self.clip
        if not self.has_segments:
            return offset
        return offset + (self.dst[1, dst] != self.src[1, src]) * (2 * self.clip + 1)


class RelativeDotProduct(DotProduct):
    """Dot-product attention with Transformer-XL's relative positions (Dai et al. 2019, section 3.3):

        score_ij = ( <W_Q x_i + u, W_K x_j> + <W_Q x_i + v, W_R P(i - j)> ) / sqrt(D)

    P are sinusoids, u and v learned for each head. Written so that one product does it all, this is

        score_ij = ( <W_Q x_i + u, W_K x_j + r_ij> + <v - u, r_ij> ) / sqrt(D),   r_ij = W_R P(i - j):

    a vector for each offset added to keys, and a number for each offset and head. XLNet (Yang et al. 2019, section 2.5)
    adds `<W_Q x_i + b, s>`, s learned for "in one segment" and for "in two": the same with s beside r and b beside v.
    These take part where the graph's relation is `Placed` with segments.

    Args:
        dim: width of the features, a multiple of `heads`. bias: whether the maps have biases.
        dropout: of attention weights, in training.
        segments: whether there are vectors for segments.
        furthest: offsets beyond it count as it; default: none do.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        segments: bool = False,
        furthest: int | None = None,
    ) -> None:
        super().__init__(dim, heads, bias=bias, dropout=dropout)
        self.furthest = furthest
        self.to_position = nn.Linear(dim, dim, bias=False)
        self.by_content, self.by_position = (nn.Parameter(torch.zeros(heads, self.head_dim)) for _ in range(2))
        self.by_segment = nn.Parameter(torch.zeros(heads, self.head_dim)) if segments else None
        self.segment = nn.Parameter(torch.randn(2, heads, self.head_dim) * 0.02) if segments else None

    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        terms = super().terms(query, key, value, graph, edge_attr)
        assert isinstance(terms.score, Dot)
        relation = graph.relation if isinstance(graph.relation, Placed) else Offset(_furthest(graph))
        vectors, numbers = self._by_offset(relation.clip)
        if isinstance(relation, Placed) and relation.has_segments:
            vectors, numbers = self._with_segments(vectors, numbers)
        heard = terms.score.query + self.by_content.to(terms.score.query.dtype)  # autocast leaves parameters wide
        score = replace(terms.score, query=heard, edge_key=Lookup(vectors, relation))
        bias = Lookup(terms.score.scale * numbers, relation)
        return replace(terms, score=score, bias=(*terms.bias, bias))

    def _by_offset(self, clip: int) -> tuple[Tensor, Tensor]:
        """r [2 clip + 1, H, D] and <v - u, r> [2 clip + 1, H] of offsets j - i from -clip to clip."""
        dtype = self.by_content.dtype
        offset = torch.arange(-clip, clip + 1, device=self.by_content.device)
        if self.furthest is not None:
            offset = offset.clamp(-self.furthest, self.furthest)
        waves = sinusoid(-offset, self.to_position.in_features, halves=True, dtype=dtype)
        vectors = self.to_position(waves).unflatten(-1, (self.heads, -1))
        return vectors, ((self.by_position - self.by_content) * vectors).sum(-1)

    def _with_segments(self, vectors: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The same for nodes of one segment, and then for nodes of two."""
        if self.segment is None or self.by_segment is None:
            raise ValueError("this attention was made without segments, but the graph's nodes have them")
        added = ((self.by_segment - self.by_content) * self.segment).sum(-1)
        return torch.cat([vectors + s for s in self.segment]), torch.cat([numbers + n for n in added])


def _furthest(graph: Graph) -> int:
    """No offset on this graph is longer than this."""
    if graph.places is None:
        return max(graph.num_dst + abs(graph.shift), graph.num_src, 1) - 1
    ends = torch.stack([end for places in graph.places for end in places.aminmax()]) if graph.num_edges else None
    return 0 if ends is None else int(ends.max() - ends.min())
