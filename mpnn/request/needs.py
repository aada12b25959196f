"""The needs of a request: the features that a backend must serve to run it, as strings.

Each field of a request that differs from its default is a need of that name, unless `_SPLIT` states finer ones. So a
field that nobody here or in a backend has heard of is refused by every backend. What is open-ended (a user's score,
rule or aggregator) is one need, "own ...", so that the needs of a backend are a finite set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mpnn.aggregate import Composed, Max, Mean, Min, Sum, Var
from mpnn.graph.relations import Offset
from mpnn.request.scores import AdditiveScore, AdditiveV2Score, Dot, slope_of
from mpnn.request.tables import EmbeddingTable

_SCORES: dict[type, str] = {type(None): "no score", Dot: "Dot", AdditiveScore: "AdditiveScore", AdditiveV2Score: "AdditiveV2Score"}
_AGGREGATES: dict[type, str] = {Sum: "sum", Mean: "mean", Max: "max", Min: "min", Var: "var"}

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
DEVICES = frozenset({"cpu", "cuda", "another device"})
NORMALIZED = frozenset({"softmax", "sigmoid", "unnormalized"})
AGGREGATES = frozenset(_AGGREGATES.values())


def by_rule(name: str) -> frozenset[str]:
    return frozenset({f"{name} by Offset", f"{name} by own rule"})


def on_edges(name: str) -> frozenset[str]:
    return by_rule(name) | {f"{name} per edge", f"{name} by edge_type"}


SENTENCES = {
    "another device": "its kernels are not for this device",
    "cuda": "it does not run on CUDA",
    "cpu": "it does not run on CPU",
    "no score": "it computes attention by a score, and there is none",
    "Dot": "it aggregates features and does not compute attention",
    "AdditiveScore": "it does not compute additive scores",
    "AdditiveV2Score": "it does not compute additive scores with a vector (v2)",
    "own score": "it does not compute scores of other classes than this library's",
    "own activation": "its additive scores support LeakyReLU and tanh only",
    "softmax": "it does not normalize by softmax",
    "sigmoid": "it does not normalize by sigmoid",
    "unnormalized": "it does not support scores that are not normalized",
    "softcap": "it does not support softcap",
    **{need: "edge_key is not supported in this form" for need in sorted(on_edges("edge_key"))},
    **{need: "edge_value is not supported in this form" for need in sorted(on_edges("edge_value"))},
    **{need: f"it does not support a {need}" for need in sorted(on_edges("bias"))},
    "edge per edge": "it does not support edge terms",
    "dropout": "it does not drop single weights",
    "head_ids": "its dropout hashes the numbers of heads in the part, not in the whole request",
    "node_ids": "its dropout hashes the numbers of nodes in the part, not in the whole graph",
    "return_weights": "it does not return weights",
    "return_lse": "it does not return lse",
    "sinks": "it does not support sinks",
    **{name: f"it cannot aggregate messages by {name}" for name in _AGGREGATES.values()},
    "aggregate of parts": "it does not run composed aggregators",
    "own aggregate": "it does not run aggregators of other classes than this library's sums, means and extremes",
    "explicit graph": "the graph is a list of edges, and it needs a structured graph",
    "gradient": "it has no backward pass",
    **{name: f"it has no kernels for torch.{name}" for name in sorted(FLOATS)},
}


def missing(needs: frozenset[str], serves: frozenset[str], reasons: dict[str, str]) -> str | None:
    """The sentence for the first need that is not served, in the order of SENTENCES; None if all are."""
    lacking = needs - serves
    if not lacking:
        return None
    for need in SENTENCES:
        if need in lacking:
            return reasons.get(need, SENTENCES[need])
    return f"it does not support {sorted(lacking)[0]}"


def needs_of(request: Any) -> frozenset[str]:
    found = set(_of_fields(request, _SPLIT))
    if request.needs_grad:
        found.add("gradient")
    return frozenset(found)


def _of_fields(owner: Any, split: dict[str, Callable[[Any, Any], Iterable[str]]]) -> Iterable[str]:
    for name, default in _defaults(type(owner)):
        value = getattr(owner, name)
        if name in split:
            yield from split[name](owner, value)
        elif value is not default and (isinstance(value, Tensor) or isinstance(default, Tensor) or value != default):
            yield name


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(kind))


def _graph(request: Any, graph: Any) -> Iterable[str]:
    if graph.is_explicit:
        yield "explicit graph"
    if request.dropout and graph.node_ids is not None:
        yield "node_ids"


def _value(request: Any, value: Tensor) -> Iterable[str]:
    yield str(value.dtype).removeprefix("torch.")
    yield value.device.type if value.device.type in ("cpu", "cuda") else "another device"


def _score(request: Any, score: Any) -> Iterable[str]:
    kind = _SCORES.get(type(score), "own score")
    yield kind
    if score is not None and kind != "own score":
        yield from _of_fields(score, _SPLIT_SCORE)


def _normalize(request: Any, normalize: str) -> Iterable[str]:
    if request.weighted:
        yield "unnormalized" if normalize == "none" else normalize


def _aggregate(request: Any, aggregator: Any) -> Iterable[str]:
    if isinstance(aggregator, Composed) and type(aggregator).reduce is Composed.reduce:
        yield "aggregate of parts"
        for part in aggregator.parts:
            yield from _aggregate(request, part)
    else:
        yield _AGGREGATES.get(type(aggregator), "own aggregate")


def _edges(name: str, data: Any) -> Iterable[str]:
    if isinstance(data, EmbeddingTable):
        rule = data.relation
        yield f"{name} by edge_type" if rule is None else f"{name} by Offset" if isinstance(rule, Offset) else f"{name} by own rule"
    elif data is not None:
        yield f"{name} per edge"


def _nothing(owner: Any, value: Any) -> Iterable[str]:
    return ()


_SPLIT: dict[str, Callable[[Any, Any], Iterable[str]]] = {
    "graph": _graph,
    "value": _value,
    "score": _score,
    "bias": lambda request, biases: (need for bias in biases for need in _edges("bias", bias)),
    "edge_value": lambda request, data: _edges("edge_value", data),
    "normalize": _normalize,
    "seed": _nothing,  # goes with dropout
    "reduce": _aggregate,
    "head_ids": lambda request, ids: ("head_ids",) if ids is not None and request.dropout else (),
}
_SPLIT_SCORE: dict[str, Callable[[Any, Any], Iterable[str]]] = {
    **dict.fromkeys(("query", "key", "dst", "src", "vector", "scale"), _nothing),
    "activation": lambda score, activation: ("own activation",) if slope_of(activation) is None else (),
    "edge_key": lambda score, data: _edges("edge_key", data),
    "edge": lambda score, data: _edges("edge", data),
}
