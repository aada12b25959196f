"""The base classes of attention specs.

A spec owns its parameters. `forward` maps features to `Terms`: the score, biases and values of the edges. `merge` maps
the aggregated heads to the message. Backends run the terms; a spec does not compute edges itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.request import validation
from mpnn.request.scores import Score
from mpnn.request.tables import EmbeddingTable, PerEdge

ANY: validation.Takes = (None, None)


@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of attention along the edges of a graph. See `mpnn.request.request.Request` for shapes.

    `graph`, if not None, replaces the operator's graph; a spec sets it to send messages to other destinations.

    Raises:
        ValueError: if a tensor lacks the dimension of heads.
        TypeError: if a term has an unsupported type.
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
        if self.score is not None and not hasattr(self.score, "logits"):
            validation.score(self.score)
        if not isinstance(self.bias, tuple):
            raise TypeError(f"bias is a tuple, bias=(numbers,); got {type(self.bias).__name__}")
        for bias in self.bias:
            if not isinstance(bias, (Tensor, EmbeddingTable)):
                raise TypeError(f"a bias is a tensor [..., E, H] or a BiasTable; got {type(bias).__name__}")
            if isinstance(bias, Tensor) and bias.dim() < 2:
                raise ValueError(f"a bias is [..., E, H]; got {list(bias.shape)}: for one head, bias[:, None]")


class Attention(nn.Module, ABC):
    """An attention spec. `forward` returns the terms and `merge` the message.

    To add a spec, subclass this. Its score is one of `mpnn.request.scores` or a new one, see `scores.Score`. Logits
    that are already computed are passed as a bias, [..., E, H] in the caller's edge order.

    Attributes:
        normalize: "softmax", "sigmoid" or "none".
        dropout: probability that a weight is dropped in training.
        balanced: whether the weights already account for the in-degree without a normalizer, as GCN's do.
        depends_on: what the terms depend on, which decides whether nodes are divided over processes
            (`mpnn.distributed`). "node": those of a node on that node, those of an edge on the edge and its ends.
            "row": also on the other edges and sources of a destination. "graph": on anything; nodes are not divided.
            A subclass with methods of its own does not inherit it, because it can compute other terms.
    """

    normalize: str = "softmax"
    dropout: float = 0.0
    balanced: bool = False
    depends_on: str = "graph"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        defines = any(not name.startswith("__") for name in vars(cls))  # the subclasses that FSDP2 makes do not
        if defines and "depends_on" not in vars(cls):
            cls.depends_on = "graph"

    @abstractmethod
    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        """Terms for destinations [..., N_dst, d] and sources [..., N_src, d]; edge_attr [E, ...] in caller's order."""

    def takes(self) -> tuple[validation.Takes, validation.Takes]:
        """Required width and dtype of the destinations' and of the sources' features, see `validation.takes`."""
        return ANY, ANY

    def merge(self, out: Tensor) -> Tensor:
        """Maps the aggregated heads [..., N_dst, H, D] to the message [..., N_dst, F]; default: concatenates them."""
        return out.flatten(-2)


class KeyValue(Attention):
    """Attention whose queries, keys and values each depend on one node only, so that the keys and values of earlier
    nodes can be cached (`mpnn.decoding.cache`)."""

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        return self.terms(*self.project(dst, src, graph), graph, edge_attr)

    @abstractmethod
    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., N_dst, H, D], keys and values [..., N_src, H_kv, D], with rotary positions applied. Each
        depends on one node only, not on edges."""

    @abstractmethod
    def terms(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        """The terms for the queries, keys and values that `project` returned."""
