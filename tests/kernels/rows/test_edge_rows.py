"""Edges sorted by row, and their numbers in the caller's order."""

import pytest
import torch
from torch import Tensor

from mpnn.kernels.rows.rows import Rows

PTR, COLUMNS = torch.tensor([0, 2, 2, 5]), torch.tensor([1, 0, 2, 0, 1], dtype=torch.int32)


@pytest.mark.parametrize("edge", [None, torch.tensor([3, 0, 4, 1, 2])], ids=["sorted", "in another order"])
@pytest.mark.parametrize("node", [None, torch.tensor([2, 0, 1])], ids=["row r is node r", "rows of nodes"])
def test_numbers_of_rows_reach_their_edges(edge: Tensor | None, node: Tensor | None) -> None:
    rows = Rows(PTR, COLUMNS, edge, None, node)
    x = torch.randn(2, 3, 4)
    found = rows.to_edges(x)
    assert found.shape == (2, 5, 4)
    for k, row in enumerate([0, 0, 2, 2, 2]):
        number = k if edge is None else int(edge[k])
        assert torch.equal(found[:, number], x[:, row if node is None else int(node[row])])
