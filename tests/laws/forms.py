"""The law of steps: what a round results in does not depend on the rounds that ran before it.

A round runs by the step that another round of its form taught (`mpnn/engine/steps.py`). So each case runs one round, or
one in another mode of torch, and then a second one over the same graph. The second one must have the bits that it has
over a new graph, where it is planned. Rounds are those of the registry of requests, and variants of them that differ in
one respect which a form must tell apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from capabilities import REQUESTS
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, engine, graphs
from mpnn.aggregate import aggregator
from mpnn.attention import Additive, AdditiveV2, Degree, DotProduct
from mpnn.engine import steps
from mpnn.engine.plan import Refused
from mpnn.round import NodeBias, Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU
from mpnn.update import FeedForward, PreNorm

NODES, HEADS, WIDTH = 12, 4, 8


def _edges() -> Graph:
    ends = torch.randint(0, NODES, (2, 40), generator=torch.Generator().manual_seed(0))
    return graphs.from_edges(ends, NODES)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "a list of edges": _edges,
    "a window": lambda: graphs.window(3).bind(NODES).alias(),
    "causal": lambda: graphs.causal().bind(NODES).alias(),
    "documents": lambda: (graphs.documents([5, 7]) & graphs.causal()).bind(NODES).alias(),
}


def _features(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _dot(graph: Graph, *batch: int, width: int = WIDTH, dtype: torch.dtype = torch.float32, **options: Any) -> Round:
    query, key, value = (_features(*batch, NODES, HEADS, width, seed=k, dtype=dtype) for k in range(3))
    score = {name: options.pop(name) for name in ("scale", "softcap") if name in options}
    return Round(graph, value, Dot(query, key, **{"scale": 0.5, **score}), **options)


def _additive(graph: Graph, activation: Any = None, **options: Any) -> Round:
    dst, src = (_features(NODES, HEADS, seed=k) for k in (3, 4))
    score = AdditiveScore(dst, src, LeakyReLU(0.2) if activation is None else activation)
    return Round(graph, _features(NODES, HEADS, WIDTH), score, **options)


def _additive_v2(graph: Graph, **options: Any) -> Round:
    dst, src = (_features(NODES, HEADS, WIDTH, seed=k) for k in (5, 6))
    score = AdditiveV2Score(dst, src, nn.Parameter(_features(HEADS, WIDTH, seed=7)), LeakyReLU(0.2))
    return Round(graph, _features(NODES, HEADS, WIDTH), score, **options)


def _sum(graph: Graph, name: str = "sum", *batch: int, **options: Any) -> Round:
    value = _features(*batch, NODES, 1, WIDTH)
    return Round(graph, value, normalize="none", reduce=aggregator(name), **options)


def _negated(round: Round) -> Round:
    """The same shapes, dtypes and strides; a kernel that reads memory would read the other sign."""
    return replace(round, value=torch._neg_view(round.value.clone()))


def _transposed(round: Round) -> Round:
    return replace(round, value=round.value.transpose(0, 1).contiguous().transpose(0, 1))


def _learned(round: Round) -> Round:
    return replace(round, value=round.value.clone().requires_grad_())


def _weight(graph: Graph, width: int = 1) -> Tensor:
    return _features(graph.num_edges, width, seed=8)


def _bias_of_nodes(graph: Graph) -> NodeBias:
    return NodeBias(_features(NODES, HEADS), None)


SEED = torch.tensor(5)
ROUNDS: dict[str, Callable[[Graph], Round]] = {
    "dot": _dot,
    "dot, negated": lambda g: _negated(_dot(g)),
    "dot, other strides": lambda g: _transposed(_dot(g)),
    "dot, learned": lambda g: _learned(_dot(g)),
    "dot, float64": lambda g: _dot(g, dtype=torch.float64),
    "dot, bfloat16": lambda g: _dot(g, dtype=torch.bfloat16),
    "dot, a batch": lambda g: _dot(g, 2),
    "dot, another batch": lambda g: _dot(g, 3),
    "dot, another scale": lambda g: _dot(g, scale=2.0),
    "dot, a negative scale": lambda g: _dot(g, scale=-0.5),
    "dot, softcap": lambda g: _dot(g, softcap=3.0),
    "dot, another softcap": lambda g: _dot(g, softcap=1.0),
    "dot, sigmoid": lambda g: _dot(g, normalize="sigmoid"),
    "dot, weights": lambda g: _dot(g, return_weights=True),
    "dot, lse": lambda g: _dot(g, return_lse=True),
    "dot, dropout": lambda g: _dot(g, dropout=0.5, seed=SEED),
    "dot, another dropout": lambda g: _dot(g, dropout=0.25, seed=SEED),
    "dot, bias": lambda g: _dot(g, bias=(_weight(g, HEADS),)),
    "dot, two biases": lambda g: _dot(g, bias=(_weight(g, HEADS), _weight(g))),
    "dot, bias of nodes": lambda g: _dot(g, bias=(_bias_of_nodes(g),)),
    "dot, sinks": lambda g: _dot(g, sinks=_features(HEADS)),
    "dot, max": lambda g: _dot(g, reduce=aggregator("max")),
    "dot, narrow": lambda g: _dot(g, width=3),
    "additive": _additive,
    "additive, another slope": lambda g: _additive(g, LeakyReLU(0.5)),
    "additive, tanh": lambda g: _additive(g, torch.tanh),
    "additive, negated": lambda g: _negated(_additive(g)),
    "additive v2": _additive_v2,
    "additive v2, weights": lambda g: _additive_v2(g, return_weights=True),
    "sum": _sum,
    "sum, negated": lambda g: _negated(_sum(g)),
    "sum, learned": lambda g: _learned(_sum(g)),
    "sum, a batch": lambda g: _sum(g, "sum", 2),
    "sum, weights": lambda g: _sum(g, bias=(_weight(g),)),
    "sum, other weights": lambda g: _sum(g, bias=(2 * _weight(g),)),
    "sum, learned weights": lambda g: _sum(g, bias=(_weight(g).requires_grad_(),)),
    "sum, a weight a feature": lambda g: _sum(g, bias=(_weight(g, WIDTH),)),
    "mean": lambda g: _sum(g, "mean"),
    "max": lambda g: _sum(g, "max"),
    "std": lambda g: _sum(g, "std"),
    **REQUESTS,
}

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def _results(make: Callable[[Graph], Round], graph: Graph, mode: str, backend: str) -> list[Tensor] | str:
    """What a round results in, and the gradient of its values; or why it does not run."""
    torch.manual_seed(0)
    with MODES[mode]():
        round = make(graph)
        try:
            out, more = engine.run(round, backend)
        except (Refused, ValueError) as error:
            return str(error)
        found = [out] if more is None else [out, more]
        if round.value.requires_grad and out.requires_grad:
            found += torch.autograd.grad(out.sum(), round.value)
    return [x.detach().resolve_neg().clone() for x in found]


def _check(first: tuple[str, str], second: tuple[str, str], graph: str, backend: str = "auto") -> None:
    steps._OF_LISTS.clear()
    expected = _results(ROUNDS[second[0]], GRAPHS[graph](), second[1], backend)
    steps._OF_LISTS.clear()
    known = GRAPHS[graph]()
    for name, mode in (first, first):
        _results(ROUNDS[name], known, mode, backend)
    found = _results(ROUNDS[second[0]], known, second[1], backend)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        assert len(found) == len(expected)
        pairs = zip(found, expected, strict=True)
        assert all(a.dtype is b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


OWN = [name for name in ROUNDS if name not in REQUESTS]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("second", OWN)
@pytest.mark.sample(9)
def test_no_round_depends_on_the_one_before(second: str, graph: str) -> None:
    for first in OWN:
        _check((first, "plain"), (second, "plain"), graph)


@pytest.mark.parametrize("graph", ["a list of edges", "a window"])
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.sample(9)
def test_no_request_depends_on_the_one_before(name: str, graph: str) -> None:
    for first in ("dot", "sum", "additive", name):
        _check((first, "plain"), (name, "plain"), graph)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("modes", list(itertools.product(MODES, MODES)), ids=" then ".join)
@pytest.mark.sample(3)
def test_no_round_depends_on_the_mode_before(modes: tuple[str, str], graph: str) -> None:
    before, after = modes
    for name in ("dot", "dot, learned", "dot, dropout", "additive", "sum", "sum, learned", "mean"):
        _check((name, before), (name, after), graph)


@pytest.mark.parametrize("backend", ["dense", "csr", "tiles", "edge_list"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_no_round_of_a_named_backend_depends_on_the_one_before(graph: str, backend: str) -> None:
    for first, second in itertools.product(("dot", "dot, negated", "dot, bias", "sum"), repeat=2):
        _check((first, "plain"), (second, "plain"), graph, backend)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.jacrev], ids=lambda f: f.__name__)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_plain_calls_in_turn(graph: str, transform: Callable[..., Any]) -> None:
    known = GRAPHS[graph]()
    x = _features(NODES, WIDTH)

    def run(x: Tensor) -> Tensor:
        out, _ = engine.run(Round(known, x.unsqueeze(1), normalize="none"))
        return out.sum() if transform is torch.func.grad else out

    plain = run(x).clone()
    batch = torch.stack([x, 2 * x])
    found = transform(run)(batch if transform is torch.func.vmap else x)
    assert run(x).equal(plain)
    assert transform(run)(batch if transform is torch.func.vmap else x).equal(found)


# ------------------------------------------------------------------------------------------------ lists of edges


def test_lists_of_any_size_share_a_step_and_rounds_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps._OF_LISTS.clear()
    layers = [
        MessagePassing(None, "sum"),
        MessagePassing(None, "mean", None, Degree(WIDTH, WIDTH)),
        MessagePassing(None, "sum", None, Additive(WIDTH, 4, heads=2)),
        MessagePassing(None, "sum", None, AdditiveV2(WIDTH, 8, heads=2)),
        MessagePassing(None, "sum", None, DotProduct(WIDTH, 2)),
        MessagePassing(None, "sum", PreNorm(WIDTH, FeedForward(WIDTH)), DotProduct(WIDTH, 2, dropout=0.5)),
        MessagePassing(None, "max"),
        MessagePassing(None, "std", None, Degree(WIDTH, WIDTH)),
    ]
    for layer in layers:
        layer(_features(NODES, WIDTH), _edges())
    planned = steps.planned
    monkeypatch.setattr(steps, "planned", None)
    for n in (5, 30, 12):
        graph = graphs.from_edges(torch.randint(0, n, (2, 3 * n)), n)
        for layer in layers:
            assert layer(_features(n, WIDTH), graph).shape[0] == n
    monkeypatch.setattr(steps, "planned", planned)
    with pytest.raises(ValueError, match="11"):
        engine.run(Round(_edges(), _features(NODES - 1, 1, WIDTH), normalize="none"))


def test_training_with_dropout_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MessagePassing(graphs.window(2), "sum", PreNorm(16, FeedForward(16)), DotProduct(16, 2, dropout=0.5))
    x = _features(NODES, 16).requires_grad_()
    layer(x).sum().backward()
    monkeypatch.setattr(steps, "planned", None)
    first, second = layer(x), layer(x)
    assert not first.equal(second), "each call draws a seed"
    second.sum().backward()
