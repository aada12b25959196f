"""Rows of runs against plain boolean matrices."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from well_formed import check_well_formed, listed

from mpnn.graph.runs import Runs

matrices = arrays(bool, array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9))


def runs_of(matrix: np.ndarray) -> Runs:
    dst, src = np.nonzero(matrix)
    return Runs.from_edges(*matrix.shape, dst, src)


def test_any_intervals_are_clipped_sorted_and_merged() -> None:
    row = np.array([1, 0, 0, 0, 1, 1])
    start = np.array([4, 2, 0, -3, 9, 3])
    stop = np.array(
        [9, 4, 2, 1, 12, 3]
    )  # row 0: 2..4 touches 0..2; row 1: 4..9 is cut at 6; 9.. is outside; 3..3 empty
    assert listed(Runs.of(2, 6, [(row, start, stop)])) == [[(0, 4)], [(4, 6)]]


def test_intervals_broadcast_and_come_in_several_pieces() -> None:
    pieces = [(np.arange(3), 0, 1), (np.arange(3), np.arange(3) + 2, 9)]
    assert listed(Runs.of(3, 4, pieces)) == [[(0, 1), (2, 4)], [(0, 1), (3, 4)], [(0, 1)]]


def test_runs_of_neighboring_rows_do_not_run_together() -> None:
    assert listed(Runs.of(2, 3, [(np.array([0, 1]), np.array([1, 0]), np.array([3, 2]))])) == [[(1, 3)], [(0, 2)]]


def test_repeated_edges_count_once() -> None:
    runs = Runs.from_edges(2, 3, np.array([1, 1, 1, 0]), np.array([2, 2, 1, 0]))
    assert listed(runs) == [[(0, 1)], [(1, 3)]]
    assert runs.num_edges == 3


def test_take_repeats_and_reorders_rows() -> None:
    runs = Runs.from_edges(3, 3, np.array([0, 2, 2]), np.array([1, 0, 2]))
    assert listed(runs.take(np.array([2, 2, 1, 0]))) == [[(0, 1), (2, 3)], [(0, 1), (2, 3)], [], [(1, 2)]]


def test_stack_puts_blocks_on_the_diagonal() -> None:
    runs = Runs.stack([Runs.full(1, 2), Runs.full(0, 3), Runs.full(2, 1)])
    assert runs.dense().astype(int).tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]]
    check_well_formed(runs)


def test_graphs_of_different_size_do_not_combine() -> None:
    with pytest.raises(ValueError, match=r"2 x 3 and 3 x 2 \(destinations x sources\)"):
        Runs.full(2, 3) | Runs.full(3, 2)


@given(matrices)
def test_a_matrix_and_its_runs_say_the_same(matrix: np.ndarray) -> None:
    runs = runs_of(matrix)
    check_well_formed(runs)
    assert (runs.dense() == matrix).all()
    assert runs.num_edges == matrix.sum()
    assert (runs.degree() == matrix.sum(1)).all()
    assert np.array_equal(np.stack(runs.edges()), np.stack(np.nonzero(matrix)))
    dst, src = np.indices(matrix.shape)
    assert (runs.contains(dst.ravel(), src.ravel()) == matrix.ravel()).all()
    assert runs.is_complete == bool(matrix.all(1).all() and (matrix.shape[1] > 0 or matrix.shape[0] == 0))


@given(matrices)
def test_complement_and_transpose(matrix: np.ndarray) -> None:
    for runs, expected in ((runs_of(matrix).complement(), ~matrix), (runs_of(matrix).transpose(), matrix.T)):
        check_well_formed(runs)
        assert runs.same_as(runs_of(expected))
        assert (runs.dense() == expected).all()


@given(st.data())
def test_set_algebra(data: st.DataObject) -> None:
    a = data.draw(matrices)
    b = data.draw(arrays(bool, a.shape))
    for runs, expected in (
        (runs_of(a) | runs_of(b), a | b),
        (runs_of(a) & runs_of(b), a & b),
        (runs_of(a) - runs_of(b), a & ~b),
        (runs_of(a) ^ runs_of(b), a ^ b),
    ):
        check_well_formed(runs)
        assert (runs.dense() == expected).all()


@given(arrays(np.int64, st.integers(0, 12), elements=st.integers(-2, 3)))
def test_cliques_of_labels(labels: np.ndarray) -> None:
    runs = Runs.from_labels(labels)
    check_well_formed(runs)
    assert (runs.dense() == (labels[:, None] == labels)).all()


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (5, 5), (3, 5), (5, 3), (0, 4)])
def test_causal_is_recognized(size: tuple[int, int]) -> None:
    causal = np.tril(np.ones(size, bool))
    assert runs_of(causal).is_causal
    if causal.any():
        causal[-1, 0] = False
        assert not runs_of(causal).is_causal


def test_set_operations_make_rows_when_they_are_read() -> None:
    """The operands of an operation are read as intervals on one line: rows in between would be made for nothing."""
    window = Runs.of(4, 5, [(np.arange(4), np.arange(4) - 1, np.arange(4) + 2)])
    hubs = Runs.of(4, 5, [(np.arange(4), 0, 1)])
    result = (window | hubs) & Runs.full(4, 5)
    assert not {"ptr", "start", "stop"} & vars(result).keys()
    first = result.start
    assert listed(result) == [[(0, 2)], [(0, 3)], [(0, 4)], [(0, 1), (2, 5)]]
    assert result.start is first
    assert "_line" not in vars(result)
    with pytest.raises(AttributeError, match="width"):
        _ = result.width  # type: ignore[attr-defined]


def test_threads_read_the_same_rows() -> None:
    for _ in range(20):
        runs = Runs.full(50, 60) & Runs.of(50, 60, [(np.arange(50), np.arange(50), 60)])
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _, runs=runs: (runs.ptr, runs.stop), range(8)))
        assert all(np.array_equal(ptr, np.arange(51)) and (stop == 60).all() for ptr, stop in found)
