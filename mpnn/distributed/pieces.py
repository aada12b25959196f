"""What transports in pieces share: sources in disjoint sets, whose results are merged by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

from torch import Tensor

from mpnn.aggregate import Sum
from mpnn.attention.spec import KeyValue
from mpnn.graph.sharding import Layer
from mpnn.request.request import Request
from mpnn.request.tables import EmbeddingTable

Kind = Literal["dst", "src", "edge", "table", "parameter"]
"""What the rows of a tensor stand for: nodes, edges, types of edges, or none of these."""

Visit = Callable[[Tensor, Kind, int], Tensor]
"""`visit(tensor, kind, trailing)`, where `trailing` dimensions from the heads on follow those of the rows."""


def not_by_node(attention: Any) -> str | None:
    """Why queries, keys and values cannot be sent instead of features, or None if they can."""
    if isinstance(attention, KeyValue) and attention.depends_on == "node":
        return None
    what = "a layer without attention" if attention is None else type(attention).__name__
    return f"{what} does not compute queries, keys and values of single nodes, as DotProduct does"


def refusal(layer: Layer) -> str | None:
    """Why a layer cannot be computed in pieces, or None if it can."""
    attention = layer.attention
    if (reason := not_by_node(attention)) is not None:
        return reason
    if attention.normalize != "softmax" or not isinstance(layer.aggregate, Sum):
        return "its pieces are merged by the sums of a softmax"
    if layer.mixes_values:
        return "it needs a layer of one hop without teleport"
    return "the weights of its pieces are not returned" if layer.return_weights else None


def mapped(request: Request, visit: Visit) -> Request:
    """The request with `visit` applied to each of its tensors, in a fixed order. Nodes are dimension -1 - trailing."""

    def per_edge(data: Any, trailing: int) -> Any:
        if isinstance(data, EmbeddingTable):
            return replace(data, table=visit(data.table, "table", trailing))
        return None if data is None else visit(data, "edge", trailing)

    score, fields = cast(Any, request.score), {}
    for name, data in {} if score is None else vars(score).items():
        role = score.roles.get(name)
        if role is None:  # a parameter, such as [H, D]
            fields[name] = visit(data, "parameter", data.dim()) if isinstance(data, Tensor) and data.dim() else data
        elif role.of == "edge":
            fields[name] = per_edge(data, role.trailing)
        else:
            fields[name] = visit(data, role.of, role.trailing)
    return replace(
        request,
        value=visit(request.value, "src", 2),
        score=None if score is None else replace(score, **fields),
        bias=tuple(per_edge(bias, 1) for bias in request.bias),
        edge_value=per_edge(request.edge_value, 2),
        sinks=None if request.sinks is None else visit(request.sinks, "parameter", 1),
    )
