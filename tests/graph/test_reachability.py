"""How far messages travel, against powers of boolean matrices."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from mpnn import graphs
from mpnn.graph import reachability
from mpnn.graph.runs import Runs

squares = st.integers(0, 9).flatmap(lambda n: arrays(bool, (n, n)))


def walks(matrix: np.ndarray, k: int) -> np.ndarray:
    """Pairs that a walk of exactly k edges connects."""
    connected = np.eye(len(matrix), dtype=bool)
    for _ in range(k):
        connected = (matrix.astype(int) @ connected.astype(int)) > 0
    return connected


def check_power(runs: Runs, matrix: np.ndarray) -> None:
    for k in range(1, 6):
        assert reachability.power(runs, k).same_as(Runs.from_edges(*matrix.shape, *np.nonzero(walks(matrix, k)))), k


@given(squares)
def test_power_counts_walks(matrix: np.ndarray) -> None:
    check_power(Runs.from_edges(*matrix.shape, *np.nonzero(matrix)), matrix)


def test_power_costs_runs_not_edges() -> None:
    n = 30_000  # 6 * 10^7 edges and 9 * 10^8 pairs, but 3 * 10^4 runs
    graph = graphs.window(1000).bind(n).power(5)
    assert graph.runs.same_as(graphs.window(5000).bind(n).runs)
    assert "ends" not in vars(graph)


@given(squares)
def test_reach_counts_the_sources_that_arrive(matrix: np.ndarray) -> None:
    n = len(matrix)
    runs = Runs.from_edges(n, n, *np.nonzero(matrix))
    keeping = matrix | np.eye(n, dtype=bool)  # a node keeps what it knows
    for layers in range(5):
        expected = walks(keeping, layers).mean() if n else 1.0
        assert reachability.fraction(runs, layers) == pytest.approx(expected, abs=1e-12)
    is_causal = not np.triu(matrix, 1).any()
    irrelevant = np.triu(np.ones_like(keeping), 1) & is_causal  # over a causal graph, nothing flows from later nodes
    complete_after = [layers for layers in range(n + 1) if (walks(keeping, layers) | irrelevant).all()]
    assert reachability.diameter(runs) == (complete_after[0] if complete_after else None)


def test_stacked_windows_overlap_into_a_wide_view() -> None:
    assert graphs.window(4).bind(129).diameter() == 32  # from end to end in steps of four
    assert graphs.longformer(8, globals=1).bind(129).diameter() == 2  # by way of the hub
    assert graphs.complete().bind(129).diameter() == 1
    assert graphs.complete().bind(1).diameter() == 0
    assert graphs.causal().bind(129).diameter() == 1  # from all earlier nodes
    assert (graphs.causal() & graphs.window(4)).bind(129).diameter() == 32
    assert (graphs.causal() & graphs.documents([64, 65])).bind(129).diameter() is None
    assert graphs.causal().bind(129).reach(1) == pytest.approx(130 / 258)


def test_large_graphs_are_sampled() -> None:
    n = 4001
    graph = graphs.window(10).bind(n)
    dense = sum(min(i + 30, n - 1) - max(i - 30, 0) + 1 for i in range(n)) / n**2
    # 256 evenly spread sources instead of 4001: each of the two cut corners is measured by two of them
    assert graph.reach(3) == pytest.approx(dense, rel=0.01)
    assert graphs.causal().bind(n).diameter() == 1


def test_sources_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = (graphs.window(2) | graphs.random(1)).bind(61)
    whole = graph.reach(2), graph.diameter()
    monkeypatch.setattr(reachability, "_CHUNK", 1)  # one source at a time: a graph that needs chunks is too slow here
    assert (graph.reach(2), graph.diameter()) == (pytest.approx(whole[0], abs=1e-12), whole[1])


def test_reach_stops_at_its_deadline() -> None:
    runs = graphs.causal().bind(50).runs
    assert reachability.fraction(runs, 2, math.inf) == reachability.fraction(runs, 2)
    for compute in (lambda at: reachability.fraction(runs, 2, at), lambda at: reachability.diameter(runs, at)):
        with pytest.raises(TimeoutError):
            compute(-math.inf)


@given(st.tuples(st.integers(0, 7), st.integers(0, 7)).flatmap(lambda shape: arrays(bool, shape)))
def test_components_are_sources_that_rows_join(matrix: np.ndarray) -> None:
    dst, src = matrix.nonzero()
    found = reachability.components(Runs.from_edges(*matrix.shape, dst, src))
    together = matrix.T.astype(int) @ matrix > 0
    joined = walks(together | np.eye(len(together), dtype=bool), matrix.shape[1])
    assert (joined == (found[:, None] == found)).all()
    assert sorted({*found.tolist()}) == list(range(len({*found.tolist()})))


def test_components_of_a_graph() -> None:
    assert graphs.documents([2, 3]).bind(5).components().tolist() == [0, 0, 1, 1, 1]
    assert graphs.from_edges([[0, 2, 1], [0, 0, 1]], 4).components().tolist() == [0, 1, 0, 2]
    assert graphs.causal().bind(3).components().tolist() == [0, 0, 0]
