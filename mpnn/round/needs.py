"""The needs of a round: the features that a backend must serve to run it.

A backend states the needs that it serves; the engine refuses all others with the sentences below. Each field of a
round, or of its score, that differs from its default is a need of that name, unless `NEEDS_OF_FIELD` or
`NEEDS_OF_SCORE` states more specific ones. So every backend refuses a field that it does not
know. Types count exactly: a subclass is "own score", "own aggregate" or "by own rule", because its methods may compute
something else.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

from torch import Tensor

from mpnn.aggregate import Composed, Function, Max, Mean, Min, PerNode, Sum, Var
from mpnn.graph.edge_tables import TABLES
from mpnn.graph.relations import Offset
from mpnn.scores import BUILT_IN, slope_of

NAMES_OF_AGGREGATES: dict[type, str] = {Sum: "sum", Mean: "mean", Max: "max", Min: "min", Var: "var"}
AGGREGATES = frozenset(NAMES_OF_AGGREGATES.values())
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
DEVICES = frozenset({"cpu", "cuda", "another device"})
NORMALIZED = frozenset({"softmax", "sigmoid", "unnormalized"})
ANYWHERE = FLOATS | DEVICES | {"explicit graph", "gradient"}
"""What a round that is written with torch's operations on its features serves without a thought."""
DROPS = frozenset({"dropout", "head_ids", "node_ids"})
_RESERVED = (
    AGGREGATES | FLOATS | DEVICES | NORMALIZED | {"softmax_dst", "gradient", *(kind.__name__ for kind in BUILT_IN)}
)
"""Needs that are not named after a field: a field of such a name is the need "field ..."."""


def by_rule(name: str) -> frozenset[str]:
    """The needs of a table by a rule of edge types: "bias by Offset", "bias by own rule"."""
    return frozenset({f"{name} by Offset", f"{name} by own rule"})


def on_edges(name: str) -> frozenset[str]:
    """The needs of any data of edges: by a rule, per edge, or by the graph's edge types."""
    return by_rule(name) | {f"{name} per edge", f"{name} by edge_type"}


WEIGHED = on_edges("bias") | on_edges("edge_key") | on_edges("edge") | {
    "no score", "Dot", "AdditiveScore", "AdditiveV2Score", "own score", "own activation", "softcap", "bias by nodes"
}  # fmt: skip
"""All ways to weigh an edge."""
VALUES_OF_EDGES = on_edges("edge_value")

SENTENCES = {
    "another device": "its kernels are not for this device",
    "cuda": "it does not run on CUDA",
    "cpu": "it does not run on CPU",
    "no score": "it computes attention by a score, and there is none",
    "Dot": "it aggregates features and does not compute attention",
    "AdditiveScore": "it does not compute additive scores",
    "AdditiveV2Score": "it does not compute additive scores with a vector (v2)",
    "own score": "it has no kernel for {score}, which does not lower to a built-in score",
    "own activation": "its additive scores support LeakyReLU and tanh, and not {activation}",
    "softmax": "it does not normalize by softmax",
    "softmax_dst": "it does not normalize over the destinations of a source",
    "sigmoid": "it does not normalize by sigmoid",
    "sparsemax": "it does not normalize by sparsemax",
    "entmax15": "it does not normalize by 1.5-entmax",
    "mix_logits": "it computes heads apart, and mix_logits mixes their logits",
    "mix_weights": "it computes heads apart, and mix_weights mixes their weights",
    "unnormalized": "it does not support scores that are not normalized",
    "softcap": "it does not support softcap",
    **{need: f"it does not support {need}"
       for name in ("bias", "edge_key", "edge_value", "edge") for need in sorted(on_edges(name))},
    "bias by nodes": "it does not add biases of nodes",
    "dropout": "it does not drop single weights",
    "head_ids": "its dropout numbers the heads of this process, not of the whole round",
    "node_ids": "its dropout numbers the nodes of this process, not of the whole graph",
    "return_weights": "it does not return weights",
    "return_lse": "it does not return lse",
    "weights and lse": "it does not return weights and lse together",
    "keep_accumulate_dtype": "it rounds its results to the dtype of the features",
    "stacked graph": "its edges differ by item and head",
    "sinks": "it does not support sinks",
    **{name: f"it does not compute recurrences, which {name} makes of a round"
       for name in ("log_gate", "beta", "state", "return_state")},
    **{name: f"it cannot aggregate messages by {name}" for name in NAMES_OF_AGGREGATES.values()},
    "aggregate of parts": "it does not run composed aggregators",
    "own aggregate": "it runs sums, means, extremes and variances, and not {aggregate}",
    "explicit graph": "the graph is a list of edges, and it needs a structured graph",
    "gradient": "it has no backward pass",
    **{name: f"it has no kernels for torch.{name}" for name in sorted(FLOATS)},
}  # fmt: skip
"""The needs of this library, with the sentence of a backend that does not serve one, in the order in which they are
reported."""


def missing(round: Any, serves: frozenset[str], reasons: dict[str, str]) -> str | None:
    """The sentence for the first need of a round that is not served, or None. `reasons`: the backend's own."""
    lacking = needs_of(round) - serves
    if not lacking:
        return None
    sentences = SENTENCES | reasons
    need = next((need for need in sentences if need in lacking), min(lacking))
    sentence = sentences.get(need, f"it does not support {need}")
    activation = getattr(round.score, "activation", None)
    names = {
        "{score}": type(round.score).__name__,
        "{aggregate}": name_of(round.reduce),
        "{activation}": getattr(activation, "__name__", type(activation).__name__),
    }
    if is_composed(round.reduce) and need in AGGREGATES:
        sentence = f"it cannot aggregate messages by {name_of(round.reduce)}, which has the part {need}"
    for name, value in names.items():
        sentence = sentence.replace(name, value)
    return sentence


def name_of(aggregator: Any) -> str:
    """Returns the name of an aggregator in messages: that of a user's function, or else that of the class."""
    if isinstance(aggregator, PerNode):
        return name_of(aggregator.inner)
    if isinstance(aggregator, Function):
        return getattr(aggregator.function, "__name__", type(aggregator.function).__name__)
    return type(aggregator).__name__


def first(reasons: Mapping[str, object]) -> str | None:
    """Returns the first sentence that applies, or None."""
    return next((sentence for sentence, applies in reasons.items() if applies), None)


def has_own(x: Any, method: str) -> bool:
    """Returns whether an object has a method of its own, other than that of its class."""
    return method in getattr(x, "__dict__", ())


def class_of(aggregator: object) -> Any:
    """Returns the class of an aggregator, by which backends choose a kernel, or None for an object with a `reduce` of
    its own, which no kernel computes."""
    return None if "reduce" in getattr(aggregator, "__dict__", ()) else type(aggregator)


def is_composed(aggregator: object) -> bool:
    """Whether an aggregator composes the results of its parts: neither its class nor itself has another `reduce`."""
    return isinstance(aggregator, Composed) and getattr(aggregator.reduce, "__func__", None) is Composed.reduce


def needs_of(round: Any) -> frozenset[str]:
    """Returns the needs of a round."""
    return frozenset([*_of_fields(round, NEEDS_OF_FIELD), *(("gradient",) if round.needs_grad else ())])


def _of_fields(owner: Any, needs: dict[str, Callable[[Any, Any], Iterable[str]]]) -> Iterable[str]:
    for name, default in defaults_of(cast(Any, type(owner))).items():
        value = getattr(owner, name)
        if name in needs:
            yield from needs[name](owner, value)
        elif value is not default and (isinstance(value, Tensor) or value != default):
            yield name if name not in _RESERVED else f"field {name}"


@cache
def defaults_of(kind: Any) -> dict[str, Any]:
    """Returns the default of each field of a dataclass, a round or a score, by its name; nothing for other classes."""
    return {field.name: field.default for field in fields(kind)} if is_dataclass(kind) else {}


def _present(needs: Mapping[str, object]) -> list[str]:
    return [need for need, applies in needs.items() if applies]


def _graph(round: Any, graph: Any) -> Iterable[str]:
    of_graph = {
        "stacked graph": graph.stack,
        "explicit graph": graph.is_explicit,
        "node_ids": round.dropout and graph.node_ids is not None,
    }
    return _present(of_graph)


def _value(round: Any, value: Tensor) -> Iterable[str]:
    yield str(value.dtype).removeprefix("torch.")
    yield value.device.type if value.device.type in ("cpu", "cuda") else "another device"


def _score(round: Any, score: Any) -> Iterable[str]:
    if score is None:
        yield "no score"
    elif type(score) in BUILT_IN and not has_own(score, "logits"):
        yield type(score).__name__
        yield from _of_fields(score, NEEDS_OF_SCORE)
    else:
        yield "own score"


def _normalize(round: Any, normalize: str) -> Iterable[str]:
    if round.weighted:
        yield "unnormalized" if normalize == "none" else normalize


def _aggregate(round: Any, aggregator: Any) -> Iterable[str]:
    if is_composed(aggregator):
        yield "aggregate of parts"
        for part in aggregator.parts:
            yield from _aggregate(round, part)
    else:
        yield NAMES_OF_AGGREGATES.get(class_of(aggregator), "own aggregate")


def _edges(name: str, data: Any) -> Iterable[str]:
    if isinstance(data, Tensor):
        yield f"{name} per edge"
    elif type(data) in TABLES:
        rule = data.relation
        how = "edge_type" if rule is None else "Offset" if type(rule) is Offset else "own rule"
        yield f"{name} by {how}"
    elif data is not None:
        yield f"{name} of type {type(data).__name__}"


def _of_nodes(round: Any, x: Any) -> Iterable[str]:
    return _present({"bias by nodes": x is not None})


def _lse(round: Any, returned: bool) -> Iterable[str]:
    return _present({"return_lse": returned, "weights and lse": returned and round.return_weights})


def _keep_accumulate_dtype(round: Any, kept: bool) -> Iterable[str]:
    return _present({"keep_accumulate_dtype": kept and round.value.dtype != round.accumulate_dtype})


def _nothing(owner: Any, value: Any) -> Iterable[str]:
    return ()


NEEDS_OF_FIELD: dict[str, Callable[[Any, Any], Iterable[str]]] = {
    "graph": _graph,
    "value": _value,
    "score": _score,
    "bias": lambda round, biases: (need for bias in biases for need in _edges("bias", bias)),
    "dst_bias": _of_nodes,
    "src_bias": _of_nodes,
    "edge_value": lambda round, data: _edges("edge_value", data),
    "normalize": _normalize,
    "seed": _nothing,  # goes with dropout
    "reduce": _aggregate,
    "return_lse": _lse,
    "keep_accumulate_dtype": _keep_accumulate_dtype,
    "head_ids": lambda round, ids: _present({"head_ids": ids is not None and round.dropout}),
}
NEEDS_OF_SCORE: dict[str, Callable[[Any, Any], Iterable[str]]] = {
    **dict.fromkeys(("query", "key", "dst", "src", "vector", "scale"), _nothing),
    "activation": lambda score, activation: _present({"own activation": slope_of(activation) is None}),
    "edge_key": lambda score, data: _edges("edge_key", data),
    "edge": lambda score, data: _edges("edge", data),
}
