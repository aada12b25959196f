"""Relative positions of Transformer-XL, and those of XLNet, which adds segments."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mpnn import Graph
from mpnn.attention import DotProduct
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset, Relation
from mpnn.models.layers.positions import sinusoid
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.update.maps import Linear


@dataclass(frozen=True, eq=False)
class PositionOffset(Relation):
    """Edge types by the offset between the positions of two nodes and, optionally, by their segments:

        clamp(position_j - position_i, -clip, clip) + clip,   plus 2 clip + 1 if the segments differ

    clip: larger offsets are clamped to it. dst, src: positions of the nodes, int64 [1, num_dst] and [1, num_src]; or
    positions and segments, [2, num_dst] and [2, num_src].
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

    def stamp(self) -> Hashable | None:
        ends = self.dst, self.src
        return None if any(x.is_inference() for x in ends) else tuple((id(x), x._version) for x in ends)

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        offset = (self.src[0, src] - self.dst[0, dst]).clamp(-self.clip, self.clip) + self.clip
        if not self.has_segments:
            return offset
        return offset + (self.dst[1, dst] != self.src[1, src]) * (2 * self.clip + 1)


class RelativeDotProduct(DotProduct):
    """Dot-product attention with the relative positions of Transformer-XL (Dai et al. 2019, section 3.3):

        score_ij = ( <W_Q x_i + u, W_K x_j> + <W_Q x_i + v, W_R P(i - j)> ) / sqrt(D)

    P are sinusoids. u and v are learned for each head. With a single product, this is

        score_ij = ( <W_Q x_i + u, W_K x_j + r_ij> + <v - u, r_ij> ) / sqrt(D),   r_ij = W_R P(i - j)

    that is, one vector per offset added to keys, and one number per offset and head added to scores. XLNet (Yang et al.
    2019, section 2.5) adds `<W_Q x_i + b, s>` to the score, with one learned s for "same segment" and one for
    "different segments". These are used in the same way if the relation of the graph is `PositionOffset` with segments.

    Args:
        dim: width of the features; must be a multiple of `heads`.
        heads: number of heads.
        bias: whether the linear maps have biases.
        dropout: of attention weights, in training.
        segments: whether to learn the vectors of segments, b and s.
        furthest: larger offsets are clamped to it; default: no limit.
    """

    depends_on = "node"

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
        self.to_position = Linear(dim, dim, bias=False)
        self.by_content, self.by_position = (nn.Parameter(torch.zeros(heads, self.head_dim)) for _ in range(2))
        self.by_segment = nn.Parameter(torch.zeros(heads, self.head_dim)) if segments else None
        self.segment = nn.Parameter(torch.randn(2, heads, self.head_dim) * 0.02) if segments else None

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        round = super().round(query, key, value, graph, edge_attr)
        assert isinstance(round.score, Dot)
        relation = graph.relation if isinstance(graph.relation, PositionOffset) else Offset(_max_offset(graph))
        vectors, biases = self._offset_tables(relation.clip)
        if isinstance(relation, PositionOffset) and relation.has_segments:
            vectors, biases = self._with_segments(vectors, biases)
        query = round.score.query + self.by_content.to(round.score.query.dtype)  # autocast does not cast parameters
        score = replace(round.score, query=query, edge_key=EmbeddingTable(vectors, relation))
        bias = BiasTable(round.score.scale * biases, relation)
        return replace(round, score=score, bias=(*round.bias, bias))

    def _offset_tables(self, clip: int) -> tuple[Tensor, Tensor]:
        """Returns r [2 clip + 1, H, D] and <v - u, r> [2 clip + 1, H] for offsets j - i from -clip to clip."""
        dtype = self.by_content.dtype
        offsets = torch.arange(-clip, clip + 1, device=self.by_content.device)
        if self.furthest is not None:
            offsets = offsets.clamp(-self.furthest, self.furthest)
        waves = sinusoid(-offsets, self.to_position.in_features, halves=True, dtype=dtype)
        vectors = self.to_position(waves).unflatten(-1, (self.heads, -1))
        return vectors, ((self.by_position - self.by_content) * vectors).sum(-1)

    def _with_segments(self, vectors: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both tables for nodes of the same segment, followed by those for nodes of different segments."""
        if self.segment is None or self.by_segment is None:
            raise ValueError("the nodes of the graph have segments; create this attention with segments=True")
        segment_bias = ((self.by_segment - self.by_content) * self.segment).sum(-1)
        return torch.cat([vectors + s for s in self.segment]), torch.cat([biases + b for b in segment_bias])


def _max_offset(graph: Graph) -> int:
    """Returns an upper bound of the absolute offsets of the edges."""
    if graph.positions is None:
        return max(graph.num_dst + abs(graph.shift), graph.num_src, 1) - 1
    if not graph.num_edges:
        return 0
    ends = torch.stack([end for positions in graph.positions for end in positions.aminmax()])
    return int(ends.max() - ends.min())
