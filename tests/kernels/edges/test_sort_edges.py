"""Edges sorted by row in C++ equal torch's stable sort."""

import pytest
import torch

from mpnn import graphs, ops
from mpnn.kernels.cpu import library
from mpnn.kernels.edges.sort import by_torch, rows_of, sort_edges

compiled = pytest.mark.skipif(library.why_missing() is not None, reason="no compiled kernels on this machine")


@compiled
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize(("num_rows", "num_edges"), [(1, 1), (5, 40), (100, 30), (7, 1000), (3000, 3000)])
def test_random_edges(num_rows: int, num_edges: int, dtype: torch.dtype) -> None:
    row, col = torch.randint(num_rows, (num_edges,), dtype=dtype), torch.arange(num_edges, dtype=dtype)
    ptr, sorted_col, edge = sort_edges(row, col, num_rows, num_edges)
    expected_ptr, expected_col, expected_edge = by_torch(row, col, num_rows)
    assert rows_of(expected_ptr, num_edges).equal(row.long().sort().values)
    assert torch.equal(ptr, expected_ptr)
    assert ptr.dtype == expected_edge.dtype == torch.int64
    assert sorted_col.dtype == (dtype if edge is None else torch.int32)
    assert torch.equal(sorted_col.long(), expected_col.long())
    assert torch.equal(expected_edge if edge is None else edge, expected_edge)


@compiled
def test_edges_in_order_are_not_copied() -> None:
    row, col = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([4, 1, 3, 3, 0])
    ptr, same, edge = sort_edges(row, col, 4, 5)
    assert ptr.tolist() == [0, 2, 2, 5, 5]
    assert same.data_ptr() == col.data_ptr()
    assert edge is None


@compiled
@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_edges(num_rows: int) -> None:
    none = torch.empty(0, dtype=torch.int64)
    ptr, col, edge = sort_edges(none, none, num_rows, 0)
    assert ptr.tolist() == [0] * (num_rows + 1)
    assert len(col) == 0
    assert edge is None


def test_ends_with_strides() -> None:
    pairs = torch.tensor([[2, 0], [1, 1], [2, 2], [0, 3]])
    ptr, col, edge = sort_edges(pairs[:, 0], pairs[:, 1], 3, 4)
    assert ptr.tolist() == [0, 1, 2, 4]
    assert col.tolist() == [3, 1, 0, 2]
    assert edge.tolist() == [3, 1, 0, 2]


@pytest.mark.usefixtures("without_library")
def test_without_a_library_torch_sorts() -> None:
    x = torch.tensor([[1.0], [10.0], [100.0]])
    graph = graphs.from_edges([[0, 1, 2, 0], [2, 0, 2, 1]])
    assert ops.aggregate(graph, x).flatten().tolist() == [10.0, 1.0, 101.0]


def test_rows_behind_the_last_edge_are_empty() -> None:
    row, col = torch.tensor([1, 0, 1]), torch.tensor([3, 1, 2])
    for sort in (by_torch, lambda *given: sort_edges(*given, 3)):
        ptr, sorted_col, edge = sort(row, col, 5)
        assert ptr.tolist() == [0, 1, 3, 3, 3, 3]
        assert sorted_col.tolist() == [1, 3, 2]
        assert edge.tolist() == [1, 0, 2]
