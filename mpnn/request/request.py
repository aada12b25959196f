"""The request that a backend runs: plain data that describes one round of message passing.

    w_ij = normalise_j( score(i, j) + sum of biases )        out_i = reduce_j( w_ij * (value_j + edge_value_ij) )

Layers build requests and backends run them; neither imports the other. Requests and scores are never modified. They
are not frozen dataclasses, because a frozen one takes longer to create than a sum over a molecule takes to run.
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
from mpnn.graph import Graph
from mpnn.graph.csr import outside_inference_mode
from mpnn.graph.relations import Relation

T = TypeVar("T")

NORMALIZERS = ("softmax", "sigmoid", "none")


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """Vectors looked up by edge type, [edge types, H, D]: the `edge_key` or `edge_value` of each edge.

    `relation` is the rule that gives the edge types; None stands for `graph.edge_type`. A table may have more rows than
    the rule has edge types. The constructor cuts off the rows that no edge reads, so that backends get one row for each
    edge type; the gradients of the other rows are zero.
    """

    table: Tensor
    relation: Relation | None = None

    def __post_init__(self) -> None:
        if self.relation is None or not isinstance(self.table, Tensor) or not self.table.dim():
            return  # validation names the error
        if self.table.shape[0] > self.relation.count:
            object.__setattr__(self, "table", self.table[: self.relation.count])

    def ids(self, graph: Graph) -> Tensor:
        """The type of each edge in the order of `graph.csr`, int64 [E]."""
        csr = graph.csr
        if self.relation is not None:
            if graph.positions is not None:
                return csr.from_caller(self.relation.ids(*graph.edge_positions()))
            return self.relation.ids(csr.row + graph.shift, csr.col)
        if graph.edge_type is None:
            raise ValueError(
                f"a table by edge type needs a graph with edge types, and {graph} has none; "
                "pass edge_type to from_edges, or use topology.with_relation(...)"
            )
        return csr.from_caller(graph.edge_type)

    def cached(self, graph: Graph, key: Hashable, build: Callable[[], T]) -> T:
        """`graph.cached` for values that also depend on the relation. Values of a relation that is equal only to itself
        are freed together with the relation."""
        if self.relation is None or self.relation.is_value:
            return graph.cached((key, self.relation), build)
        rules: WeakKeyDictionary[Relation, dict[Hashable, Any]] = graph.cached("rules", WeakKeyDictionary)
        values = rules.setdefault(self.relation, {})
        if key not in values:
            values[key] = outside_inference_mode(build)
        return values[key]


@dataclass(frozen=True, eq=False)
class BiasTable(EmbeddingTable):
    """Numbers looked up by edge type, [edge types, H] or [edge types, 1]: one of a request's biases, as in T5's or
    Swin's relative position bias. Backends treat it as an `EmbeddingTable` without the last dimension."""


PerEdge = Tensor | EmbeddingTable
"""Numbers or vectors for each edge: a tensor in the caller's edge order, or a table by edge type."""


@dataclass(eq=False)
class Dot:
    """`scale * <query_i, key_j + edge_key_ij>`, optionally `softcap * tanh(. / softcap)`.

    query [..., N_dst, H, D]; key [..., N_src, H_kv, D] with H a multiple of H_kv (grouped heads share a key);
    edge_key [E, H, D] in the caller's edge order, or a table [edge types, H, D].
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
    """`activation(dst_i + src_j + edge_ij)` (GAT); dst [..., N_dst, H], src [..., N_src, H], edge [E, H]."""

    dst: Tensor
    src: Tensor
    activation: Activation
    edge: Tensor | None = None


@dataclass(eq=False)
class AdditiveV2Score:
    """`<vector, activation(dst_i + src_j + edge_ij)>` (GATv2, Bahdanau).

    dst [..., N_dst, H, D], src [..., N_src, H, D], vector [H, D], edge [E, H, D].
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

    value [..., N_src, H_kv, D]; the result is [..., N_dst, H, D]. Without score and bias every weight is 1. Without
    score and with `normalize="none"` the weights are the sum of the biases. Biases are [E, H] or [E, 1] in the caller's
    edge order (leading batch dimensions allowed), or a `BiasTable` [edge types, H]. `seed` is an int64 scalar, required
    if `dropout` is not 0.
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
        per_edge = [b.table.shape[-1] if isinstance(b, EmbeddingTable) else b.shape[-1] for b in self.bias]
        return max([self.value.shape[-2], *per_edge])

    @property
    def batch(self) -> torch.Size:
        """The leading dimensions shared by all features."""
        return self.value.shape[:-3]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: that of the features, or float32 for 16-bit features."""
        return torch.float32 if self.value.dtype in (torch.float16, torch.bfloat16) else self.value.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the request, for checks of device and gradient."""
        parts = [self.value, self.edge_value, *self.bias]
        if self.score is not None:
            parts += [getattr(self.score, name) for name in self.score.__dataclass_fields__]
        return [
            p.table if isinstance(p, EmbeddingTable) else p for p in parts if isinstance(p, (Tensor, EmbeddingTable))
        ]

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """All that validation and plans depend on besides the graph: shapes, dtypes, devices and options. It holds no
        numbers and no object of the caller's, because the graph caches it."""
        score = () if self.score is None else vars(self.score).values()
        numbers = (self.value, self.edge_value, *self.bias, *score)
        dropout = "some" if 0.0 < self.dropout < 1.0 else self.dropout  # an invalid rate gets its own signature
        options = (self.normalize, dropout, self.return_weights, torch.is_grad_enabled(), len(self.bias))
        reduce = "sum" if self.reduce is SUM else _aggregator_form(self.reduce)
        return (*map(_form, numbers), *options, type(self.score).__name__, reduce)

    def with_tables_per_edge(self) -> Request:
        """The request with tables by relation looked up for each edge if the graph has explicit positions, because
        kernels compute edge types from node numbers. `dispatch.run` calls this."""
        if self.graph.positions is None:
            return self
        score = self.score
        if isinstance(score, Dot) and score.edge_key is not None:
            score = replace(score, edge_key=self._per_edge(score.edge_key))
        edge_value = None if self.edge_value is None else self._per_edge(self.edge_value)
        bias = tuple(map(self._per_edge, self.bias))
        return replace(self, score=score, bias=bias, edge_value=edge_value)

    def _per_edge(self, data: PerEdge) -> PerEdge:
        # a table with too few rows is left for validation to name
        if isinstance(data, EmbeddingTable) and data.relation is not None and len(data.table) >= data.relation.count:
            return data.table.to(self.accumulate_dtype).index_select(0, data.relation.ids(*self.graph.edge_positions()))
        return data

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and (self.value.requires_grad or any(t.requires_grad for t in self.tensors))


def _form(x: object) -> Hashable:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.requires_grad
    if isinstance(x, EmbeddingTable):
        rule = x.relation
        return _form(x.table), rule if rule is None or rule.is_value else (type(rule), rule.count)
    if callable(x):  # an activation, which may be a new object at each call
        return type(x), getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    return (x > 0, isfinite(x)) if isinstance(x, float) else x


def _aggregator_form(x: object) -> Hashable:
    """What decides which backends support an aggregator: its type, its declared attributes, and its parts."""
    declared = tuple(getattr(x, name, None) is not None for name in ("combine", "identity", "gradient"))
    return type(x), declared, tuple(map(_aggregator_form, getattr(x, "parts", ())))
