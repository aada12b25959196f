"""mpnn.kernels.rows.attention: which tensors are read where they lie, and which are copied."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn.kernels.rows.attention import Repeated, Spec, Tensors, _readable, shares_keys
from mpnn.kernels.rows.spec import ADDITIVE, DOT, NORMALIZERS


def spec(score: int, heads: int, num_edges: int = 20) -> Spec:
    rows: Any = SimpleNamespace(num_edges=num_edges)
    return Spec(rows, lambda: rows, {}, heads, score, NORMALIZERS["softmax"])


def strided(*shape: int, last: bool = False) -> Tensor:
    """A tensor within a wider one, and if `last` with a gap between its last numbers."""
    wide = torch.randn(*shape[:-1], 2 * shape[-1])
    return wide[..., ::2] if last else wide[..., : shape[-1]]


@pytest.mark.parametrize(
    ("score", "heads", "value", "query", "key", "served"),
    [
        (DOT, 2, torch.zeros(5, 2, 8), torch.zeros(4, 2, 8), torch.zeros(5, 2, 8), True),
        (DOT, 2, torch.zeros(5, 2, 8), torch.zeros(4, 2, 8), None, False),
        (DOT, 2, torch.zeros(5, 2, 0), torch.zeros(4, 2, 8), torch.zeros(5, 2, 8), False),
        (DOT, 2, torch.zeros(5, 2, 8), torch.zeros(4, 2, 6), torch.zeros(5, 2, 6), False),
        (DOT, 8, torch.zeros(5, 1, 8), torch.zeros(4, 8, 8), torch.zeros(5, 1, 8), False),
        (DOT, 8, torch.zeros(5, 2, 8), torch.zeros(4, 8, 8), torch.zeros(5, 1, 8), True),
        (DOT, 8, torch.zeros(5, 1, 8), torch.zeros(4, 8, 8), torch.zeros(5, 2, 8), True),
        (DOT, 7, torch.zeros(5, 1, 8), torch.zeros(4, 7, 8), torch.zeros(5, 1, 8), True),
        (DOT, 2, strided(5, 2, 8), torch.zeros(4, 2, 8), torch.zeros(5, 2, 8), False),
        (DOT, 2, torch.zeros(5, 2, 8), strided(4, 2, 8), torch.zeros(5, 2, 8), False),
        (DOT, 2, torch.zeros(5, 2, 8), torch._neg_view(torch.zeros(4, 2, 8)), torch.zeros(5, 2, 8), False),
        (ADDITIVE, 3, torch.zeros(5, 3, 8), torch.zeros(4, 3), torch.zeros(5, 3), True),
        (ADDITIVE, 3, torch.zeros(5, 3, 8), strided(4, 3), strided(5, 3), True),
        (ADDITIVE, 3, torch.zeros(2, 5, 3, 8), strided(2, 4, 3), strided(2, 5, 3), True),
        (ADDITIVE, 3, torch.zeros(5, 3, 8), torch.zeros(4, 3), strided(5, 3, last=True), False),
        (ADDITIVE, 3, torch.zeros(1, 2, 5, 3, 8), strided(1, 2, 4, 3), torch.zeros(1, 2, 5, 3), False),
    ],
)
def test_which_calls_are_repeated_with_other_addresses(
    score: int, heads: int, value: Tensor, query: Tensor, key: Tensor | None, served: bool
) -> None:
    assert Repeated.serves(spec(score, heads), Tensors(value, query, key)) == served


def places(score: int, num_edges: int, *tensors: Tensor) -> list[bool]:
    """Whether each of value, query and key is read where it lies. All are read with their numbers."""
    found = _readable(spec(score, 2, num_edges), *tensors)[:3]
    for x, given in zip(found, tensors, strict=True):
        assert x is not None
        assert not x.is_neg()
        assert not x.requires_grad
        torch.testing.assert_close(x, given.detach().resolve_neg())
    return [x.data_ptr() == given.data_ptr() for x, given in zip(found, tensors, strict=True)]


def test_keys_and_values_that_few_edges_read_stay_where_they_lie() -> None:
    features = strided(5, 2, 8), strided(4, 2, 8), strided(5, 2, 8)
    assert places(DOT, 5, *features) == [True, False, True]
    assert places(DOT, 6, *features) == [False, False, False]
    batch = [strided(2, 1, *x.shape) for x in features]
    assert places(DOT, 5, *batch) == [False, False, False]
    assert places(DOT, 5, *[strided(2, *x.shape) for x in features]) == [True, False, True]
    assert places(DOT, 5, *[strided(*x.shape, last=True) for x in features]) == [False, False, False]
    assert places(DOT, 9, *[x.contiguous().requires_grad_() for x in features]) == [True, True, True]
    assert places(DOT, 5, *map(torch._neg_view, features)) == [False, False, False]


def test_numbers_of_nodes_stay_where_they_lie() -> None:
    features = strided(5, 2, 8), strided(4, 2), strided(5, 2)
    assert places(ADDITIVE, 5, *features) == [False, True, True]
    assert places(ADDITIVE, 5, *[strided(3, *x.shape) for x in features]) == [False, True, True]
    assert places(ADDITIVE, 5, *[strided(1, 3, *x.shape) for x in features]) == [False, False, False]
    assert places(ADDITIVE, 5, *[strided(*x.shape, last=True) for x in features]) == [False, False, False]


def test_heads_share_keys_where_rows_are_long() -> None:
    assert shares_keys(8, 1, 16 * 10, 10, 8)
    assert shares_keys(16, 2, 16 * 10, 10, 8)
    assert not shares_keys(7, 1, 16 * 10, 10, 8)
    assert not shares_keys(8, 1, 16 * 10 - 1, 10, 8)
