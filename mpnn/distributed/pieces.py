"""Shared by transports in pieces: sources in disjoint sets, whose results are merged by their log-sum-exp."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from mpnn.aggregate import Sum
from mpnn.attention.spec import KeyValue
from mpnn.graph import rng
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
    return not_by_node(attention) or first_of(
        (attention.normalize != "softmax", "its pieces are merged by the sums of a softmax"),
        (type(layer.aggregate) is not Sum, "its pieces are merged by the sums of a softmax"),
        (getattr(attention, "sinks", None) is not None, "it does not support sinks"),
        (layer.mixes_values, "it needs a layer of one hop without teleport"),
        (layer.return_weights, "the weights of its pieces are not returned"),
    )


def first_of(*reasons: tuple[bool, str]) -> str | None:
    """The first of some reasons that holds."""
    return next((sentence for holds, sentence in reasons if holds), None)


def checked(rounds: tuple[Round, ...], transport: str) -> tuple[Round, ...]:
    """The rounds of pieces, with one seed, so that all drop the edges that the whole graph does.

    Raises:
        ValueError: the round cannot be computed in pieces.
    """
    round = rounds[0]
    modules = [x for x in vars(round.score).values() if isinstance(x, nn.Module)]
    learns = any(True for module in modules for _ in module.parameters())
    reason = first_of(
        (round.sinks is not None, "it does not support sinks"),
        (learns, f"{type(round.score).__name__} holds a module, whose weights would get no gradient"),
    )
    if reason is not None:
        raise ValueError(f'transport="{transport}" cannot run this layer: {reason}; take transport="halo"')
    if not round.dropout or round.seed is not None:
        return rounds
    seed = rng.new_seed(round.value.device)
    return tuple(replace(piece, seed=seed) for piece in rounds)


def mapped(round: Round, visit: Visit) -> Round:
    """The round with `visit` applied to each of its tensors, in a fixed order. Nodes are dimension -1 - trailing."""

    def visited(x: Tensor, name: str, role: Role) -> Tensor:
        if role.of == "none" or (role.of == "parameter" and not x.dim()):
            return x
        return visit(x, role.of, x.dim() if role.of == "parameter" else role.trailing)

    return round.map(visited)
