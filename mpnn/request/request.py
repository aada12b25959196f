"""The request that a backend runs: plain data that describes one round of message passing.

    w_ij = normalize_j( score(i, j) + sum of biases )        out_i = reduce_j( w_ij * (value_j + edge_value_ij) )

With sinks s [H], the softmax is `w_ij = exp(l_ij) / (exp(s) + sum_j exp(l_ij))` for logits l: each row has one more
source with the logit s and the value 0 (gpt-oss; Xiao et al. 2023, arXiv:2309.17453).

Layers build requests and backends run them; neither imports the other. Requests are never modified. They are not
frozen dataclasses, because a frozen one takes longer to create than a sum over a molecule takes to run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor

from mpnn.aggregate import SUM, Aggregator
from mpnn.graph import Graph
from mpnn.request.scores import Score
from mpnn.request.tables import EmbeddingTable, PerEdge

NORMALIZERS = ("softmax", "sigmoid", "none")


@dataclass(eq=False)
class Request:
    """One round of message passing, ready to run.

    value [..., N_src, H_kv, D]; the result is [..., N_dst, H, D]. Without score and bias every weight is 1. Without
    score and with `normalize="none"` the weights are the sum of the biases. Biases are [E, H] or [E, 1] in the caller's
    edge order (leading batch dimensions allowed), or a `BiasTable` [edge types, H]. `seed` is an int64 scalar, required
    if `dropout` is not 0. `sinks` [H] go with weights normalized by softmax only. `return_lse` asks for the log-sum-exp
    of each destination's logits, by which results over disjoint sets of sources are merged. A process that computes
    some heads of a request sets `head_ids`, the first of them and the number of all: dropout hashes these numbers.
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
    return_lse: bool = False
    sinks: Tensor | None = None
    head_ids: tuple[int, int] | None = None

    @property
    def weighted(self) -> bool:
        return self.score is not None or bool(self.bias)

    @property
    def heads(self) -> int:
        score, heads = self.score, [self.value.shape[-2]]
        if score is None and not self.bias:
            return heads[0]
        for name, role in () if score is None else score.roles.items():
            if role.of == "dst":
                return int(getattr(score, name).shape[-role.trailing])
            if (data := getattr(score, name)) is not None:
                heads.append(_numbers(data).shape[-role.trailing])
        return max([*heads, *(_numbers(b).shape[-1] for b in self.bias)])

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
        parts = [self.value, self.edge_value, *self.bias, self.sinks]
        if self.score is not None:
            parts += vars(self.score).values()
        return [_numbers(p) for p in parts if isinstance(p, (Tensor, EmbeddingTable))]

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """All that validation and plans depend on besides the graph: shapes, dtypes, devices and options. It holds no
        numbers and no object of the caller's, because the graph caches it."""
        score = () if self.score is None else vars(self.score).values()
        numbers = (self.value, self.edge_value, self.sinks, *self.bias, *score)
        dropout = "some" if 0.0 < self.dropout < 1.0 else self.dropout  # an invalid rate gets its own signature
        returned = self.return_weights, self.return_lse
        options = (self.normalize, dropout, *returned, torch.is_grad_enabled(), len(self.bias), self.head_ids)
        reduce = "sum" if self.reduce is SUM else _aggregator_form(self.reduce)
        return (*map(_form, numbers), *options, cast(Hashable, type(self.score)), reduce)

    def with_tables_per_edge(self) -> Request:
        """The request with tables by relation looked up for each edge if the graph has explicit positions, because
        kernels compute edge types from node numbers. `dispatch.normalize` calls this."""
        if self.graph.positions is None:
            return self
        score: Any = self.score
        for name, role in () if score is None else score.roles.items():
            if role.of == "edge" and (data := getattr(score, name)) is not None:
                score = replace(score, **{name: self._per_edge(data)})
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
        if not torch.is_grad_enabled():
            return False
        return self.value.requires_grad or any(x.requires_grad for x in self.tensors)


def _numbers(data: PerEdge) -> Tensor:
    return data.table if isinstance(data, EmbeddingTable) else data


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
