"""Rewrites: rounds that equal others. What explain names is what runs, and what a rewrite does not name, it refuses."""

import random
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, engine, explain, graphs, ops
from mpnn.aggregate import PNA, Composed, Index, Max, Mean, Min, Std, Sum, Var, aggregator
from mpnn.attention import DotProduct
from mpnn.backends import BACKENDS, registered
from mpnn.engine import choice, rewrites
from mpnn.engine.choice import Refused, choose
from mpnn.engine.plan import plan
from mpnn.engine.rewrites import REWRITES, Rewrite, rewrite as of_rewrite, softmax_dst
from mpnn.engine.rewrites.composed_in_parts import ComposedInParts
from mpnn.engine.rewrites.prepare import as_planned
from mpnn.engine.rewrites.sets_in_one_row import SetsInOneRow
from mpnn.graph import Graph
from mpnn.round import Result, Round
from mpnn.round.needs import SENTENCES
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

HEADS, WIDTH = 4, 8


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def edges_of(nodes: int, count: int) -> Graph:
    """Edges with repetitions; some destinations have none."""
    return graphs.from_edges(
        torch.stack([torch.randint(0, nodes, (count,)), torch.randint(0, nodes - 3, (count,))]), nodes
    )


class Total:
    """An own aggregator with a kernel."""

    identity = 0.0

    @staticmethod
    def combine(a: float, b: float) -> float:
        return a + b

    @staticmethod
    def gradient(message: float, out: float) -> float:
        return 1.0

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return Sum().reduce(messages, index)


SCORES = {
    "dot": lambda n, batch: Dot(leaf(*batch, n, HEADS, WIDTH), leaf(*batch, n, 2, WIDTH), 0.4, softcap=3.0),
    "additive": lambda n, batch: AdditiveScore(leaf(*batch, n, HEADS), leaf(*batch, n, HEADS), LeakyReLU()),
    "additive v2": lambda n, batch: AdditiveV2Score(
        leaf(*batch, n, HEADS, WIDTH), leaf(*batch, n, HEADS, WIDTH), leaf(HEADS, WIDTH), LeakyReLU()
    ),
}
OPTIONS: dict[str, Any] = {
    "sinks": {"sinks": True},
    "sinks and weights": {"sinks": True, "return_weights": True},
    "mean": {"reduce": Mean()},
    "mean, sinks, dropout": {"reduce": Mean(), "sinks": True, "dropout": 0.3},
    "softmax_dst": {"normalize": "softmax_dst", "return_weights": True},
    "mean over destinations": {"normalize": "softmax_dst", "reduce": Mean(), "dropout": 0.3},
    "max": {"reduce": Max()},
    "min, dropout, weights": {"reduce": Min(), "dropout": 0.3, "return_weights": True},
    "variance by sigmoid": {"reduce": Var(), "normalize": "sigmoid"},
    "std over destinations": {"reduce": Std(), "normalize": "softmax_dst"},
    "pna": {"reduce": PNA()},
    "own combine": {"reduce": Total(), "normalize": "none"},
    "max with sinks": {"reduce": Max(), "sinks": True},
}


def request(graph: Graph, score: str, options: dict[str, Any], batch: tuple[int, ...] = ()) -> Round:
    given = dict(options)
    if given.get("sinks"):
        given["sinks"] = leaf(HEADS)
    value = leaf(*batch, graph.num_src, 2, WIDTH - 1)
    given["seed"] = torch.tensor(7) if "dropout" in given else None
    return Round(
        graph, value, SCORES[score](graph.num_dst, batch), dst_bias=leaf(*batch, graph.num_dst, HEADS), **given
    )


def assert_same(given: Round, backend: str) -> None:
    """Results and gradients are those of the specification."""
    leaves, found = [x for x in given.tensors if x.requires_grad], []
    for name in (backend, "edge_list"):
        results = [x for x in engine.run(given, name) if x is not None]
        total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
        found.append([*results, *torch.autograd.grad(total, leaves, materialize_grads=True)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.covering
def test_each_is_the_specification(name: str, score: str) -> None:
    torch.manual_seed(0)
    for graph, batch in ((edges_of(21, 70), (2,)), ((graphs.causal() & graphs.window(3)).bind(17), ())):
        given = request(graph, score, OPTIONS[name], batch)
        assert choose(as_planned(given), "csr").steps
        assert_same(given, "csr")
        assert_same(given, "auto")


@pytest.mark.parametrize("reduce", [Sum(), Mean(), Max(), Min(), Var(), Std()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(
    "graph",
    [graphs.complete().bind(23), graphs.complete().bind(5, 9), graphs.documents([7, 1, 9]).bind(17)],
    ids=str,
)
def test_sets_are_reduced_once(graph: Graph, reduce: Any) -> None:
    given = Round(
        graph, leaf(2, graph.num_src, 1, 5).detach().round().requires_grad_(), normalize="none", reduce=reduce
    )
    once = choice._through(SetsInOneRow(), given, lambda inner: choose(inner, "csr"))
    assert "each set once" in str(once)
    outs = [once.run(given).out, engine.run(given, "edge_list")[0]]  # type: ignore[union-attr]
    direction = torch.randn_like(outs[0])
    found = [[out, *torch.autograd.grad(out, given.value, direction)] for out in outs]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


def test_sets_are_quicker() -> None:
    for graph in (graphs.complete().bind(1000), graphs.documents([250] * 4).bind(1000)):
        assert "each set once" in plan(Round(graph, torch.randn(1000, 1, 16), normalize="none")).rewrites


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "rounded"])
@pytest.mark.parametrize("name", [name for name in OPTIONS if "combine" not in name])
def test_16_bits_between_the_rounds_of_a_rewrite_are_not_rounded(name: str, keep: bool) -> None:
    """Only the results are, and with `keep_accumulate_dtype` not even these."""
    torch.manual_seed(0)
    given = request(edges_of(21, 70), "dot", {**OPTIONS[name], "keep_accumulate_dtype": keep}, (2,))
    narrow = given.map(lambda x, name, role: x.detach().bfloat16() if x.is_floating_point() else x)
    wide = narrow.map(lambda x, name, role: x.float() if x.is_floating_point() else x)
    expected = engine.run(wide, "edge_list")
    for backend in ("csr", "auto"):
        for ours, exact in zip(engine.run(narrow, backend), expected, strict=True):
            if exact is not None and ours is not None:
                assert ours.dtype == (torch.float32 if keep else torch.bfloat16)
                exact = exact if keep else exact.bfloat16().float()
                tolerance = 2e-5 if keep else 2**-7
                torch.testing.assert_close(ours.float(), exact, rtol=tolerance, atol=2e-5)


def test_16_bits_are_rounded_once() -> None:
    """The mean of messages whose sum float16 does not hold, and the standard deviation from a variance of float32."""
    graph = edges_of(12, 4000)
    value, bias = torch.full((12, 2, 8), 300.0).half() + torch.randn(12, 2, 8).half(), torch.ones(4000, 2)
    for reduce in (Mean(), Std()):
        given = Round(graph, value, bias=(bias,), normalize="sigmoid", reduce=reduce)
        wide = replace(given, value=value.double(), bias=(bias.double(),))
        for backend in ("csr", "auto"):
            out = engine.run(given, backend)[0]
            assert out.dtype == torch.float16
            torch.testing.assert_close(out.double(), engine.run(wide, "edge_list")[0], rtol=2e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------ explain


def test_explain_names_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random rounds: the backends that the plan names are those that were called, in the order of their first call."""
    draw, ran = random.Random(0), []
    torch.manual_seed(0)
    for b in BACKENDS:

        def run(given: Round, name: str = b.NAME, run: Any = b.run) -> Result:
            ran.append(name)
            return run(given)

        monkeypatch.setattr(b, "run", run)
    used = set()
    for _ in range(40):
        n = draw.choice([20, 200, 600])
        graph = draw.choice(
            [
                *(graphs.window(8).bind(n), graphs.causal().bind(n), graphs.complete().bind(n), edges_of(n, 4 * n)),
                *(graphs.documents([n // 2] * 2).bind(n), graphs.chosen(torch.randint(0, n, (1, HEADS, n, 6)), n)),
            ]
        )
        batch = (1,) if graph.stack else draw.choice([(), (2,)])
        x, options = torch.randn(*batch, n, HEADS, WIDTH), {}
        attends = bool(graph.stack) or draw.random() < 0.6
        score = draw.choice([Dot(x, x, 0.3), AdditiveScore(x[..., 0], x[..., 1], LeakyReLU())]) if attends else None
        options["normalize"] = draw.choice(["softmax", "softmax", "softmax_dst", "sigmoid"]) if attends else "none"
        if graph.stack:
            options["normalize"] = "softmax"
        if options["normalize"] == "softmax" and draw.random() < 0.5:
            options["sinks"] = torch.randn(HEADS)
        if attends and draw.random() < 0.3:
            options["dropout"] = 0.2
        if attends and not graph.stack and draw.random() < 0.3:
            options["return_weights"] = True
        # Sinks of heads that become nodes go with sums and means.
        names = (
            ["sum", "mean"] if graph.stack and "sinks" in options else ["sum", "mean", "max", "std", "median", "pna"]
        )
        reduce = aggregator(draw.choice(names))
        given = Round(graph, x, score, reduce=reduce, **options)
        shown = plan(given)
        ran.clear()
        engine.run(given)
        assert shown.backend == " + ".join(dict.fromkeys(ran)), str(shown)
        used |= {r.NAME for r in REWRITES if r.NAME in shown.rewrites}
    assert len(used) >= 6, used


def test_explain_shows_the_rewrites(capsys: pytest.CaptureFixture[str]) -> None:
    op = MessagePassing(graphs.window(32), "max", None, DotProduct(32, 4))
    found = explain(op, torch.randn(2048, 32))
    assert found.rewrites == "weights, then their aggregate (csr, csr)"
    assert f"by      {found.rewrites}" in capsys.readouterr().out


def test_stacked_graphs_with_sinks_and_a_mean_go_through_three() -> None:
    graph = graphs.chosen(torch.randint(0, 30, (1, HEADS, 30, 4)), 30)
    given = request(graph, "dot", {"reduce": Mean(), "sinks": True}, (1,))
    given = replace(given, score=replace(given.score, key=leaf(1, 30, HEADS, WIDTH)), value=leaf(1, 30, HEADS, WIDTH))
    assert str(choose(given, "csr")).count("(") == 3
    for head in range(HEADS):
        one = slice(head, head + 1)
        score = Dot(given.score.query[0, :, one], given.score.key[0, :, one], 0.4, softcap=3.0)
        bias = given.dst_bias[0, :, one]
        alone = Round(
            graph.entry(0, head), given.value[0, :, one], score, reduce=Mean(), sinks=given.sinks[one], dst_bias=bias
        )
        torch.testing.assert_close(engine.run(given)[0][0, :, one], engine.run(alone, "edge_list")[0])


# ------------------------------------------------------------------------------------------------ opt-in


@dataclass(eq=False)
class Later(Round):
    """A round of a version to come."""

    twist: float = 0.0


def examples() -> dict[str, Round]:
    """For each rewrite, a round that it is about."""
    graph, stack = edges_of(9, 20), graphs.chosen(torch.randint(0, 9, (1, 2, 9, 3)), 9)
    x = torch.randn(9, 2, 4)
    score = Dot(x, x, 0.5)
    return {
        "graphs of items and heads as one": Round(stack, x[None], Dot(x[None], x[None], 0.5)),
        "each set once": Round(graphs.complete().bind(9), x, normalize="none"),
        "parts one by one": Round(graph, x, normalize="none", reduce=Std()),
        "mean as sum": Round(graph, x, score, reduce=Mean()),
        "weights, then their aggregate": Round(graph, x, score, reduce=Max()),
        "softmax over destinations by two over sources": Round(graph, x, score, normalize="softmax_dst"),
        "logits, weights by torch, their aggregate": Round(graph, x, score, normalize="sparsemax"),
        "sinks by lse": Round(graph, x, score, sinks=torch.zeros(2)),
        "cliques in order": Round(graphs.windows(2, 4, size=2).bind(8), x[:8], Dot(x[:8], x[:8], 0.5)),
        "features in float32": Round(graph, x.half(), Dot(x.half(), x.half(), 0.5), keep_accumulate_dtype=True),
    }


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.NAME)
def test_a_field_that_it_does_not_name_is_refused(rewrite: Rewrite) -> None:
    given = examples()[rewrite.NAME]
    assert rewrite.applies(given)
    assert given.needs <= rewrite.SERVES
    assert rewrite.refusal(given) is None
    later = Later(**{field.name: getattr(given, field.name) for field in fields(Round)}, twist=0.5)
    names = [r.NAME for r, reason in choice._candidates(later)[1] if reason is None]
    assert names == []
    with pytest.raises(Refused):
        choose(later)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.NAME)
def test_it_names_needs_that_exist(rewrite: Rewrite) -> None:
    assert SENTENCES.keys() >= rewrite.SERVES
    assert rewrite.REASONS.keys() & rewrite.SERVES == set()


class NegatedMinimum(Rewrite):
    """A maximum as a minimum: `max(x) = -min(-x)`."""

    NAME = "maximum as minimum"
    SERVES = frozenset({"cpu", "float32", "no score", "max", "explicit graph"})

    def applies(self, round: Round) -> bool:
        return type(round.reduce) is Max

    def apply(self, round: Round, run: Any) -> Any:
        return round.with_fields(value=-round.value, reduce=Min()), lambda result: Result(-result.out)


class Minima:
    """A backend of minima alone."""

    NAME, SERVES = "minima", frozenset({"cpu", "float32", "no score", "min", "explicit graph"})

    def refusal(self, round: Round) -> None:
        return None

    def estimate(self, round: Round) -> Any:
        return BACKENDS[-1].estimate(round)

    def run(self, round: Round) -> Result:
        return BACKENDS[-1].run(round)


def test_a_new_rewrite_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of minima runs maxima as long as the list has the rewrite."""
    ours, graph, x = Minima(), edges_of(9, 20), torch.randn(9, 1, 3)
    given = Round(graph, x, normalize="none", reduce=Max())
    monkeypatch.setattr(choice, "registered", lambda: (*registered(), ours))
    assert choice.refusal(ours, given) == "it cannot aggregate messages by max"
    choice._candidates_by_form.clear()
    with monkeypatch.context() as patch:
        patch.setattr(rewrites, "REWRITES", (*REWRITES, NegatedMinimum()))
        assert str(choose(given, "minima")) == "maximum as minimum (minima)"
        torch.testing.assert_close(choose(given, "minima").run(given).out, engine.run(given, "edge_list")[0])
    assert choice.refusal(ours, given) == "it cannot aggregate messages by max"


def test_every_need_has_the_sentence_of_a_backend_or_of_a_rewrite() -> None:
    """A stacked graph that cannot be folded says why."""
    stack = graphs.chosen(torch.randint(0, 9, (1, 2, 9, 3)), 9)
    x = torch.randn(1, 9, 2, 4)
    for backend, normalize in product(("auto", "csr"), ("softmax", "sigmoid")):
        with pytest.raises(Refused, match="no common list of edges"):
            ops.attend(stack, x, x, x, return_weights=True, normalize=normalize, backend=backend)


class _OwnReduce(Std):
    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return super().reduce(messages, index)


class _NoParts(Composed):
    parts = ()


@pytest.mark.parametrize(
    ("aggregate", "applies"), [(Std(), True), (PNA(), True), (Sum(), False), (_OwnReduce(), False), (_NoParts(), False)]
)
def test_which_aggregators_run_by_their_parts(aggregate: Any, applies: bool) -> None:
    given = Round(graphs.complete().bind(3), torch.randn(3, 1, 2), normalize="none", reduce=aggregate)
    assert ComposedInParts().applies(given) == applies
    query = torch.randn(3, 1, 2)
    assert not ComposedInParts().applies(given.with_fields(score=Dot(query, query, 1.0), normalize="softmax"))


# ------------------------------------------------------------------------------------------------ prices and stand-ins

BATCH = (2, 3)
EDGES, NODES = 20, 8


def own_counts(monkeypatch: pytest.MonkeyPatch, rewrite: Rewrite, round: Round) -> tuple[dict[str, float], float]:
    """The operations and the bytes that a rewrite counts for its own work."""
    monkeypatch.setattr(of_rewrite, "priced", lambda device, backend, counts, size: (counts, size))
    counts, size = rewrite.estimate(round)
    return (counts or {}), size


def priced_round(rewrite: Rewrite, width: int, dtype: torch.dtype, **fields: Any) -> Round:
    """With 2 heads of keys and 4 of queries, over 20 edges of 8 nodes."""
    graph = edges_of(NODES, EDGES)
    graph = graphs.windows(2, 4, size=2).bind(NODES) if rewrite.NAME == "cliques in order" else graph
    query, key, value = (
        torch.zeros(*BATCH, NODES, heads, wide, dtype=dtype) for heads, wide in ((4, 5), (2, 5), (2, width))
    )
    return Round(graph, value, Dot(query, key, 1.0), seed=torch.tensor(1)).with_fields(**fields)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.NAME)
@pytest.mark.parametrize("width", [7, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_work_of_rewrites_themselves(
    rewrite: Rewrite, width: int, dropout: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = 6
    weights = EDGES * entries * 4
    numbers = NODES * entries * 4 * width
    bytes_of = 8 if dtype == torch.float64 else 4
    scaled = {"call": 1.0, "scaled number": numbers}, 0
    of_values = NODES * entries * 2 * width
    of_all = NODES * entries * (4 * 5 + 2 * 5 + 2 * width)
    of_weights = {"call": 1.0}
    of_weights |= {"dropped weight": weights} if dropout else {}
    of_weights |= {"narrow weight": weights} if width == 7 else {}
    expected: dict[str, tuple[dict[str, float], float]] = {
        "graphs of items and heads as one": ({}, 0),
        "parts one by one": ({}, 0),
        "each set once": ({"call": 1, "copied number": of_values}, of_values * bytes_of),
        "mean as sum": scaled,
        "softmax over destinations by two over sources": scaled,
        "sinks by lse": scaled,
        "weights, then their aggregate": (of_weights, weights * (1 + (dropout > 0)) * bytes_of),
        "logits, weights by torch, their aggregate": (
            {"call": 20, "copied number": 20 * weights},
            weights * 10 * bytes_of,
        ),
        "features in float32": ({"call": 1, "copied number": of_all}, of_all * bytes_of),
        "cliques in order": ({"call": 4, "copied number": 4 * numbers}, 4 * numbers * bytes_of),
    }
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "scales", rewrite.scales)
        given = priced_round(rewrite, width, dtype, dropout=dropout)
        if expected[rewrite.NAME] == ({}, 0):
            assert rewrite.estimate(given) == (0, 0)
            return
        counts, size = expected[rewrite.NAME]
        assert own_counts(patch, rewrite, given) == (counts, size)
        given.value.requires_grad_()
        both = counts | {f"{what}, back": count for what, count in counts.items()}
        if rewrite.NAME == "weights, then their aggregate":
            size += weights * 2 * bytes_of
        if rewrite.NAME == "logits, weights by torch, their aggregate":
            size *= 2
        assert own_counts(patch, rewrite, given) == (both, size)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.NAME)
def test_estimates_add_up_the_rounds_of_a_rewrite(rewrite: Rewrite) -> None:
    """Times add up, and the round that needs the most memory counts."""
    given = examples()[rewrite.NAME]
    found = choice._through(rewrite, given, partial(choice._cheapest, estimated=True))
    assert isinstance(found, choice.Choice)
    own = rewrite.estimate(given)
    steps = list(found.steps)
    if rewrite.NAME == "softmax over destinations by two over sources":
        del steps[1]  # It is rarely needed.
    estimates = [step.estimate for step in steps]
    assert found.estimate is not None
    assert found.estimate.seconds == pytest.approx(own.seconds + sum(x.seconds for x in estimates if x is not None))
    assert found.estimate.bytes == own.bytes + max(x.bytes for x in estimates if x is not None)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("batch", [(), BATCH], ids=str)
def test_stand_ins_have_the_shapes_of_results_and_no_memory(
    batch: tuple[int, ...], needs_grad: bool, keep: bool
) -> None:
    graph = graphs.from_edges([[0, 1, 2], [1, 1, 0]], num_dst=5, num_src=4)
    query, key = torch.zeros(*batch, 5, 6, 2), torch.zeros(*batch, 4, 3, 2)
    value = torch.zeros(*batch, 4, 3, 7).bfloat16().requires_grad_(needs_grad)
    given = Round(graph, value, Dot(query.bfloat16(), key.bfloat16(), 1.0), keep_accumulate_dtype=keep)
    out, weights, lse, state = choice._stand_in(given)
    assert weights is lse is state is None
    _, weights, lse, _ = choice._stand_in(given.with_fields(return_weights=True, return_lse=True))
    wide = torch.float32
    assert weights is not None
    assert lse is not None
    assert [x.shape for x in (out, weights, lse)] == [(*batch, 5, 6, 7), (*batch, 3, 6), (*batch, 5, 6)]
    assert [x.dtype for x in (out, weights, lse)] == [wide if keep else torch.bfloat16] * 2 + [wide]
    assert {x.requires_grad for x in (out, weights, lse)} == {needs_grad}
    assert all(x.untyped_storage().nbytes() <= 4 for x in (out, weights, lse))


def test_sets_of_sources_are_not_divided_on_other_devices() -> None:
    """There the sum of the gradients of several sets has no fixed order."""
    for graph, alone, elsewhere in (
        (graphs.complete().bind(4), None, None),
        (graphs.documents([2, 2]).bind(4), None, "on this device the sum of the gradients of a set has no fixed order"),
        (graphs.identity().bind(4), *["its rows do not share their sources"] * 2),
        (graphs.documents([1] * 4).bind(4), *["its rows do not share their sources"] * 2),
        (graphs.causal().bind(4), *["its rows do not share their sources"] * 2),
        (graphs.complete().bind(1, 9), *["its rows do not share their sources"] * 2),
        (graphs.complete().bind(0, 9), *["its rows do not share their sources"] * 2),
    ):
        for device, sentence in (("cpu", alone), ("meta", elsewhere)):
            given = Round(graph, torch.zeros(graph.num_src, 1, 3, device=device), normalize="none")
            assert SetsInOneRow().refusal(given) == sentence


# ------------------------------------------------------------------------------------------------ large logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_from_which_lse_on_sums_are_computed_once_more(dtype: torch.dtype) -> None:
    """From a relative error of more than 2**-13."""
    largest = 2.0**-13 / torch.finfo(dtype).eps
    for x in ([largest, 0.0], [-largest, 1.0], []):
        assert not softmax_dst._is_rounded(torch.tensor(x, dtype=dtype))
    for x in ([0.0, 1.01 * largest], [-1.01 * largest]):
        assert softmax_dst._is_rounded(torch.tensor(x, dtype=dtype))


@pytest.mark.parametrize("batch", [(), (3,), (1, 3)], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 4], ids="{} heads of keys".format)
def test_values_times_factors_of_sources(heads: int, batch: tuple[int, ...]) -> None:
    """And dot products of the same sums without a scale and shared keys."""
    graph = graphs.from_edges([[0, 2, 1], [1, 1, 0]], num_dst=2, num_src=3)
    query, key, value = leaf(*batch, 2, 4, 5), leaf(*batch, 3, heads, 5), leaf(*batch, 3, heads, 7)
    factor, of_edges = leaf(*batch, 3, 4), leaf(*batch, 3, 4, 7)
    given = Round(graph, value, Dot(query, key, 0.3, softcap=2.0), edge_value=of_edges)
    found = softmax_dst._times(given, factor)
    torch.testing.assert_close(found.value, value.repeat_interleave(4 // heads, -2) * factor[..., None])
    torch.testing.assert_close(found.edge_value, of_edges * factor[..., [0, 2, 1], :, None])
    assert softmax_dst._times(given.with_fields(edge_value=None), factor).edge_value is None
    score: Any = softmax_dst._alike_both_ways(given).score
    torch.testing.assert_close(score.query, 0.3 * query)
    torch.testing.assert_close(score.key, key.repeat_interleave(4 // heads, -2))
    assert (score.scale, score.softcap) == (1.0, 2.0)
    additive = given.with_fields(score=AdditiveScore(query[..., 0], key[..., 0], LeakyReLU()))
    assert softmax_dst._alike_both_ways(additive) is additive
