"""Dropout of features: the specification's draws, unbiased, the same ones backward, torch's own behind it."""

import pytest
import torch

from mpnn.graph import rng
from mpnn.update.dropout import Dropout

LARGE = (40, 1000)  # large enough to be the kernel's; smaller tensors are torch's


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(40, 1000), (3, 5, 1203), (20_000, 1), (2, 2, 9_001)], ids=str)
def test_it_keeps_what_the_specification_keeps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    torch.manual_seed(5)
    out = Dropout(0.3)(x)
    torch.manual_seed(5)
    seed = rng.new_seed(x.device)
    rows, columns = torch.arange(x[..., 0].numel()), torch.arange(shape[-1])
    kept = rng.keep(seed, torch.tensor(0), rows[:, None], columns, 0.3).view(shape)
    expected = torch.where(kept, x / 0.7, torch.zeros_like(x))
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps * 4, atol=0)
    direction = torch.randn_like(x)
    ours, theirs = (torch.autograd.grad(y, x, direction)[0] for y in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps * 4, atol=0)


def test_each_call_differs_and_a_seed_repeats() -> None:
    x, dropout = torch.ones(LARGE), Dropout(0.5)
    torch.manual_seed(0)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(0)
    assert dropout(x).equal(first)
    assert not second.equal(first)


def test_in_evaluation_and_with_nothing_to_drop_it_is_the_identity() -> None:
    x = torch.randn(LARGE)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x).equal(x)
    assert Dropout(1.0)(x).eq(0).all()


def test_features_that_do_not_lie_in_order_are_dropped_alike() -> None:
    x = torch.randn(LARGE)
    torch.manual_seed(1)
    expected = Dropout(0.5)(x)
    torch.manual_seed(1)
    assert Dropout(0.5)(x.T.contiguous().T).equal(expected)


def test_of_sparse_features_the_stored_numbers_fall() -> None:
    x = torch.eye(2000).to_sparse()
    out = Dropout(0.5)(x).to_dense()
    assert 800 < int((out == 2.0).sum()) < 1200
    assert int((out != 0).sum()) == int((out == 2.0).sum())


@pytest.mark.parametrize(
    "x",
    [torch.randn(9, 4), torch.randn(LARGE).bfloat16(), torch.randn(LARGE)[:0]],
    ids=["few numbers", "bfloat16", "no numbers"],
)
def test_whatever_has_no_kernel_is_torchs(x: torch.Tensor) -> None:
    out = Dropout(0.25)(x)
    assert out.dtype == x.dtype
    assert out.shape == x.shape
