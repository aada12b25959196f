"""Shared by transports in pieces: sources in disjoint sets, whose results are merged by their log-sum-exp."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from mpnn.aggregate import Sum
from mpnn.attention.spec import KeyValue
from mpnn.graph.exchange import AttendCall, Layer
from mpnn.round import Round
from mpnn.scores import Role

Kind = Literal["dst", "src", "edge", "table", "parameter"]
"""What the rows of a tensor stand for: nodes, edges, types of edges, or none of these."""

Visit = Callable[[Tensor, Kind, int], Tensor]
"""`visit(tensor, kind, trailing)`, where `trailing` dimensions from the heads on follow those of the rows."""


def not_by_node(attention: Any) -> str | None:
    """Why queries, keys and values cannot be sent instead of features, or None if they can."""
    if isinstance(attention, (KeyValue, AttendCall)) and attention.depends_on == "node":
        return None
    what = "a layer without attention" if attention is None else type(attention).__name__
    return f"{what} does not compute queries, keys and values of single nodes, as DotProduct does"


def refusal(layer: Layer) -> str | None:
    """Why a layer cannot be computed in pieces, or None if it can."""
    attention = layer.attention
    if (reason := not_by_node(attention)) is not None:
        return reason
    if attention.normalize != "softmax" or type(layer.aggregate) is not Sum:
        return "its pieces are merged by the sums of a softmax"
    if getattr(attention, "sinks", None) is not None:
        return "it does not support sinks"
    if layer.mixes_values:
        return "it needs a layer of one hop without teleport"
    return "the weights of its pieces are not returned" if layer.return_weights else None


def check(round: Round, transport: str) -> None:
    """Raises ValueError if a round cannot be computed in pieces."""
    reason = None
    if round.sinks is not None:
        reason = "it does not support sinks"
    elif any(isinstance(x, nn.Module) and any(True for _ in x.parameters()) for x in vars(round.score).values()):
        reason = f"{type(round.score).__name__} holds a module, whose weights would get no gradient"
    if reason is not None:
        raise ValueError(f'transport="{transport}" cannot run this layer: {reason}; take transport="halo"')


def mapped(round: Round, visit: Visit) -> Round:
    """The round with `visit` applied to each of its tensors, in a fixed order. Nodes are dimension -1 - trailing."""

    def visited(x: Tensor, name: str, role: Role) -> Tensor:
        if role.of == "none" or (role.of == "parameter" and not x.dim()):
            return x
        return visit(x, role.of, x.dim() if role.of == "parameter" else role.trailing)

    return round.map(visited)
