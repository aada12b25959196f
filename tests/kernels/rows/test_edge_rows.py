"""Edges sorted by row, and their numbers in the caller's order."""

import math

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


def loop_over_cuts(degrees: list[int], count: int, piece: int) -> list[int]:
    """Where chunks begin, row after row, and the last one's end."""
    edges = sum(degrees)
    even = [edges * part // count for part in range(1, count)]
    cuts = {0, edges}
    first = 0
    for degree in degrees:
        last = first + degree
        if any(first <= cut < last for cut in even):
            cuts.add(first)
        if degree > piece:
            cuts |= {*range(first, last, piece), last}
        first = last
    return sorted(cuts)


@pytest.mark.parametrize("degrees", [[3, 0, 7, 1, 0, 2], [12], [0, 0, 9, 0], [1] * 9, [5, 5, 5], [4, 5], [2]], ids=str)
@pytest.mark.parametrize("most", [1, 2, 3, 16])
def test_chunks_begin_with_rows_and_with_pieces_of_long_rows(
    degrees: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptr = torch.tensor([0, *degrees]).cumsum(0)
    edges = sum(degrees)
    for shortest, width, least in ((4, 1, 1), (1, 3, 6), (1, 2, 5), (4, 3, 1000), (100, 0, 1)):
        monkeypatch.setattr("mpnn.kernels.rows.rows.MIN_PIECE", shortest)
        rows = Rows(ptr, torch.zeros(edges, dtype=torch.int32))
        piece = max(math.ceil(2 * least / max(width, 1)), shortest)
        count = max(1, min(most, edges * width // least, edges))
        chunks = rows.chunks(width, most, least)
        expected = loop_over_cuts(degrees, count, piece)
        assert chunks.cuts.tolist() == expected
        assert len(chunks) == len(expected) - 1 == chunks.struct.num_chunks
        assert rows.chunks(width, most, least) is chunks
        first = ptr[:-1].tolist()
        inside = {row for row, n in enumerate(degrees) for cut in expected if first[row] < cut < first[row] + n}
        unwritten = set(chunks.unwritten.tolist())
        assert unwritten >= inside | {row for row, degree in enumerate(degrees) if degree == 0}
        assert len(unwritten) < len(degrees) or len(chunks) > 1 or not any(degrees)
        equal = rows.chunks(width, most, least, equal=True)
        assert equal.cuts.tolist() == [edges * part // count for part in range(count + 1)]
        assert equal is not chunks


def test_degrees_and_shares_of_nodes() -> None:
    for node in (None, torch.tensor([2, 0, 1])):
        rows = Rows(PTR, COLUMNS, None, None, node)
        degree = torch.tensor([2, 0, 3]) if node is None else torch.tensor([0, 3, 2])
        assert rows.degree.equal(degree.clamp(min=1)[:, None])
        for dtype in (torch.float32, torch.float64):
            assert rows.share(dtype).equal(1 / degree.clamp(min=1)[:, None].to(dtype))
        row, column, edge = rows.ends
        assert row.bincount(minlength=3).equal(degree)
        assert column.equal(COLUMNS.long())
        assert edge.equal(torch.arange(5))
