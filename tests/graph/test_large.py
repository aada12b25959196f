"""Graphs of a million nodes and more: what binding, counting and planning them takes, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from time import thread_time

import numpy as np
import pytest
import torch
from steps import at_most

from mpnn import Graph, Topology, graphs
from mpnn.engine.plan import plan
from mpnn.graph.blocks import count_blocks
from mpnn.graph.runs import Runs
from mpnn.round import Round
from mpnn.scores import Dot

MILLION = 10**6


def attention(graph: Graph) -> Round:
    features = torch.zeros(()).expand(graph.num_dst, 8, 64).requires_grad_()
    return Round(graph, features, Dot(features, features, 0.125))


FEW_RUNS: list[Callable[[], Topology]] = [
    *(graphs.complete, graphs.causal, lambda: graphs.window(256), lambda: graphs.causal() & graphs.window(256)),
    *(lambda: graphs.longformer(512, globals=4), lambda: graphs.causal() & graphs.longformer(512, globals=[0, 7])),
    *(lambda: graphs.prefix(1000), lambda: ~graphs.window(9), lambda: graphs.documents([1000] * 1000)),
    *(lambda: graphs.global_nodes(1000), lambda: graphs.documents([1000] * 1000) & graphs.causal()),
]


@pytest.mark.parametrize("topology", FEW_RUNS, ids=lambda build: str(build())[:40])
@pytest.mark.sample(3)
def test_a_million_nodes_are_bound_and_planned_in_few_calls(topology: Callable[[], Topology]) -> None:
    with at_most(calls=100_000, megabytes=400):  # 24 bytes for a run and its row, and as much while they are merged
        graph = topology()._graph(MILLION, MILLION)
        assert plan(attention(graph)).candidates[0].seconds > 0
        assert plan(replace(attention(graph), normalize="none")).candidates[0].seconds > 0
        assert graph.rows(MILLION - 1, MILLION).num_edges > 0


def _least(run: Callable[[], object]) -> float:
    """The least processor time of seven runs, in seconds."""
    times = []
    for _ in range(7):
        begin = thread_time()
        run()
        times.append(thread_time() - begin)
    return min(times)


@pytest.mark.slow
@pytest.mark.parametrize("topology", FEW_RUNS[1:], ids=lambda build: str(build())[:40])
def test_a_million_nodes_are_bound_in_a_few_times_what_a_complete_graph_takes(topology: Callable[[], Topology]) -> None:
    """A complete graph takes 35 ms on an Intel Xeon, the others 1.1 to 3.3 times that; listed hubs, a run each in every
    row, 6.7 times. The processor's speed does not matter."""
    simplest, bound = graphs.complete(), topology()
    unit = _least(lambda: simplest._graph(MILLION, MILLION).runs.start)
    took = _least(lambda: bound._graph(MILLION, MILLION).runs.start)
    assert took < (14 if "[0, 7]" in str(bound) else 7) * unit


def test_counts_are_exact() -> None:
    n = MILLION
    assert graphs.causal().bind(n).num_edges == n * (n + 1) // 2
    assert graphs.window(256).bind(n).num_edges == 513 * n - 256 * 257
    assert graphs.global_nodes(4).bind(n).num_edges == 8 * n - 16
    assert (~graphs.causal()).bind(n).num_edges == n * (n - 1) // 2
    assert count_blocks(graphs.complete().bind(n).runs, 50, 50) == ((n // 50) ** 2, n * n)
    assert count_blocks(graphs.causal().bind(n).runs, 50, 50)[0] == (n // 50) * (n // 50 + 1) // 2
    assert count_blocks(graphs.identity().bind(n).runs, 32, 96)[0] == n // 32


@pytest.mark.parametrize(
    "topology",
    [
        *(graphs.fixed(100), graphs.fixed(10), graphs.strided(100), graphs.window(3000, 2), graphs.window(10**9, 2)),
        *(~graphs.fixed(100), graphs.strided(1000) | graphs.fixed(1001)),
    ],
    ids=str,
)
def test_too_many_runs_are_refused_before_any_work(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpnn.graph.capacity.available_bytes", lambda: 1 << 33)
    message = r"with [\d,]+ or more runs of sources would need about [\d.,]+ GiB, but 8\.0 GiB are available; use"
    with at_most(calls=1_000_000, megabytes=400), pytest.raises(MemoryError, match=message):
        topology._graph(MILLION, MILLION)


@pytest.mark.slow
def test_rows_that_do_not_fit_are_refused_before_any_work() -> None:
    order = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))
    halves = Topology.cliques(lambda n: np.arange(n) % 2)  # every second node: a run for each edge
    with at_most(calls=1_000_000, megabytes=200):
        for build in (
            lambda: graphs.random(200_000)._graph(MILLION, MILLION),
            lambda: graphs.permutation(order)._graph(100_000, 100_000),
            lambda: halves._graph(MILLION, MILLION).runs,
            lambda: graphs.identity()._graph(10**11, 10**7),
        ):
            with pytest.raises(MemoryError, match=r"would need about [\d.,]+ GiB"):
                build()


def test_documents_are_cliques() -> None:
    graph = graphs.documents([3, 1, 0, 1, 3])._graph(8, 8)
    assert graph.parts is not None
    assert graph.parts.lengths.tolist() == [3, 1, 1, 3]
    assert [x.tolist() for x in graph.parts.sizes] == [[1, 3], [2, 2]]
    assert graph.labels is not None
    assert graph.labels.tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    assert [members.tolist() for members in graph.cliques] == [[[3], [4]], [[0, 1, 2], [5, 6, 7]]]
    assert graph.num_edges == 9 + 1 + 1 + 9
    assert (graphs.documents([3, 5]) & graphs.causal())._graph(8, 8).labels is None
    assert graphs.causal().bind(4).reverse().parts is None  # rows of one start or one stop are not enough
    assert Graph.from_runs(Runs.of(3, 3, [(np.arange(3), np.array([0, 0, 1]), 3)])).parts is None
    assert graphs.from_blocks([[1], [0]], size=2, num_blocks=2).parts is None


def test_plans_of_random_rows_take_memory_by_run() -> None:
    for topology in (graphs.bigbird(), graphs.random(4)):  # runs: four or five per row
        graph = topology._graph(MILLION, MILLION)
        with at_most(calls=500_000, megabytes=200):
            plan(attention(graph))
