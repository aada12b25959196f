"""Performer's features by chunks against the same formula as one expression: values, gradients, second derivatives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpnn.attention import Kernel
from mpnn.kernels.dense import random_features
from mpnn.kernels.dense.random_features import _PositiveFeatures as PositiveFeatures


def by_row(largest: Tensor) -> Tensor:
    return largest


def by_head(largest: Tensor) -> Tensor:
    return largest.amax(-2, keepdim=True)


def naive(x: Tensor, directions: Tensor, maximum: Callable[[Tensor], Tensor]) -> Tensor:
    exponent = x @ directions.T - x.square().sum(-1, keepdim=True) / 2
    return torch.exp(exponent - maximum(exponent.detach().amax(-1)).unsqueeze(-1))


@pytest.mark.parametrize("maximum", [by_row, by_head])
def test_it_computes_what_its_twin_does(maximum: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_features, "_CHUNK", 7 * 40)  # 35 rows in chunks of 7
    x, directions = torch.randn(7, 5, 6, dtype=torch.float64, requires_grad=True), torch.randn(40, 6).double()
    results = [f(x, directions, maximum) for f in (PositiveFeatures.apply, naive)]
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)
    direction = torch.randn_like(results[0])
    torch.testing.assert_close(*(torch.autograd.grad((y * direction).sum(), x)[0] for y in results), rtol=0, atol=1e-12)


def test_gradients_that_are_recorded_are_the_same() -> None:
    x, directions = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True), torch.randn(9, 6).double()
    out = PositiveFeatures.apply(x, directions, by_row)
    upstream = torch.randn_like(out)
    plain, recorded = (
        torch.autograd.grad(out, x, upstream, create_graph=again, retain_graph=True)[0] for again in (False, True)
    )
    assert recorded.requires_grad
    torch.testing.assert_close(recorded, plain)


def test_where_chunks_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    x, directions = torch.randn(2, 5, 6), torch.randn(9, 6)
    for many, expected in ((90, True), (91, False)):
        monkeypatch.setattr(random_features, "_MANY", many)
        assert random_features._is_worthwhile(x, directions) == expected
    monkeypatch.setattr(random_features, "_MANY", 0)
    assert not random_features._is_worthwhile(x.bfloat16(), directions)
    assert not random_features._is_worthwhile(x, directions.clone().requires_grad_())
    with torch.autocast("cpu"):
        assert not random_features._is_worthwhile(x, directions)
    with torch.autograd.forward_ad.dual_level():
        assert random_features._is_worthwhile(x, directions)
        assert not random_features._is_worthwhile(torch.autograd.forward_ad.make_dual(x, x), directions)


def test_second_derivatives() -> None:
    x, directions = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4).double()
    constant = torch.zeros(3, dtype=torch.float64)  # finite differences would move a maximum
    assert torch.autograd.gradgradcheck(lambda x: PositiveFeatures.apply(x, directions, lambda y: constant), x)


def test_the_attention_takes_it_for_long_sequences_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, x = Kernel(8, 2, features=16), torch.randn(50, 2, 4, requires_grad=True)
    results = []
    for many in (1 << 20, 1):
        monkeypatch.setattr(random_features, "_MANY", many)
        features = spec._features(x, by_row)
        results.append([features, *torch.autograd.grad(features.square().sum(), x)])
    assert type(results[1][0].grad_fn).__name__ == "_PositiveFeaturesBackward"
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
