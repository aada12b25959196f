"""Graphs of chosen blocks and sources: against matrices that are filled in by hand, for items and heads."""

from typing import Any

import pytest
import torch

from mpnn import graphs
from mpnn.graph.bound import BoundGraph

LEADING: list[tuple[int, ...]] = [(), (3,), (3, 2), (1, 2)]


def matrix(indices: torch.Tensor, num_src: int) -> torch.Tensor:
    dense = torch.zeros(*indices.shape[:-1], num_src, dtype=torch.bool)
    for where in torch.cartesian_prod(*map(torch.arange, indices.shape)).tolist():
        if (source := int(indices[tuple(where)])) >= 0:
            dense[(*where[:-1], source)] = True
    return dense


@pytest.mark.parametrize("leading", LEADING)
def test_chosen_sources_are_the_edges_whatever_their_order(leading: tuple[int, ...]) -> None:
    indices = torch.randint(-1, 11, (*leading, 7, 5))
    graph = graphs.chosen(indices, 11)
    assert isinstance(graph, BoundGraph)
    assert (graph.num_dst, graph.num_src) == (7, 11)
    expected = matrix(indices, 11)
    assert torch.equal(graph.dense(), expected)
    assert torch.equal(graph.degree(), expected.sum(-1))
    assert graph.num_edges == int(expected.sum())
    assert torch.equal(graphs.chosen(indices.int(), 11).dense(), expected)


def test_neighbors_form_one_run_and_the_first_source_does_not_join_what_is_absent() -> None:
    graph = graphs.chosen(torch.tensor([[-1, 0, 2], [3, 1, 2], [2, 2, -1], [-1, -1, -1]]), 4)
    assert graph.runs.start.tolist() == [0, 2, 1, 2]
    assert graph.runs.stop.tolist() == [1, 3, 4, 3]
    assert graph.runs.ptr.tolist() == [0, 2, 3, 4, 4]


@pytest.mark.parametrize("num_src", [2**31 - 1, 2**31, 2**31 + 1, 2**40])
def test_the_last_of_many_sources(num_src: int) -> None:
    """Where 32 bits end."""
    last = num_src - 1
    graph = graphs.chosen(torch.tensor([[last, last], [last - 1, last], [0, last]]), num_src)
    assert graph.runs.start.tolist() == [last, last - 1, 0, last]
    assert graph.runs.stop.tolist() == [num_src, num_src, 1, num_src]


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("num_src", [9, 10, 12])
def test_chosen_blocks_are_runs_and_the_last_may_be_shorter(leading: tuple[int, ...], num_src: int) -> None:
    each = torch.rand(*leading, num_src, -(-num_src // 3)) < 0.5
    graph = graphs.blocks(each, 3, num_src)
    assert torch.equal(graph.dense(), each.repeat_interleave(3, -1)[..., :num_src])
    by_block = torch.rand(*leading, -(-num_src // 3), -(-num_src // 3)) < 0.5
    pairs = by_block.repeat_interleave(3, -1)[..., :num_src].repeat_interleave(3, -2)[..., :num_src, :]
    assert torch.equal(graphs.blocks(by_block, 3, num_src).dense(), pairs)


def test_the_destinations_may_be_other_nodes() -> None:
    each = torch.tensor([[True, False], [False, True]])
    assert graphs.blocks(each, 2, 4, num_dst=2).dense().int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert graphs.blocks(each, 2, 4, num_dst=3).dense().int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    assert graphs.blocks(torch.ones(1, 4, dtype=torch.bool), 2, 8).num_dst == 1


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_nothing_to_choose_is_no_edge(leading: tuple[int, ...]) -> None:
    for graph in (
        graphs.chosen(torch.zeros(*leading, 4, 0, dtype=torch.int64), 5),
        graphs.blocks(torch.zeros(*leading, 4, 0, dtype=torch.bool), 2, 0),
        graphs.chosen(torch.zeros(*leading, 0, 3, dtype=torch.int64), 5),
    ):
        assert graph.num_edges == 0
        assert graph.dense().shape == (*leading, graph.num_dst, graph.num_src)


def test_edges_are_not_written_out() -> None:
    graph = graphs.blocks(torch.ones(4, 64, dtype=torch.bool), 1 << 20, 1 << 26)
    assert (graph.num_edges, graph.runs.num_runs) == (4 << 26, 4)


@pytest.mark.parametrize(
    ("build", "error", "sentence"),
    [
        (
            lambda: graphs.blocks(torch.ones(4, 4), 1, 4),
            TypeError,
            "chosen must be a tensor of bools; got torch.float32",
        ),
        (lambda: graphs.blocks([[True]], 1, 1), TypeError, "got list"),
        (lambda: graphs.blocks(torch.ones(4, 4, dtype=torch.bool), 3, 4), ValueError, "form 2 blocks of 3; got 4"),
        (lambda: graphs.blocks(torch.ones(3, 2, dtype=torch.bool), 3, 4, num_dst=4), ValueError, "got 3 rows"),
        (lambda: graphs.blocks(torch.ones(2, 2, 2, 4, 4, dtype=torch.bool), 1, 4), ValueError, "two dimensions, after"),
        (lambda: graphs.chosen(torch.tensor([[1, 4]]), 4), IndexError, r"indices\[0, 1\] is 4; expected 0 to 3, or -1"),
        (lambda: graphs.chosen(torch.tensor([[1, -2]]), 4), IndexError, "is -2"),
        (
            lambda: graphs.chosen(torch.ones(2, 2), 4),
            TypeError,
            "indices must be a tensor of integers; got torch.float",
        ),
        (lambda: graphs.chosen(torch.ones(2, dtype=torch.int64), 4), ValueError, "two dimensions"),
    ],
)
def test_what_is_no_choice_is_named(build: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        build()


def test_a_choice_does_not_stay_in_the_cache_of_bound_graphs() -> None:
    causal = graphs.causal().bind(6)
    before = len(graphs.cache)
    graph = graphs.chosen(torch.randint(0, 6, (2, 6, 3)), 6) & graphs.causal()
    assert len(graphs.cache) == before
    assert causal is graphs.causal().bind(6)
    assert graph.num_dst == 6
