"""What an attention spec is: how much a destination listens to each source, and what it hears.

Each owns its weights. `forward` turns features into `Terms`, the numbers that go along the edges; `merge` turns what
arrived into the message. Backends run the terms; a spec never computes an edge itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from mpnn import check
from mpnn.graph import Graph
from mpnn.scores import Lookup, PerEdge, Score

ANY: check.Takes = (None, None)


@dataclass(frozen=True, eq=False)
class Terms:
    """What an attention spec says of a graph's edges; see `mpnn.scores.Request` for shapes.

    `graph` replaces the operator's where a spec spreads its messages over other destinations.

    Raises:
        ValueError, TypeError: a part that lacks the dimension of heads, or is something else altogether.
    """

    value: Tensor
    score: Score | None = None
    bias: tuple[PerEdge, ...] = ()
    edge_value: PerEdge | None = None
    graph: Graph | None = None

    def __post_init__(self) -> None:
        if self.value.dim() < 3:
            raise ValueError(
                f"value is [..., N_src, H, D]; got {list(self.value.shape)}: for one head, value.unsqueeze(-2)"
            )
        if self.score is not None and not isinstance(self.score, Score):
            raise TypeError(
                f"score is a Dot, AdditiveScore or AdditiveV2Score; got {type(self.score).__name__}: give any other "
                "score as a bias for each edge"
            )
        if not isinstance(self.bias, tuple):
            raise TypeError(f"bias is a tuple, bias=(numbers,); got {type(self.bias).__name__}")
        for bias in self.bias:
            if not isinstance(bias, (Tensor, Lookup)):
                raise TypeError(f"a bias is a tensor [..., E, H] or a Lookup; got {type(bias).__name__}")
            if isinstance(bias, Tensor) and bias.dim() < 2:
                raise ValueError(f"a bias is [..., E, H]; got {list(bias.shape)}: for one head, bias[:, None]")


class Attention(nn.Module, ABC):
    """An attention spec: `forward` gives the terms, `merge` the message; `normalize` and `dropout` say the rest.
    `balanced`: weights that need no normaliser, because they are made to suit the edges that are there, as GCN's are.

    To add one, subclass this. A score that none of `mpnn.scores` expresses is given as a bias, [..., E, H] in the
    caller's edge order, made from `graph.edge_index`.
    """

    normalize: str = "softmax"
    dropout: float = 0.0
    balanced: bool = False

    @abstractmethod
    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        """Terms for destinations [..., N_dst, d] and sources [..., N_src, d]; edge_attr [E, ...] in caller's order."""

    def takes(self) -> tuple[check.Takes, check.Takes]:
        """The width and the type of the features that destinations and that sources must have, see `check.takes`."""
        return ANY, ANY

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
