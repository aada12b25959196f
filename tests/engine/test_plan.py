"""The plan: what is chosen, why not the others, and what is printed."""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import mpnn
from mpnn import Graph, MessagePassing, engine, explain, graphs, ops
from mpnn.aggregate import Composed, Index, Max, Min, aggregator, per_node, segment_sum
from mpnn.attention import Additive, DotProduct
from mpnn.backends import BACKENDS, csr, dense
from mpnn.backends.cost_model import Estimate
from mpnn.engine import choice, plan as plans, slowness
from mpnn.engine.plan import Candidate, Plan, Refused, choose, plan, refusal as why_not
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.topology import Topology
from mpnn.round import Round
from mpnn.scores import Dot


def request(topology: Topology, n: int, heads: int = 4, width: int = 32, grad: bool = False) -> Round:
    query, key, value = (torch.zeros(n, heads, width, requires_grad=grad) for _ in range(3))
    return Round(topology.bind(n), value, Dot(query, key, 1.0))


def test_explain_prints_the_plan_and_returns_it(capsys: pytest.CaptureFixture[str]) -> None:
    op = MessagePassing(graphs.causal(), "sum", None, DotProduct(64, 4))
    found = explain(op, torch.randn(2, 100, 64))
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    lines = printed.splitlines()
    assert lines[0] == "graph   Graph(causal(): 100 nodes, 5,050 edges), 50.50% of all pairs, 100 runs"
    assert lines[1] == "work    dot-product attention, softmax, 4 x 16, batch 2, float32 on cpu, with gradients"
    assert lines[2] == f"layer   {found.layer}"
    assert lines[2].startswith("layer   step by step: the compiled call has no backward pass")
    assert lines[3] == f"plan    {found.backend}"
    assert len(lines) == 4 + len(BACKENDS) - 2 + 1, "scatter and scan serve few rounds, and not this one"
    assert lines[-1].startswith("maps    ")
    assert lines[4].split()[0] == found.backend
    assert lines[4].endswith("chosen")


def test_a_limited_number_of_forms_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_candidates_by_form", {})
    monkeypatch.setattr(choice, "_MAX_CANDIDATES", 3)
    for heads in range(1, 9):
        choose(request(graphs.window(1), 7, heads=heads))
        assert 0 < len(choice._candidates_by_form) <= 3


def test_a_graph_that_says_causal_and_is_not_is_marked() -> None:
    hub = graphs.window(2) | graphs.global_nodes(1)
    late = mpnn.engine.plan.plan(request((graphs.causal() & graphs.window(2)) | graphs.global_nodes(1), 64))
    assert "not causal: node 0 receives from node 63 (causal() & (...)" in late.graph
    for marked in (graphs.causal() & hub, hub):
        assert "not causal" not in mpnn.engine.plan.plan(request(marked, 64)).graph


def test_every_backend_says_why_or_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    op = MessagePassing(graphs.from_edges(torch.tensor([[0, 1], [1, 0]]), 2), "sum", None, Additive(8, 4, heads=2))
    found = mpnn.explain(op, torch.randn(2, 8))
    printed = capsys.readouterr().out
    assert {c.name for c in found.candidates} == {b.NAME for b in BACKENDS}
    for candidate in found.candidates:
        if candidate.reason is None:
            assert 0 < candidate.seconds < 1
            assert candidate.bytes >= 0
        else:
            assert f"no: {candidate.reason}" in printed
    (of_dense,) = [c for c in found.candidates if c.name == "dense"]
    assert of_dense.reason == "it does not compute additive scores"


def test_explain_takes_what_a_call_takes() -> None:
    op = MessagePassing(None, "mean")
    found = explain(op, torch.randn(3, 4), graph=graphs.complete(), source=torch.randn(5, 4))
    assert "3 x 5, 15 edges" in found.graph
    assert found.work == "aggregation, 1 x 4, float32 on cpu, without gradients"


def test_explain_obeys_the_backend_of_the_operator() -> None:
    op = MessagePassing(graphs.complete(), "sum", None, DotProduct(8, 2), backend="edge_list")
    assert explain(op, torch.randn(5, 8)).backend == "edge_list"
    refusing = MessagePassing(graphs.complete(), "max", None, DotProduct(8, 2), backend="dense")
    with pytest.raises(Refused, match="backend 'dense' cannot run this: it cannot aggregate messages by"):
        explain(refusing, torch.randn(5, 8))


def test_what_is_explained_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for backend in BACKENDS:
        monkeypatch.setattr(backend, "run", lambda request, name=backend.NAME: (ran.append(name), None))
    cases = [
        (graphs.complete(), 64),
        (graphs.window(2), 3000),
        (graphs.window(20), 50),
        (graphs.documents([9, 91]), 100),
    ]
    for topology, n in cases:
        engine.run(request(topology, n))
    assert ran == [plan(request(topology, n)).backend for topology, n in cases]


def test_explain_says_why_a_faster_backend_does_not_run() -> None:
    x = torch.randn(9, 1, 64)
    texts = str(mpnn.explain(ops.attend, graphs.documents([9]).bind(9), x, x, x))
    assert (
        "would be faster, but the last digits of an item's result would change with the other items of its batch"
        in texts
    )
    named = str(mpnn.explain(ops.attend, graphs.complete().bind(9), x, x, x, backend="edge_list"))
    assert "would run, and is estimated faster" in named
    assert "batch" not in named


@pytest.mark.parametrize("grad", [False, True])
def test_the_choice_is_sensible_where_it_is_clear(grad: bool) -> None:
    """Cases in which one is several times as fast as the other; `benchmarks/fit.py` has such cases."""
    by_pairs = [(graphs.complete(), 1024), (graphs.causal(), 1024), (graphs.documents([512] * 8), 4096)]
    by_edges = [(graphs.identity(), 4096), (graphs.window(2), 4096)]
    for topology, n in by_pairs:
        assert plan(request(topology, n, grad=grad)).backend != "edge_list"
    for topology, n in by_edges:
        assert plan(request(topology, n, grad=grad)).backend != "dense"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("nodes", "top", "key_heads", "backend"),
    [(8192, 256, 1, "csr"), (2048, 512, 1, "csr"), (2048, 512, 8, "tiles"), (2048, 1024, 1, "tiles")],
)
@pytest.mark.covering
def test_heads_that_share_a_key_go_by_rows_unless_these_are_dense(
    grad: bool, nodes: int, top: int, key_heads: int, backend: str
) -> None:
    """Sparse attention of DeepSeek V3.2: each query chooses its sources; its eight heads have one key."""
    graph = graphs.chosen(torch.randint(nodes, (nodes, top + top**2 // nodes)), nodes)
    query, key, value = (torch.zeros(nodes, h, 64, requires_grad=grad) for h in (8, key_heads, key_heads))
    found = choose(Round(graph, value, Dot(query, key, 1.0)))
    assert backend == found.name


def test_only_passes_that_copy_keys_are_priced_for_it() -> None:
    """Forward from eight heads of a key on, backward from four, with 16 edges of a node at least."""
    for heads, degree, forward, back in (
        (8, 16, True, True),
        (4, 16, False, True),
        (2, 16, False, False),
        (8, 15, False, False),
    ):
        graph = graphs.from_edges(torch.randint(50, (2, 50 * degree)), 50)
        query, key = torch.zeros(50, heads, 8, requires_grad=True), torch.zeros(50, 1, 8)
        counts = csr.counts(Round(graph, key, Dot(query, key, 1.0)))
        for direction, copies in (("", forward), (", back", back)):
            assert (f"copied number{direction}" in counts, f"shared product{direction}" in counts) == (copies, copies)
            assert (f"gathered number{direction}" in counts) == (not copies)


def test_sources_without_edges_cost_nothing_forward() -> None:
    """A pointer over 50,000 cities, of which each tour has 25 left: `csr` reads those, and took a ninth of the time of
    `edge_list`."""
    src = torch.arange(50_000).view(1000, 50)[:, :25].flatten()
    graph = graphs.from_edges(
        torch.stack([src, torch.arange(1000).repeat_interleave(25)]), num_src=50_000, num_dst=1000
    )
    key = torch.empty(50_000, 1, 128)
    with torch.no_grad():
        assert choose(Round(graph, key, Dot(key[:1000], key, 1.0), return_weights=True)).name == "csr"


def test_gradients_and_more_of_everything_take_longer() -> None:
    small = request(graphs.window(8), 200)
    able = [backend for backend in BACKENDS if why_not(backend, small) is None]
    assert {backend.NAME for backend in able} == {"dense", "tiles", "csr", "edge_list"}
    for more in (request(graphs.window(8), 200, grad=True), request(graphs.window(8), 800)):
        for backend in able:
            assert backend.estimate(more).seconds > backend.estimate(small).seconds
            assert backend.estimate(more).bytes >= backend.estimate(small).bytes


def test_an_unknown_backend_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="no backend 'cuda'; there are auto, dense, "):
        choose(request(graphs.complete(), 3), "cuda")
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        MessagePassing(graphs.complete(), backend="cuda")(torch.randn(3, 2))


def test_plans_are_values() -> None:
    found = plan(request(graphs.complete(), 3))
    assert isinstance(found, Plan)
    assert repr(found) == f"Plan(backend={found.backend!r})"


@pytest.mark.parametrize("nodes", [160, 256])
def test_torch_keeps_logits_for_the_gradient_of_a_bias(nodes: int) -> None:
    """Triangle attention: a bias for each pair, shared by a large batch. torch's kernels do not differentiate it."""
    query, key, value = (torch.empty(nodes, nodes, 4, 32, requires_grad=True) for _ in range(3))

    def planned(learned: bool) -> tuple[Plan, Candidate]:
        bias = torch.empty(nodes**2, 4, requires_grad=learned)
        found = plan(Round(graphs.complete().bind(nodes), value, Dot(query, key, 1.0), bias=(bias,)))
        return found, next(c for c in found.candidates if c.name == "dense")

    (chosen, learned), (_, fixed) = planned(True), planned(False)
    assert chosen.backend == "tiles"
    assert learned.seconds > 1.5 * fixed.seconds
    assert learned.bytes > 2 * fixed.bytes


def test_features_that_need_gradients_are_planned_for_apart() -> None:
    graph = graphs.from_edges([[0, 1, 2, 2, 0], [1, 1, 0, 1, 3]], 4)
    query, key, value = (torch.randn(4, 2, 3) for _ in range(3))

    def signature(*learned: torch.Tensor, table: torch.Tensor) -> object:
        for x in (query, key, value):
            x.requires_grad_(any(x is one for one in learned))
        return Round(graph, value, Dot(query, key, 1.0), bias=(BiasTable(table),)).signature

    plain, learned = torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)
    without = signature(table=plain)
    assert without == signature(table=plain)
    others = [signature(one, table=plain) for one in (query, key, value)] + [signature(table=learned)]
    assert without not in others
    with torch.no_grad():
        assert signature(value, table=plain) not in [without, *others]


def test_what_is_slow_says_so_once_and_explain_always(capsys: pytest.CaptureFixture[str]) -> None:
    slowness._said.clear()
    graph = graphs.from_edges(torch.randint(0, 4096, (2, 1 << 16)), 4096)
    x = torch.randn(4096, 64, requires_grad=True)

    def own(messages: torch.Tensor, index: Index) -> torch.Tensor:
        return segment_sum(messages, index)

    op = MessagePassing(graph, own, None, None)
    with pytest.warns(slowness.SlowRound, match=r"times the time of a kernel.*`combine`, `identity` and `gradient`"):
        op(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MessagePassing(graphs.window(16), own, None, None)(x)
        MessagePassing(graph, "max", None, None)(x)
        MessagePassing(graphs.window(1), own, None, None)(x[:50])
    assert "slow    the round runs as plain torch on edge lists" in str(explain(op, x))
    assert explain(MessagePassing(graph, "max", None, None), x).slow == ""
    capsys.readouterr()
    small = graphs.window(1)
    assert explain(MessagePassing(small, "max", None, None), x).slow == ""


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (graphs.documents([5]).bind(5), True),
        (graphs.documents([1, 1, 1]).bind(3), True),
        ((graphs.documents([2, 3]) & graphs.causal()).bind(5), True),
        (graphs.window(2).bind(6), False),
        (graphs.complete().bind(5), False),
        (graphs.causal().bind(5), False),
        (graphs.identity().bind(5), False),
        (graphs.from_edges([[0, 1, 0, 1, 2], [0, 0, 1, 1, 2]], 3), True),
        (graphs.from_edges([[0, 1, 2], [0, 1, 2]], 3), False),
    ],
    ids=str,
)
def test_which_graphs_are_packed(graph: Graph, expected: bool) -> None:
    assert choice._is_packed(graph) == expected


class Own:
    NAME = "own"


OWN = Own()
PAIRS = graphs.from_edges(torch.cartesian_prod(torch.arange(64), torch.arange(64)).T.contiguous(), 64)
LISTED = graphs.from_edges([[0, 1], [1, 0]], 64)
CLIQUES = graphs.windows(8, 8, size=4).bind(64)
TEXTS = graphs.documents([30, 34]).bind(64)


@pytest.mark.parametrize(
    ("graph", "able", "of_kind"),
    [
        (PAIRS, "dense tiles csr edge_list", "dense tiles csr edge_list"),
        (LISTED, "dense tiles csr edge_list own", "csr own"),
        (LISTED, "dense edge_list", "dense edge_list"),
        (LISTED, "dense scan edge_list own", "scan own"),
        (TEXTS, "dense tiles csr edge_list own", "tiles own"),
        (TEXTS, "dense csr edge_list", "csr"),
        (TEXTS, "dense edge_list", "dense"),
        (TEXTS, "edge_list", "edge_list"),
        (graphs.window(2).bind(64), "dense tiles csr edge_list own", "dense tiles csr edge_list own"),
        (CLIQUES, "dense csr edge_list", "csr"),
    ],
    ids=str,
)
def test_among_which_backends_prices_decide(graph: Graph, able: str, of_kind: str) -> None:
    """Of lists of edges and of documents, what an item gets does not depend on its batch."""
    named = {b.NAME: b for b in (*BACKENDS, OWN)}
    x = torch.zeros(64, 2, 8)
    given = Round(graph, x, Dot(x, x, 1.0))
    backends = [named[name] for name in able.split()]

    def kinds(given: Round, equalities: Any = ()) -> str:
        return " ".join(b.NAME for b in choice._of_kind(given, backends, equalities))  # type: ignore[arg-type]

    assert kinds(given) == of_kind
    on_gpu = given.with_fields(value=x.to("meta"))
    assert kinds(on_gpu) == able
    rewrite = object()
    if graph is LISTED and "csr" not in able and "scan" not in able:
        assert kinds(given, [(rewrite, None)]) == "", "a rewrite runs what only matrices and the specification run"
    in_order = [(choice.rewrites.IN_ORDER, None)]
    assert kinds(given, in_order) == ("" if graph is CLIQUES else kinds(given, [(rewrite, None)]))
    assert kinds(given, [(choice.rewrites.IN_ORDER, "a reason")]) == kinds(given, [(rewrite, None)])
    with mpnn.deterministic_batches():
        assert kinds(given) == ("csr" if graph is PAIRS else of_kind)
    if graph is TEXTS and able == "dense edge_list":
        whole = given.with_fields(return_weights=True)
        assert kinds(whole) == "dense edge_list", "which are not computed document by document"


def test_lists_of_more_than_half_of_all_pairs_may_run_as_matrices() -> None:
    assert choice.is_matrix(64, 10, 321)
    assert not choice.is_matrix(64, 10, 320)
    assert not choice.is_matrix(63, 10, 600)


@pytest.mark.parametrize(("sizes", "text"), [((3, 3), "3 nodes"), ((3, 5), "3 x 5")])
def test_graphs_are_described_by_their_nodes(sizes: tuple[int, int], text: str) -> None:
    graph = graphs.from_edges([[0, 1], [2, 2]], num_dst=sizes[0], num_src=sizes[1])
    value = torch.zeros(sizes[1], 1, 2)
    found = plan(Round(graph, value, normalize="none"))
    share = 2 / (sizes[0] * sizes[1])
    assert found.graph.startswith(f"Graph({text}, 2 edges), {share:.2%} of all pairs")
    assert not found.is_named
    assert plan(Round(graph, value, normalize="none"), "csr").is_named


FOUND = Plan(
    "csr",
    (
        Candidate("tiles", 0.5e-3, 900.0, None),
        Candidate("csr", 1e-3, 2e6, None, "mean as sum (csr)"),
        Candidate("as_fast", 1e-3, 0.0, None),
        Candidate("edge_list", 3.0, 5e12, None),
        Candidate("dense", float("inf"), float("inf"), "it lacks something"),
        Candidate("scan", float("inf"), float("inf"), "it lacks something"),
        Candidate("scatter", float("inf"), float("inf"), "it lacks something"),
    ),
    "Graph(3 nodes)",
    "aggregation",
    "two by torch",
    "mean as sum (csr)",
    "runs slowly",
    layer="step by step: because",
)


def test_the_text_of_a_plan() -> None:
    batch = "would be faster, but the last digits of an item's result would change with the other items of its batch"
    lines = [
        "graph   Graph(3 nodes)",
        "work    aggregation",
        "layer   step by step: because",
        "plan    csr",
        "by      mean as sum (csr)",
        f"  tiles        500 us     900 B  {batch}",
        "  csr         1.00 ms      2 MB  chosen",
        "  as_fast     1.00 ms       0 B  would run, but is estimated slower",
        "  edge_list    3.00 s    5.0 TB  would run, but is estimated slower",
        "  dense             -         -  no: it lacks something",
        "slow    the round runs slowly",
        "maps    two by torch",
    ]
    assert str(FOUND).splitlines() == lines
    named = str(replace(FOUND, is_named=True)).splitlines()
    assert named == [line.replace(batch, "would run, and is estimated faster") for line in lines]
    short = Plan("scan", (*FOUND.candidates[:1], Candidate("scan", 2e-3, 0.0, None)), "a graph", "work")
    assert str(short).splitlines()[2:] == [
        "plan    scan",
        f"  tiles        500 us     900 B  {batch}",
        "  scan        2.00 ms       0 B  chosen",
    ]
    long = Plan("b", (Candidate("of twelve ab", 1.0, 0.0, None), Candidate("b", 0.5, 0.0, None)), "", "")
    assert [line.index("  ", 3) - 2 for line in str(long).splitlines()[3:]] == [12, 1]


def test_the_table_of_a_plan() -> None:
    text = FOUND._repr_html_()
    for part in ("plan: csr", "layer: step by step: because", "linear maps: two by torch", "no: it lacks something"):
        assert part in text
    assert text.count("chosen") == 1
    assert text.count("no: ") == 1
    bare = replace(FOUND, maps="", layer="")._repr_html_()
    assert "layer: " not in bare
    assert "linear maps: " not in bare


@pytest.mark.parametrize(
    ("write", "number", "text"),
    [
        (plans._count, 0, "0"),
        (plans._count, 999_999, "999,999"),
        (plans._count, 1_000_000, "1 M"),
        (plans._count, 12_520_000, "12.5 M"),
        (plans._count, 999_400_000, "999 M"),
        (plans._count, 999_600_000, "1 G"),
        (plans._count, 5e11, "500 G"),
        (plans._count, 2e18, "2 E"),
        (plans._seconds, 0.0, "0 us"),
        (plans._seconds, 0.9e-3, "900 us"),
        (plans._seconds, 1e-3, "1.00 ms"),
        (plans._seconds, 0.9, "900.00 ms"),
        (plans._seconds, 1.0, "1.00 s"),
        (plans._seconds, 119.9, "119.90 s"),
        (plans._seconds, 120.0, "2.0 min"),
        (plans._seconds, 7199.0, "120.0 min"),
        (plans._seconds, 7200.0, "2.0 h"),
        (plans._seconds, 172_800.0, "2.0 days"),
        (plans._seconds, 1e9, "11,574.1 days"),
        (plans._bytes, 999.0, "999 B"),
        (plans._bytes, 999.5, "1 kB"),
        (plans._bytes, 999.4e6, "999 MB"),
        (plans._bytes, 999.5e6, "1.0 GB"),
        (plans._bytes, 999.94e9, "999.9 GB"),
        (plans._bytes, 999.95e9, "1.0 TB"),
        (plans._bytes, 1e18, "1,000.0 PB"),
    ],
)
def test_numbers_in_few_digits(write: Callable[[float], str], number: float, text: str) -> None:
    assert write(number) == text


@pytest.mark.parametrize(
    ("num_edges", "nodes", "percent"),
    [(0, 100, "0.00%"), (1, 100, "0.01%"), (1, 101, "0.01%"), (1, 200, "0.003%"), (5, 10, "5.00%"), (1, 1, "100.00%")],
)
def test_the_share_of_pairs(num_edges: int, nodes: int, percent: str) -> None:
    edges = torch.zeros(2, num_edges, dtype=torch.int64)
    found = plan(Round(graphs.from_edges(edges, nodes), torch.zeros(nodes, 1, 2), normalize="none"))
    assert f", {percent} of all pairs" in found.graph
    assert "runs" not in found.graph


def test_graphs_of_runs_and_of_cliques_say_so() -> None:
    def described(graph: Graph) -> str:
        return plan(Round(graph, torch.zeros(graph.num_src, 1, 2), normalize="none")).graph

    assert described(graphs.documents([2, 3]).bind(5)).endswith("52.00% of all pairs, 2 cliques")
    assert described((graphs.causal() & graphs.documents([2, 3])).bind(5)).endswith("36.00% of all pairs, 5 runs")
    assert described(graphs.complete().bind(5)).endswith("100.00% of all pairs, 5 runs")
    assert described(graphs.complete().bind(0)).endswith("0.00% of all pairs, 0 runs")


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.99, ""), (8.0, "8 times .*8.0 s instead of 1.0 s"), (0.9 * 8e3, "7200 times")]
)
def test_from_which_time_on_a_round_is_slow(seconds: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From eight times the time of kernels on."""
    monkeypatch.setattr(slowness, "_kernels", lambda round: 1.0)
    given = request(graphs.window(1), 2)
    by = next(b for b in BACKENDS if b.NAME == "edge_list")
    found = slowness.sentence(given, choice.Choice(by, (), Estimate(seconds, 0.0)))
    assert bool(found) == bool(text)
    assert re.search(text, found)
    if found:
        assert found.endswith("To make it fast: use sum, mean, max, min, var, std or pna, which have kernels")
    assert slowness.sentence(given, choice.Choice(by, (), None)) == ""
    assert slowness.sentence(given, choice.Choice(csr, (), Estimate(seconds, 0.0))) == ""
    assert slowness.sentence(given.with_fields(return_state=True), choice.Choice(by, (), Estimate(9.0, 0.0))) == ""


def test_times_in_warnings() -> None:
    found = [slowness._shown(x) for x in (0.00496, 0.0099, 0.01, 0.0123, 0.9994, 1.0, 12.34)]
    assert found == ["5 ms", "9.9 ms", "10 ms", "12 ms", "999 ms", "1.0 s", "12.3 s"]


def test_weights_take_three_times_as_long_as_sums() -> None:
    graph = graphs.from_edges(torch.randint(50, (2, 400)), 50)
    value = torch.zeros(50, 2, 8)
    plain = Round(graph, value, normalize="none")
    seconds = csr.estimate(plain).seconds
    assert slowness._kernels(plain) == seconds
    assert slowness._kernels(plain.with_fields(bias=(torch.zeros(400, 2),))) == 3 * seconds


@pytest.mark.parametrize("seconds", [0.0049, 0.005])
def test_short_rounds_do_not_warn(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "sentence", lambda round, choice: "is slow")
    monkeypatch.setattr(slowness, "_said", set())
    given = Round(graphs.from_edges([[0], [1]], 2), torch.zeros(2, 1, 2), normalize="none")
    for expected in (int(seconds >= 0.005), 0):  # once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            slowness.warn(given, choice.Choice(csr, (), Estimate(seconds, 0.0)))
        assert len(caught) == expected
    slowness.warn(given, choice.Choice(csr))


def test_reasons_name_a_user_s_aggregator() -> None:
    class Range(Composed):
        parts = (Max(), Min())

        def compose(self, results: Sequence[torch.Tensor], degree: torch.Tensor) -> torch.Tensor:
            return results[0] - results[1]

    def longest(messages: torch.Tensor, index: Index) -> torch.Tensor:
        return Max().reduce(messages, index)

    attended = replace(request(graphs.causal(), 8), reduce=Range())
    assert why_not(dense, attended) == "it cannot aggregate messages by Range, which has the part max"
    for own in (longest, per_node(longest)):
        summed = replace(request(graphs.causal(), 8), score=None, normalize="none", reduce=aggregator(own))
        assert why_not(csr, summed) == "longest has no combine(a, b)"
        attended = replace(attended, reduce=aggregator(own))
        assert (why_not(dense, attended) or "").endswith("and not longest")
