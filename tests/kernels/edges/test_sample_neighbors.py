"""The compiled sampler equals its twin in Python, samples uniformly, and depends on seed and node only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpnn import graphs
from mpnn.kernels.cpu import library
from mpnn.kernels.edges.sample import by_python, sample_neighbors

compiled = pytest.mark.skipif(library.why_missing() is not None, reason="no compiled kernels on this machine")


def some_graph(num_nodes: int = 300, num_edges: int = 5000, seed: int = 0) -> graphs.CompressedGraph:
    generator = torch.Generator().manual_seed(seed)
    return graphs.compressed(
        graphs.from_edges(torch.randint(num_nodes, (2, num_edges), generator=generator), num_nodes)
    )


@compiled
@pytest.mark.parametrize("fanout", [0, 1, 3, 16, 100, -1])
@pytest.mark.parametrize("seed", [0, -5, 2**63 - 1])
def test_equals_python(fanout: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = some_graph()
    targets = np.random.default_rng(1).permutation(300)[:50]
    rows = graph.offsets[targets], graph.offsets[targets + 1]
    fast = sample_neighbors(*rows, graph.columns, 300, targets, fanout, seed)
    monkeypatch.setattr("mpnn.kernels.edges.sample._compiled", by_python)
    slow = sample_neighbors(*rows, graph.columns, 300, targets, fanout, seed)
    for name, a, b in zip(fast._fields, fast, slow, strict=True):
        assert np.array_equal(a, b), name


@pytest.mark.usefixtures("without_library")
def test_without_a_library() -> None:
    sources, block, _ = some_graph().sample(torch.tensor([7, 3]), 4)
    assert sources[:2].tolist() == [7, 3]
    assert block.degree().tolist() == [4, 4]


def test_edges_are_distinct_edges_of_the_graph() -> None:
    graph = some_graph()
    nodes = torch.arange(0, 300, 3)
    sources, block, position = graph.sample(nodes, 6, seed=3)
    assert torch.equal(sources[: len(nodes)], nodes)
    assert len(sources.unique()) == len(sources) == block.num_src
    assert len(position.unique()) == len(position) == block.num_edges
    src, dst = block.edge_index
    assert np.array_equal(graph.columns[position.numpy()], sources[src].numpy())
    rows = np.searchsorted(graph.offsets, position.numpy(), side="right") - 1
    assert np.array_equal(rows, nodes[dst].numpy())
    assert torch.equal(block.degree(), graph.degree(nodes).clamp(max=6))


def test_every_subset_is_as_likely() -> None:
    graph = graphs.compressed(graphs.complete().bind(5))
    counts = torch.zeros(5, 5)
    draws = 4000
    for seed in range(draws):
        _, _, position = graph.sample(torch.tensor([2]), 2, seed)
        counts[tuple((position - 10).tolist())] += 1
    chosen = counts[counts > 0]
    assert len(chosen) == 10
    chi_squared = ((chosen - draws / 10) ** 2 / (draws / 10)).sum()
    assert chi_squared < 33.7  # 9 degrees of freedom: exceeded once in 10,000 times


def test_seed_and_node_decide() -> None:
    graph = some_graph()
    together = graph.sample(torch.tensor([4, 9, 2]), 3, seed=1)
    alone = graph.sample(torch.tensor([9]), 3, seed=1)
    assert together[2][3:6].tolist() == alone[2].tolist()
    assert graph.sample(torch.tensor([9]), 3, seed=2)[2].tolist() != alone[2].tolist()


@pytest.mark.parametrize(
    ("nodes", "fanout", "message"),
    [
        ([300], 2, r"nodes\[0\] is 300, but there are 300"),
        ([1, -1], 2, r"nodes\[1\] is -1"),
        ([1, 2, 1], 2, "1 appears more than once"),
        ([1.5], 2, "int64"),
        ([1], -2, "fanout must be"),
    ],
)
def test_arguments_that_are_refused(nodes: list, fanout: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        some_graph().sample(torch.tensor(nodes), fanout)


def test_damaged_offsets_are_refused() -> None:
    graph = some_graph()
    offsets = graph.offsets.copy()
    offsets[5] = 10**12
    with pytest.raises(ValueError, match=r"row of node 4 .* damaged"):
        sample_neighbors(offsets[[4]], offsets[[5]], graph.columns, 300, np.array([4]), 3, 0)


def test_rows_in_another_order_give_the_same_sample() -> None:
    graph = some_graph()
    targets = np.arange(0, 300, 7)
    first, stop = graph.offsets[targets], graph.offsets[targets + 1]
    expected = sample_neighbors(first, stop, graph.columns, 300, targets, 5, 2)
    columns = [graph.columns[a:b] for a, b in zip(first[::-1], stop[::-1], strict=True)]
    offsets = np.append(0, np.cumsum([len(row) for row in columns]))
    first, stop = offsets[:-1][::-1].copy(), offsets[1:][::-1].copy()
    found = sample_neighbors(first, stop, np.concatenate(columns), 300, targets, 5, 2)
    for name in ("nodes", "ptr", "source", "destination"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_no_neighbors_and_the_first_edge_damaged() -> None:
    first, stop, columns = np.array([0, 2]), np.array([2, 3]), np.array([1, 0, 2], np.int32)
    targets = np.array([2, 0])
    none = sample_neighbors(first, stop, columns, 3, targets, 0, 0)
    assert none.ptr.tolist() == [0, 0, 0]
    assert none.nodes.tolist() == [2, 0]
    every = sample_neighbors(first, stop, columns, 3, targets, -1, 0)
    assert every.ptr.tolist() == [0, 2, 3]
    columns[0] = 3
    with pytest.raises(ValueError, match="edge 0 has source 3, but there are 3 sources: the graph is damaged"):
        sample_neighbors(first, stop, columns, 3, targets, -1, 0)
