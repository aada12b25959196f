"""The base classes of attention specs.

A spec owns its parameters. `forward` maps features to a `Round`, which a backend runs, and `merge` maps the aggregated
heads to the message. A spec does not compute edges itself.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.graph.arguments import as_integer
from mpnn.round import Round, validation


class Attention(nn.Module, ABC):
    """An attention spec. `forward` returns the round and `merge` the message.

    To add a spec, subclass this. Its score is one of `mpnn.scores` or a new one, see `scores.Score`. Logits
    that are already computed are passed as a bias, [..., E, H] in the caller's edge order.

    Attributes:
        normalize: "softmax", "softmax_dst", "sigmoid", "none", "sparsemax" or "entmax15"; see `mpnn.ops.attend`.
        dropout: probability that a weight is dropped in training.
        balanced: whether the weights already account for the in-degree without a normalizer, as GCN's do.
        depends_on: what features of the round depend on, which decides whether nodes are divided over processes
            (`mpnn.distributed`). "node": those of a node on that node, those of an edge on the edge and its ends.
            "row": also on the other edges and sources of a destination. "graph": on anything; nodes are not divided.
            A subclass with methods of its own does not inherit it, because it can compute others.
        reads: the names of the modules that read the features of destinations and of sources; "" for any features.
    """

    normalize: str = "softmax"
    dropout: float = 0.0
    balanced: bool = False
    depends_on: str = "graph"
    reads: tuple[str, str] = ("", "")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        defines = any(not name.startswith("__") for name in vars(cls))  # the subclasses that FSDP2 makes do not
        if defines and "depends_on" not in vars(cls):
            cls.depends_on = "graph"

    @abstractmethod
    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        """Returns the round for destinations [..., N_dst, d] and sources [..., N_src, d]; edge_attr [E, ...] in the
        caller's order. It leaves `normalize`, `dropout`, `reduce` and `return_weights` to the operator."""

    def takes(self) -> tuple[validation.Takes, validation.Takes]:
        """Returns the required width and dtype of the destinations' and of the sources' features, see
        `validation.takes`."""
        of_dst, of_src = (validation.takes(getattr(self, name, None)) for name in self.reads)
        return of_dst, of_src

    def merge(self, out: Tensor) -> Tensor:
        """Maps the aggregated heads [..., N_dst, H, D] to the message [..., N_dst, F]; default: concatenates them."""
        return out.flatten(-2)


class KeyValue(Attention):
    """Attention whose queries, keys and values each depend on one node only, so that the keys and values of earlier
    nodes can be cached (`mpnn.decoding.cache`).

    Attributes:
        num_past: the number of preceding nodes that a cache keeps; None for all.
        block: the size of blocks for which a cache keeps the means of keys, an argument `means` of `round`; None: no.
    """

    num_past: int | None = None
    block: int | None = None

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return self.round(*self.project(dst, src, graph), graph, edge_attr)

    @abstractmethod
    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [..., N_dst, H, D], keys and values [..., N_src, H_kv, D], with rotary positions applied.
        Each depends on one node only, not on edges."""

    @abstractmethod
    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        """Returns the round for the queries, keys and values that `project` returned."""


def check_integers(**sizes: int | None) -> None:
    """Raises TypeError, naming the argument, if a size is neither an integer nor None."""
    for name, size in sizes.items():
        if size is not None:
            as_integer(name, size)


def edges_by_head(to_edge: nn.Linear, edge_attr: Tensor | None, heads: int) -> Tensor:
    """A vector for each edge and head, [E, H, D], from attributes [E, edge_dim], or [E] if edge_dim is 1."""
    if edge_attr is None:
        raise ValueError("this attention has edge_dim, so the graph or the call must provide edge_attr")
    edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
    if edge_attr.shape[-1] != to_edge.in_features:
        raise ValueError(f"this attention has edge_dim={to_edge.in_features}; got edge_attr {list(edge_attr.shape)}")
    validation.fits("this attention", "edge_attr", edge_attr, validation.takes(to_edge))
    return to_edge(edge_attr).unflatten(-1, (heads, -1))


def join_heads(out: Tensor, concat: bool, bias: Tensor | None) -> Tensor:
    """The message [..., N, F] of the heads [..., N, H, D]: concatenated, or else their mean, plus a bias."""
    out = out.flatten(-2) if concat else out.mean(-2)
    if bias is None:
        return out
    if out.shape[-1] != len(bias):
        validation.widened("attention with a bias", out.shape[-1], len(bias))
    return out + bias
