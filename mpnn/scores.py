"""What a backend is asked: plain data that says which numbers go along which edges.

    w_ij = normalise_j( score(i, j) + sum of biases )        out_i = reduce_j( w_ij * (value_j + edge_value_ij) )

Layers build these from their weights; backends run them; neither knows the other. Nobody changes one that was made;
those made at each call are not frozen for all that, because on a molecule this would take longer than a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.aggregate import SUM, Aggregator
from mpnn.edges import trainable
from mpnn.graph import Graph
from mpnn.relation import Relation

T = TypeVar("T")

NORMALIZERS = ("softmax", "sigmoid", "none")


@dataclass(frozen=True, eq=False)
class Lookup:
    """One entry of a table for each edge, by the edge's class: a bias per relation, a vector per relative position.

    `table` [relations, ...]; `relation` is the rule of the classes, None for those that the graph's edges carry. A
    table may have more rows than the rule has classes: the rows that no edge reads are cut off here, so that every
    backend gets one row for each class. Their gradients are zero.
    """

    table: Tensor
    relation: Relation | None = None

    def __post_init__(self) -> None:
        if self.relation is None or not isinstance(self.table, Tensor) or not self.table.dim():
            return  # `check` names what is wrong
        if self.table.shape[0] > self.relation.count:
            object.__setattr__(self, "table", self.table[: self.relation.count])

    def ids(self, graph: Graph) -> Tensor:
        """The class of each edge in the order of `graph.csr`, int64 [E]."""
        csr = graph.csr
        if self.relation is not None:
            if graph.places is not None:
                return csr.from_caller(self.relation.ids(*graph.ends()))
            return self.relation.ids(csr.row + graph.shift, csr.col)
        if graph.edge_type is None:
            raise ValueError(
                f"a table over edge classes needs a graph whose edges have them, and {graph} has none; "
                "give edge_type to from_edges, or topology.related(...)"
            )
        return csr.from_caller(graph.edge_type)

    def memo(self, graph: Graph, key: Hashable, build: Callable[[], T]) -> T:
        """`graph.memo` of what depends on the rule of the classes too. What depends on a rule that is equal only to
        itself is dropped together with the rule."""
        if self.relation is None or self.relation.is_value:
            return graph.memo((key, self.relation), build)
        rules: WeakKeyDictionary[Relation, dict[Hashable, Any]] = graph.memo("rules", WeakKeyDictionary)
        values = rules.setdefault(self.relation, {})
        if key not in values:
            values[key] = trainable(build)
        return values[key]


PerEdge = Tensor | Lookup
"""Numbers for every edge: a tensor in the caller's edge order, or a table by class."""


@dataclass(eq=False)
class Dot:
    """`scale * <query_i, key_j + edge_key_ij>`, optionally `softcap * tanh(. / softcap)`.

    query [..., N_dst, H, D]; key [..., N_src, H_kv, D] with H a multiple of H_kv (grouped heads share a key);
    edge_key per edge [E, H, D].
    """

    query: Tensor
    key: Tensor
    scale: float
    edge_key: PerEdge | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class LeakyReLU:
    """`max(x, slope * x)`: GAT's activation, named so that a fused kernel can recognise it."""

    slope: float = 0.2

    def __call__(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


Activation = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class AdditiveScore:
    """`activation(dst_i + src_j + edge_ij)` (GAT); dst [..., N_dst, H], src [..., N_src, H], edge per edge [E, H]."""

    dst: Tensor
    src: Tensor
    activation: Activation
    edge: Tensor | None = None


@dataclass(eq=False)
class AdditiveV2Score:
    """`<vector, activation(dst_i + src_j + edge_ij)>` (GATv2, Bahdanau).

    dst [..., N_dst, H, D], src [..., N_src, H, D], vector [H, D], edge per edge [E, H, D].
    """

    dst: Tensor
    src: Tensor
    vector: Tensor
    activation: Activation
    edge: Tensor | None = None


Score = Dot | AdditiveScore | AdditiveV2Score


@dataclass(eq=False)
class Request:
    """One round of message passing, ready to run.

    value [..., N_src, H_kv, D]; the result is [..., N_dst, H, D]. Without score and bias every weight is 1; with
    biases alone and `normalize="none"` they are the weights. Biases are [E, H] or [E, 1] in the caller's edge order
    (leading batch dimensions allowed), or tables [relations, H]. `seed`: int64 scalar, given when `dropout` is not 0.
    """

    graph: Graph
    value: Tensor
    score: Score | None = None
    bias: tuple[PerEdge, ...] = ()
    edge_value: PerEdge | None = None
    normalize: str = "softmax"
    dropout: float = 0.0
    seed: Tensor | None = None
    reduce: Aggregator = SUM
    return_weights: bool = False

    @property
    def weighted(self) -> bool:
        return self.score is not None or bool(self.bias)

    @property
    def heads(self) -> int:
        match self.score:
            case Dot(query=query):
                return query.shape[-2]
            case AdditiveScore(dst=dst):
                return dst.shape[-1]
            case AdditiveV2Score(dst=dst):
                return dst.shape[-2]
        per_edge = [b.table.shape[-1] if isinstance(b, Lookup) else b.shape[-1] for b in self.bias]
        return max([self.value.shape[-2], *per_edge])

    @property
    def batch(self) -> torch.Size:
        """The leading dimensions that all features share."""
        return self.value.shape[:-3]

    @property
    def wide(self) -> torch.dtype:
        """The type of the arithmetic: that of the features, but float32 for 16-bit ones."""
        return torch.float32 if self.value.dtype in (torch.float16, torch.bfloat16) else self.value.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that takes part, for checks of device and gradient."""
        parts = [self.value, self.edge_value, *self.bias]
        if self.score is not None:
            parts += [getattr(self.score, name) for name in self.score.__dataclass_fields__]
        return [p.table if isinstance(p, Lookup) else p for p in parts if isinstance(p, (Tensor, Lookup))]

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """All that checks and plans depend on besides the graph: shapes, types, devices and options; no numbers, and
        nothing of the caller's that would live as long as the graph."""
        score = () if self.score is None else vars(self.score).values()
        numbers = (self.value, self.edge_value, *self.bias, *score)
        dropout = "some" if 0.0 < self.dropout < 1.0 else self.dropout  # an invalid rate is a form of its own
        options = (self.normalize, dropout, self.return_weights, torch.is_grad_enabled(), len(self.bias))
        reduce = "sum" if self.reduce is SUM else _aggregator_form(self.reduce)
        return (*map(_form, numbers), *options, type(self.score).__name__, reduce)

    def told(self) -> Request:
        """The same request, with tables written out edge by edge where the graph's nodes have places of their own:
        kernels look up classes by the numbers of nodes."""
        if self.graph.places is None:
            return self
        score = self.score
        if isinstance(score, Dot) and score.edge_key is not None:
            score = replace(score, edge_key=self._told(score.edge_key))
        edge_value = None if self.edge_value is None else self._told(self.edge_value)
        bias = tuple(map(self._told, self.bias))
        return replace(self, score=score, bias=bias, edge_value=edge_value)

    def _told(self, data: PerEdge) -> PerEdge:
        # a table of too few classes is left for the checks to name
        if isinstance(data, Lookup) and data.relation is not None and len(data.table) >= data.relation.count:
            return data.table.to(self.wide).index_select(0, data.relation.ids(*self.graph.ends()))
        return data

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and (self.value.requires_grad or any(t.requires_grad for t in self.tensors))


def _form(x: object) -> Hashable:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.requires_grad
    if isinstance(x, Lookup):
        rule = x.relation
        return _form(x.table), rule if rule is None or rule.is_value else (type(rule), rule.count)
    if callable(x):  # an activation, which may be a new one at each call
        return type(x), getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    return (x > 0, isfinite(x)) if isinstance(x, float) else x


def _aggregator_form(x: object) -> Hashable:
    """What decides who can run an aggregator: its type, what it states of itself, and what it is made of."""
    stated = tuple(getattr(x, name, None) is not None for name in ("combine", "identity", "gradient"))
    return type(x), stated, tuple(map(_aggregator_form, getattr(x, "parts", ())))
