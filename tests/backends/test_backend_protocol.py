"""A backend from outside of the library: one object, known by name, by the plan and by compiled programs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mpnn
from mpnn import MessagePassing, backends, graphs, ops
from mpnn.backends import BACKENDS, Estimate, register, registered
from mpnn.engine.plan import Refused, plan
from mpnn.round import Result, Round


class Ones:
    """Sums over complete graphs, one matrix product; it counts its calls."""

    NAME = "ones"
    SERVES = frozenset({"cpu", "float32", "no score", "sum"})

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.calls = seconds, 0

    def refusal(self, request: Round) -> str | None:
        graph = request.graph
        return None if graph.num_edges == graph.num_dst * graph.num_src else "it only sums over complete graphs"

    def estimate(self, request: Round) -> Estimate:
        return Estimate(self.seconds, 8.0)

    def run(self, request: Round) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        return request.value.sum(-3, keepdim=True).expand(*request.batch, request.graph.num_dst, -1, -1), None


@pytest.fixture(autouse=True)
def _unregister(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_registered", BACKENDS)  # restored after the test


def test_the_library_lists_its_own() -> None:
    assert [b.NAME for b in BACKENDS] == ["dense", "tiles", "scan", "csr", "scatter", "edge_list"]
    assert registered() == BACKENDS


def test_a_registered_backend_runs_by_name() -> None:
    ours = register(Ones())
    graph, x = graphs.complete().bind(5), torch.randn(2, 5, 3)
    out = ops.aggregate(graph, x, backend="ones")
    assert ours.calls == 1
    torch.testing.assert_close(out, ops.aggregate(graph, x, backend="edge_list"))
    assert MessagePassing(graphs.complete(), "sum", None, backend="ones")(x).equal(out)
    assert ours.calls == 2


def test_a_backend_binds_once_what_rounds_of_a_form_share() -> None:
    class Bound(Ones):
        NAME = "bound"
        bound = 0

        def bind(self, round: Round) -> Callable[[Round], Result]:
            self.bound += 1
            return lambda round: Result(self.run(round)[0])

    ours = register(Bound())
    graph = graphs.complete().bind(5)
    for width, forms in ((3, 1), (3, 1), (4, 2)):
        x = torch.randn(2, 5, width)
        out = ops.aggregate(graph, x, backend="bound")
        torch.testing.assert_close(out, ops.aggregate(graph, x, backend="edge_list"))
        assert ours.bound == forms
    assert ours.calls == 3


def test_a_run_that_is_replaced_runs() -> None:
    ours = register(Ones())
    graph, x = graphs.complete().bind(5), torch.randn(2, 5, 3)
    ops.aggregate(graph, x, backend="ones")
    ours.run = lambda round: Result(torch.zeros_like(round.value))  # type: ignore[method-assign, assignment]
    assert ops.aggregate(graph, x, backend="ones").eq(0).all()


def test_a_named_backend_that_refuses_says_why() -> None:
    register(Ones())
    with pytest.raises(Refused, match="backend 'ones' cannot run this: it only sums over complete graphs"):
        ops.aggregate(graphs.causal().bind(5), torch.randn(5, 3), backend="ones")


def test_explain_and_the_plan_list_it(capsys: pytest.CaptureFixture[str]) -> None:
    register(Ones())
    found = mpnn.explain(MessagePassing(graphs.complete(), "sum", None), torch.randn(5, 3))
    assert found.backend == "ones"
    assert "ones" in capsys.readouterr().out
    refused = plan(Round(graphs.causal().bind(5), torch.randn(5, 1, 3), normalize="none"))
    assert {c.name: c.reason for c in refused.candidates}["ones"] == "it only sums over complete graphs"
    assert refused.backend != "ones"


def test_an_expensive_one_is_not_chosen_by_itself() -> None:
    register(Ones(seconds=float("inf")))
    assert plan(Round(graphs.complete().bind(5), torch.randn(5, 1, 3), normalize="none")).backend != "ones"


def test_plans_made_before_are_made_anew() -> None:
    graph, x = graphs.complete().bind(6), torch.randn(6, 3)
    before = ops.aggregate(graph, x)  # caches a plan without the new backend
    ours = register(Ones())
    torch.testing.assert_close(ops.aggregate(graph, x), before)
    assert ours.calls == 1


def test_the_same_name_replaces() -> None:
    first, second = register(Ones()), register(Ones())
    graph, x = graphs.complete().bind(5), torch.randn(5, 3)
    ops.aggregate(graph, x, backend="ones")
    assert (first.calls, second.calls) == (0, 1)
    assert registered() == (*BACKENDS, second)


def test_compiled_programs_run_it() -> None:
    ours = register(Ones())
    op = MessagePassing(graphs.complete(), "sum", None, backend="ones")
    x = torch.randn(5, 3)
    out = torch.compile(op, fullgraph=True, backend="aot_eager")(x)
    assert ours.calls == 1
    torch.testing.assert_close(out, op(x))


@pytest.mark.parametrize(
    ("backend", "error", "sentence"),
    [
        (Ones, TypeError, "Ones is a class; pass an instance"),
        (object(), TypeError, "lacks NAME, SERVES, refusal, estimate, run"),
        (type("Half", (), {"NAME": "half", "run": None})(), TypeError, "lacks SERVES, refusal, estimate$"),
        (type("Nameless", (Ones,), {"NAME": None})(), ValueError, "must be an identifier.*got None"),
        (type("Spaced", (Ones,), {"NAME": "my backend"})(), ValueError, "must be an identifier.*got 'my backend'"),
        (type("Auto", (Ones,), {"NAME": "auto"})(), ValueError, "'auto' is taken"),
        (type("Dense", (Ones,), {"NAME": "dense"})(), ValueError, "'dense' is taken: auto, dense, tiles"),
    ],
)
def test_what_is_no_backend_is_refused(backend: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        register(backend)
    assert registered() == BACKENDS
