"""Strips of rows: equal to the rows of runs that they stand for, at a cost that does not grow with the rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from steps import at_most

from mpnn import Graph, Topology, graphs
from mpnn.engine.plan import plan
from mpnn.graph.blocks import BlockMask, count_blocks
from mpnn.graph.runs import Runs
from mpnn.graph.strips import Strips
from mpnn.round import Round
from mpnn.scores import Dot

HUNDRED_MILLION = 10**8


@pytest.fixture
def strips_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Topologies bind to strips at any size; otherwise small graphs are rows of runs."""
    monkeypatch.setattr("mpnn.graph.topology._FEW_ROWS", 0)
    graphs.cache.clear()
    yield
    graphs.cache.clear()


@st.composite
def strips_and_runs(draw: st.DrawFn, num_dst: int, num_src: int) -> tuple[Strips, Runs]:
    """Strips of any intervals, and the same intervals row by row."""
    cuts = draw(st.lists(st.integers(1, num_dst), max_size=3))
    rows = np.unique([0, *cuts, num_dst])
    end = st.integers(-3, num_src + 3)
    interval = st.tuples(st.integers(0, len(rows) - 2), end, end, st.booleans(), st.booleans())
    strip, first, last, by_row = [], [], [], []
    for k, start, stop, start_moves, stop_moves in draw(st.lists(interval, max_size=7)):
        row = np.arange(rows[k], rows[k + 1])
        starts, stops = start + start_moves * (row - row[0]), stop + stop_moves * (row - row[0])
        strip.append(k)
        first.append((starts[0], stops[0]))
        last.append((starts[-1], stops[-1]))
        by_row.append((row, starts, stops))
    ends = (np.array(x, np.int64).reshape(-1, 2).T for x in (first, last))
    return Strips.union(num_src, rows, np.array(strip, np.int64), *ends), Runs.of(num_dst, num_src, by_row)


@st.composite
def two_of_a_size(draw: st.DrawFn) -> tuple[tuple[Strips, Runs], tuple[Strips, Runs]]:
    size = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return draw(strips_and_runs(*size)), draw(strips_and_runs(*size))


def assert_cliques(edges: Strips | Runs, runs: Runs) -> None:
    """`cliques` are those of the boolean matrix, or None."""
    if edges.cliques is None:
        return
    sizes = np.repeat(*edges.cliques)
    label = np.repeat(np.arange(len(sizes)), sizes)
    assert (runs.dense() == (label[:, None] == label)).all()


@settings(deadline=None, max_examples=100)
@given(two_of_a_size(), st.data())
def test_strips_are_the_rows_of_runs_they_stand_for(
    both: tuple[tuple[Strips, Runs], tuple[Strips, Runs]], data: st.DataObject
) -> None:
    (a, a_runs), (b, b_runs) = both
    pairs = [(a, a_runs), (a.complement(), a_runs.complement())]
    pairs += [(a | b, a_runs | b_runs), (a & b, a_runs & b_runs), (a - b, a_runs - b_runs)]
    for strips, runs in pairs:
        assert strips.runs().same_as(runs)
        assert (strips.num_edges, strips.num_runs, strips.most_runs) == (runs.num_edges, runs.num_runs, runs.most_runs)
        assert strips.degree_range() == runs.degree_range() == (runs.degree().min(), runs.degree().max())
        for edges in (strips, runs):
            assert_cliques(edges, runs)
        assert (strips.is_complete, strips.is_causal) == (runs.is_complete, runs.is_causal)
        stop = data.draw(st.integers(0, runs.num_dst))
        start = data.draw(st.integers(0, stop))
        assert strips.between(start, stop).runs().same_as(runs.take(np.arange(start, stop)))


@given(two_of_a_size())
def test_neighboring_rows_form_strips(both: tuple[tuple[Strips, Runs], tuple[Strips, Runs]]) -> None:
    for strips, runs in both:
        again = Strips.of_runs(runs)
        assert again.runs().same_as(runs)
        assert len(again.rows) <= 2 * len(strips.rows)  # a row between two strips may be one of its own


@settings(deadline=None, max_examples=60)
@given(two_of_a_size(), st.sampled_from([(1, 1), (2, 6), (6, 2), (4, 6), (3, 2)]))
def test_blocks_are_counted_as_they_are_listed(
    both: tuple[tuple[Strips, Runs], tuple[Strips, Runs]], size: tuple[int, int]
) -> None:
    (a, a_runs), (b, b_runs) = both
    for strips, runs in ((a, a_runs), (a | b, a_runs | b_runs), (a - b, a_runs - b_runs)):
        mask = BlockMask.of(runs, *size)
        area = int((mask.high - mask.low).sum()) * size[0]
        assert count_blocks(runs, *size) == count_blocks(strips, *size) == (len(mask.column), area)


@pytest.mark.usefixtures("strips_of_few_rows")
@pytest.mark.parametrize("topology", [graphs.complete(), graphs.window(3), graphs.strided(16), graphs.documents([])])
def test_no_row_is_no_strip(topology: Topology) -> None:
    edges = topology.bind(0).structure
    assert isinstance(edges, Strips)
    assert edges.num_edges == edges.num_runs == edges.runs().num_edges == count_blocks(edges, 32, 96)[0] == 0


@pytest.mark.parametrize("few", [0, 4096])
def test_documents_are_cliques_without_a_label_per_node(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr("mpnn.graph.topology._FEW_ROWS", few)
    graph = graphs.documents([3, 1, 0, 1, 3])._graph(8, 8)
    assert isinstance(graph.structure, Runs if few else Strips)
    assert graph.clique_sizes is not None
    assert [x.tolist() for x in graph.clique_sizes] == [[1, 3], [2, 2]]
    assert graph.labels is not None
    assert graph.labels.tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    assert [members.tolist() for members in graph.cliques] == [[[3], [4]], [[0, 1, 2], [5, 6, 7]]]
    assert graph.num_edges == 9 + 1 + 1 + 9
    assert (graphs.documents([3, 5]) & graphs.causal())._graph(8, 8).clique_sizes is None
    assert graphs.causal().bind(4).reverse().runs.cliques is None  # rows of one start or one stop are not enough
    assert Runs.of(3, 3, [(np.arange(3), np.array([0, 0, 1]), 3)]).cliques is None
    assert graphs.from_blocks([[1], [0]], size=2, num_blocks=2).runs.cliques is None


@pytest.mark.usefixtures("strips_of_few_rows")
def test_a_rule_whose_ends_jump_between_its_breaks_is_refused() -> None:
    def twice(i: np.ndarray, num_src: int) -> list[tuple[object, object]]:
        return [(0, 2 * i + 1)]

    def never(num_dst: int, num_src: int) -> tuple[int, ...]:
        return ()

    with pytest.raises(ValueError, match=r"the run \[0, 1\] of row 0 becomes \[0, 15\] in row 7.*add a break"):
        Topology.of(twice, breaks=never).bind(8)


def attention(graph: Graph) -> Round:
    features = torch.zeros(()).expand(graph.num_dst, 8, 64).requires_grad_()
    return Round(graph, features, Dot(features, features, 0.125))


AT_ANY_SIZE: list[Callable[[], Topology]] = [
    *(graphs.complete, graphs.causal, lambda: graphs.window(256), lambda: graphs.causal() & graphs.window(256)),
    *(lambda: graphs.longformer(512, globals=4), lambda: graphs.causal() & graphs.longformer(512, globals=[0, 7])),
    *(lambda: graphs.prefix(1000), lambda: ~graphs.window(9), lambda: graphs.window(4, dilation=3)),
    *(lambda: graphs.strided(10**6), lambda: graphs.documents([10**5] * 1000), lambda: graphs.global_nodes(10**7)),
]


@pytest.mark.parametrize("topology", AT_ANY_SIZE, ids=lambda build: str(build())[:40])
@pytest.mark.sample(3)
def test_a_plan_for_a_hundred_million_nodes_takes_no_memory_by_node(topology: Callable[[], Topology]) -> None:
    with at_most(calls=100_000, megabytes=100):  # a byte per node would be 100 MB
        graph = topology()._graph(HUNDRED_MILLION, HUNDRED_MILLION)
        assert plan(attention(graph)).candidates[0].seconds > 0
        assert plan(replace(attention(graph), normalize="none")).candidates[0].seconds > 0
        assert graph.rows(HUNDRED_MILLION - 1, HUNDRED_MILLION).num_edges > 0
        if graph.clique_sizes is not None:
            assert graph.reverse().num_edges == graph.num_edges
    assert "runs" not in vars(graph)  # they would take 2.4 GB


def test_counts_are_exact_at_any_size() -> None:
    n = HUNDRED_MILLION
    assert graphs.causal().bind(n).num_edges == n * (n + 1) // 2
    assert graphs.window(256).bind(n).num_edges == 513 * n - 256 * 257
    assert graphs.global_nodes(4).bind(n).num_edges == 8 * n - 16
    assert (~graphs.causal()).bind(n).num_edges == n * (n - 1) // 2
    assert count_blocks(graphs.complete().bind(n).structure, 50, 50) == ((n // 50) ** 2, n * n)
    assert count_blocks(graphs.causal().bind(n).structure, 50, 50)[0] == (n // 50) * (n // 50 + 1) // 2
    assert count_blocks(graphs.identity().bind(n).structure, 32, 96)[0] == n // 32


@pytest.mark.parametrize(
    "topology", [graphs.fixed(1000), graphs.strided(1000), graphs.window(1000, 3)], ids=lambda t: str(t)
)
def test_combs_over_a_million_nodes_take_memory_by_their_strips(topology: Topology) -> None:
    with at_most(calls=500_000, megabytes=500):
        assert topology._graph(10**6, 10**6).num_edges > 10**6


@pytest.mark.parametrize(
    "topology",
    [
        *(graphs.fixed(100), graphs.fixed(10), graphs.strided(100), graphs.window(3000, 2), graphs.window(10**9, 2)),
        ~graphs.fixed(100),
        graphs.strided(1000) | graphs.fixed(1001),
    ],
    ids=str,
)
def test_strips_with_too_many_runs_are_refused_before_any_work(topology: Topology) -> None:
    message = r"[\d,]+ strips of rows with [\d,]+ or more runs of sources would need about .* 2\.0 GiB are allowed; use"
    with at_most(calls=1_000_000, megabytes=400), pytest.raises(MemoryError, match=message):
        topology._graph(10**6, 10**6)


@pytest.mark.slow
def test_rows_that_do_not_fit_are_refused_before_any_work() -> None:
    order = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))
    halves = Topology.cliques(lambda n: np.arange(n) % 2)  # every second node: a run for each edge
    with at_most(calls=1_000_000, megabytes=200):
        for build in (
            lambda: graphs.random(200_000)._graph(10**6, 10**6),
            lambda: graphs.permutation(order)._graph(100_000, 100_000),
            lambda: halves._graph(10**6, 10**6).runs,
            lambda: graphs.identity()._graph(10**9, 10**9).runs,
        ):
            with pytest.raises(MemoryError, match=r"would need about [\d.,]+ GiB"):
                build()


def test_blocks_of_random_rows_take_memory_by_run() -> None:
    graph = graphs.bigbird()._graph(10**6, 10**6)  # a strip for each block of 64 rows
    with at_most(calls=500_000, megabytes=60):
        plan(attention(graph))
    rows = graphs.random(4)._graph(10**6, 10**6)  # runs: four per row
    with at_most(calls=500_000, megabytes=200):
        plan(attention(rows))
