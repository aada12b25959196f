"""Every backend against the specification: the same numbers, gradients and dropped edges, or a sentence why not.

docs/backends.md says which requests each backend supports; a backend that refuses one of these fails here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from capabilities import (
    GRAPHS,
    REQUESTS,
    request,
    run,
    simple,
    supported,
)
from torch import Tensor

from mpnn import engine, graphs, ops
from mpnn.backends import BACKENDS, Backend, csr, dense, edge_list, scatter, tiles
from mpnn.engine import plan
from mpnn.engine.plan import refusal as why_not
from mpnn.engine.rewrites.prepare import lower_score
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import Dot

# Sums of at most 60 float64 terms of size about 10, twice over (softmax, then values): 60 * 10 * 2 * 1.1e-16 < 2e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
EQUAL = {"rtol": 0, "atol": 0}
ATTENDING = [b for b in BACKENDS if supported(b, "dot product")]


def with_marks(backend: Backend, *more: Any, name: str = "") -> Any:
    """Parameters of a test; those of `scatter` need its extra."""
    marks = [pytest.mark.scatter] if backend is scatter else []
    return pytest.param(backend, *more, marks=marks, id=f"{name}-{backend.NAME}" if name else backend.NAME)


def both(graph: Graph, make: Callable[[Graph], Round], backend: Backend) -> tuple[list[Tensor], list[Tensor]]:
    """Output, gradients and weights, from the backend and from the specification."""
    given = make(graph)
    leaves = [t for t in given.tensors if t.requires_grad]
    found = []
    for b in (backend, edge_list):
        out, weights = run(b, given)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        gradients = torch.autograd.grad(out, leaves, direction, materialize_grads=True) if leaves else ()
        found.append([out, *gradients, *(() if weights is None else (weights,))])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("backend", "asked"),
    [
        with_marks(b, asked, name=asked)
        for asked in REQUESTS
        for b in BACKENDS
        if b is not edge_list and supported(b, asked)
    ],
)
@pytest.mark.covering
def test_agrees_with_the_specification(asked: str, backend: Backend) -> None:
    for name, graph in GRAPHS.items():
        if supported(backend, name):
            ours, expected = both(graph, REQUESTS[asked], backend)
            for k, (a, b) in enumerate(zip(ours, expected, strict=True)):
                torch.testing.assert_close(a, b, **CLOSE, msg=lambda m, n=name, k=k: f"tensor {k} over {n}: {m}")


@pytest.mark.parametrize("backend", [with_marks(b) for b in BACKENDS])
def test_a_node_without_in_neighbors_gets_zeros_and_finite_gradients(backend: Backend) -> None:
    names = [n for n in ("repeated edges", "strictly causal: an empty row") if supported(backend, n)]
    assert names
    for graph in map(GRAPHS.get, names):
        empty = graph.degree() == 0
        assert empty.any()
        for make in (make for asked, make in REQUESTS.items() if supported(backend, asked)):
            given = make(graph)
            out, _ = run(backend, given)
            assert out[..., empty, :, :].eq(0).all()
            if leaves := [t for t in given.tensors if t.requires_grad]:
                assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


SPREADING = (
    *("grouped heads", "dropout, grouped heads, bias", "bias per edge", "sigmoid", "unnormalized", "additive (GAT)"),
    *("additive v2 (GATv2)", "aggregation: sum", "weighted aggregation: sum"),
)


@pytest.mark.parametrize(
    ("asked", "backend"), [(asked, b) for asked in SPREADING for b in (edge_list, tiles, csr) if supported(b, asked)]
)
@pytest.mark.covering
def test_what_is_not_finite_reaches_only_those_who_attend_to_it(asked: str, backend: Backend) -> None:
    node, size = 75, 150  # several tiles of 32 x 96, some of them full
    topologies = ["causal()", "window(3)", "longformer(8, globals=2)", "documents([50, 40, 60])", "strided(20)"]
    over = [topology.bind(size) for topology in map(graphs.parse, topologies)]
    over.append((graphs.complete() - graphs.identity()).bind(size))
    if backend is not tiles:
        over.append(graphs.from_edges(torch.randint(0, size, (2, 900)), size))
    for graph, bad in zip(over, cycle((torch.nan, torch.inf, -torch.inf)), strict=False):
        given = REQUESTS[asked](graph)
        expected, _ = run(backend, given)
        ends = {"query": given.score.query, "key": given.score.key} if isinstance(given.score, Dot) else {}
        for where, spoilt in {"value": given.value, **ends}.items():
            at = (*[-1] * len(given.batch), node)
            with torch.no_grad():
                before = spoilt[at].clone()
                spoilt[at] = bad
                out, _ = run(backend, given)
                spoilt[at] = before
            reached = graph.dense()[:, node] if where != "query" else torch.arange(size) == node
            if given.batch:
                assert out[0].equal(expected[0]), graph
                out = out[1]
            kept = (expected[1] if given.batch else expected)[~reached]
            torch.testing.assert_close(out[~reached], kept, **(CLOSE if backend is tiles else EQUAL))
            if where != "key":  # a key may give a score of -inf, and then weighs nothing
                assert not out[reached].isfinite().all(), graph


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
@pytest.mark.parametrize("topology", [graphs.documents([5, 6]), graphs.causal() & graphs.documents([5, 6])], ids=str)
def test_packed_documents_do_not_leak_a_bit(topology: object, backend: Backend) -> None:
    graph = topology.bind(11)
    given = request(graph, (2,))
    before, _ = engine.run(given, backend.NAME)
    with torch.no_grad():
        for x in (given.score.query, given.score.key, given.value):
            x[:, :5] = 100 * torch.randn_like(x[:, :5])
    after, _ = engine.run(given, backend.NAME)
    assert not after[:, :5].equal(before[:, :5])
    assert after[:, 5:].equal(before[:, 5:])


# ---------------------------------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_features_are_summed_in_float32_at_degree_100_000(dtype: torch.dtype, backend: Backend) -> None:
    n, unit = 100_000, torch.finfo(dtype).eps / 2
    graph = graphs.complete().bind(2, n)
    query, key = torch.randn(2, 1, 4).to(dtype), torch.randn(n, 1, 4).to(dtype)
    value = (1 + torch.rand(n, 1, 4)).to(dtype)
    given = Round(graph, value, Dot(query, key, 0.5))
    wide = Round(graph, value.double(), Dot(query.double(), key.double(), 0.5))
    out, exact = engine.run(given, backend.NAME)[0], engine.run(wide, "edge_list")[0]
    assert out.dtype == dtype
    # Weights and output are each rounded once to 16 bits; n float32 additions of positive terms lose n units at most.
    assert ((out.double() - exact).abs() <= (2.5 * unit + n * 2**-24) * exact).all()


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
def test_large_biases_keep_their_precision_beside_16_bit_features(backend: Backend) -> None:
    graph = graphs.complete().bind(1, 500)
    penalty = (torch.arange(-499, 500) + 4000) / 16  # 250 and more, where bfloat16 knows integers only
    features = torch.zeros(500, 1, 8, dtype=torch.bfloat16)
    value = torch.randn(500, 1, 8).bfloat16()
    given = Round(graph, value, Dot(features[:1], features, 1.0), (BiasTable(-penalty[:, None], Offset(499)),))
    exact = (torch.arange(500).double() / -16).softmax(0) @ value[:, 0].double()
    bound = 2.5 * 2**-8 * value.abs().max()  # weights and output are each rounded once
    assert ((engine.run(given, backend.NAME)[0][0, 0].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("backend", ["edge_list", "dense"])
@pytest.mark.parametrize("more", [{}, {"normalize": "sigmoid"}, {"return_weights": True}], ids=str)
def test_autocast_does_not_reach_into_backends(more: dict[str, object], backend: str) -> None:
    graph = graphs.window(2).bind(9)
    features = [torch.randn(9, 2, 4) for _ in range(3)]
    exact = ops.attend(graph, *features, backend=backend, **more)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.attend(graph, *features, backend=backend, **more)
    torch.testing.assert_close(out, exact, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b is not edge_list], ids=lambda b: b.NAME)
def test_refusals_are_sentences_and_nothing_falls_back(backend: Backend) -> None:
    refused = [make(GRAPHS["causal"]) for asked, make in REQUESTS.items() if not supported(backend, asked)]
    refused += [simple(backend)(graph) for name, graph in GRAPHS.items() if not supported(backend, name)]
    assert refused
    for given in refused:
        reason = why_not(backend, lower_score(given, backend.NAME))
        assert len(reason.split()) >= 4, reason
        assert "\n" not in reason
        assert not reason.endswith(".")
        with pytest.raises(plan.Refused) as failure:
            engine.run(given, backend.NAME)
        assert str(failure.value) == f"backend {backend.NAME!r} cannot run this: {reason}"


def test_too_large_a_mask_is_refused() -> None:
    graph = graphs.window(1).bind(10_000)
    given = Round(graph, torch.zeros(10_000, 1, 1), Dot(torch.zeros(10_000, 1, 1), torch.zeros(10_000, 1, 1), 1.0))
    assert why_not(dense, given) == "a mask of 10,000 x 10,000 pairs is too large"
    assert "800,000,000 logits" in why_not(
        dense,
        replace(given, graph=graphs.complete().bind(10_000), return_weights=True, value=torch.zeros(8, 10_000, 1, 1)),
    )


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
def test_asked_for_by_name_it_is_that_one_that_runs(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(request: Round, name: str) -> tuple[Tensor, None]:
        ran.append(name)
        return request.value.new_zeros(request.graph.num_dst, request.heads, request.value.shape[-1]), None

    for b in BACKENDS:
        monkeypatch.setattr(b, "run", partial(run, name=b.NAME))
    for name, graph in GRAPHS.items():
        if supported(backend, name):
            engine.run(request(graph), backend.NAME)
    assert set(ran) == {backend.NAME}


# ---------------------------------------------------------------------------------------- the scatter extra


@pytest.mark.scatter
@pytest.mark.parametrize("shape", [(5, 0), (0, 5, 4), (3, 5, 0)], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_features_without_numbers_are_refused(reduce: str, shape: tuple[int, ...]) -> None:
    """torch_sparse's kernels end the process."""
    graph = graphs.from_edges(graphs.window(1).bind(5).edge_index, 5)
    with pytest.raises(ValueError, match="do not support features without numbers"):
        ops.aggregate(graph, torch.zeros(shape), reduce, backend="scatter")
    assert ops.aggregate(graph, torch.zeros(shape), reduce).shape == shape
