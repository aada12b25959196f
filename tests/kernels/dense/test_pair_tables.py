"""mpnn.kernels.dense.pair_tables: numbers of pairs by edge type, next to a look-up of each pair."""

import pytest
import torch

from mpnn.kernels.dense import pair_tables


@pytest.mark.parametrize("clip", [0, 1, 3, 20])
@pytest.mark.parametrize("sizes", [(1, 1), (4, 6), (6, 4), (1, 9), (9, 1)], ids=str)
def test_offsets_are_selected_as_types_are(clip: int, sizes: tuple[int, int]) -> None:
    """Rows begin anywhere, also where all offsets lie outside of the table."""
    rows, columns = sizes
    for start in (-30, -7, -3, -1, 0, 1, 2, 5, 9, 30):
        x = torch.randn(2, 1, 3, rows, 2 * clip + 1)
        i, j = torch.arange(rows) + start, torch.arange(columns)
        ids = (j - i[:, None]).clamp(-clip, clip) + clip
        expected = pair_tables.select_by_type(x, ids[None])
        looked_up = torch.stack([x[..., k, :][..., ids[k]] for k in range(rows)], -2)
        assert expected.equal(looked_up)
        assert pair_tables.select_by_offset(x, clip, start, columns).equal(expected), start
        part = torch.cat([x, x], -1)[..., : 2 * clip + 1]  # of a larger tensor
        assert pair_tables.select_by_offset(part, clip, start, columns).equal(expected), start


def test_products_and_sums_by_type() -> None:
    query, table, numbers = torch.randn(2, 3, 4, 5, 8), torch.randn(7, 4, 8), torch.randn(7, 4)
    expected = torch.einsum("bchsd,rhd->bchsr", query, table)
    torch.testing.assert_close(pair_tables.products(query, table, None), expected)
    torch.testing.assert_close(pair_tables.products(query, table, numbers), expected + numbers.T[:, None])
    shared = pair_tables.products(query, table[:, :1], numbers[:, :1])
    torch.testing.assert_close(shared, torch.einsum("bchsd,rd->bchsr", query, table[:, 0]) + numbers[:, 0])
    weights, ids = torch.rand(2, 3, 4, 5, 6), torch.randint(0, 7, (3, 5, 6))
    is_type = torch.nn.functional.one_hot(ids, 9).float()
    sums = torch.einsum("bchst,cstr->bchsr", weights, is_type)
    torch.testing.assert_close(pair_tables.sum_by_type(weights, ids, 9), sums)
