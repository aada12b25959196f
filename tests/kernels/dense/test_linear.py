"""Linear maps by oneDNN against torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_maps import Products, products
from torch import Tensor, nn

from mpnn.kernels.dense import onednn
from mpnn.update import maps

__all__ = ["products"]
SIZES = [(16, 1, 1), (17, 64, 64), (100, 37, 5), (33, 3, 129), (256, 768, 96), (1000, 20, 200)]
BAR = 1e-5  # of the largest number: two sums of at most 1000 products in float32, in different orders


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= BAR * expected.abs().max()


def operands(rows: int, depth: int, width: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(rows + depth)
    return [torch.randn(*shape, **options) for shape in ((rows, depth), (width, depth), (width,))]


@pytest.mark.parametrize(("rows", "depth", "width"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("products")
def test_values_and_gradients_are_torchs(rows: int, depth: int, width: int, bias: bool) -> None:
    leaves = operands(rows, depth, width, requires_grad=True)[: 2 + bias]
    out, expected = maps.linear(*leaves), F.linear(*leaves)
    close(out, expected)
    slope = torch.randn_like(expected)
    for got, gradient in zip(
        torch.autograd.grad(out, leaves, slope), torch.autograd.grad(expected, leaves, slope), strict=True
    ):
        close(got, gradient)
        assert got.stride() == gradient.stride()


def test_all_three_products_of_a_step_are_onednns(products: Products) -> None:
    x, weight, bias = operands(100, 37, 5, requires_grad=True)
    maps.linear(x, weight, bias).sum().backward()
    assert products == [(100, 5), (100, 37), (5, 37)]


def test_gradients_that_nobody_needs_are_not_computed(products: Products) -> None:
    x, weight, bias = operands(100, 37, 5)
    maps.linear(x, weight.requires_grad_(), bias).sum().backward()
    assert products == [(100, 5), (5, 37)]
    products.clear()
    maps.linear(x, weight.detach(), bias.requires_grad_()).sum().backward()
    assert products == [(100, 5)]


@pytest.mark.parametrize("shape", [(20, 37), (4, 5, 37), (2, 2, 5, 37)])
def test_leading_dimensions_and_strides(shape: tuple[int, ...], products: Products) -> None:
    weight = nn.Parameter(torch.randn(37, 8).t())
    for x in (torch.randn(shape), torch.randn(shape).transpose(0, -2), torch.randn(*shape, 2)[..., 0]):
        with torch.no_grad():
            close(maps.linear(x, weight), F.linear(x, weight))
    assert len(products) == 3


def test_second_derivatives(products: Products) -> None:
    x, weight, bias = operands(20, 6, 5, requires_grad=True)

    def second(linear: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = linear(x, weight, bias).tanh().sum()
        first = torch.autograd.grad(out, (x, weight, bias), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight, bias))

    for got, expected in zip(second(maps.linear), second(F.linear), strict=True):
        close(got, expected)
    assert products


@pytest.mark.usefixtures("products")
def test_batches_of_gradients() -> None:
    x, weight, _ = operands(20, 6, 5, requires_grad=True)
    slopes = torch.randn(3, 20, 5)
    got = torch.autograd.grad(maps.linear(x, weight), (x, weight), slopes, is_grads_batched=True)
    expected = torch.autograd.grad(F.linear(x, weight), (x, weight), slopes, is_grads_batched=True)
    for a, b in zip(got, expected, strict=True):
        close(a, b)
    out = maps.linear(x, weight)
    a = torch.func.vmap(lambda slope: torch.autograd.grad(out, x, slope, retain_graph=True)[0])(slopes)
    close(a, expected[0])


@pytest.mark.parametrize("how", ["transposed", "rows apart", "columns apart", "expanded rows", "expanded columns"])
def test_weights_of_any_strides(how: str, products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of a sum, for example, is an expanded tensor. oneDNN takes a hundred times as long for weights that
    are neither contiguous nor the transpose of a contiguous one, and never gets them."""
    by_onednn = onednn._by_onednn

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert weight.is_contiguous() or weight.t().is_contiguous()
        return by_onednn(x, weight, bias)

    monkeypatch.setattr(onednn, "_by_onednn", watched)
    wide = torch.randn(80, 140)
    weight = {
        "transposed": wide[:70, :40].t(),
        "rows apart": wide[:40, :70],
        "columns apart": wide[:40, ::2],
        "expanded rows": wide[:1, :70].expand(40, 70),
        "expanded columns": wide[:40, :1].expand(40, 70),
    }[how]
    x = torch.randn(32, 70)
    close(onednn.product(x, weight), F.linear(x, weight))
    close(onednn.product(weight, x), F.linear(weight, x))
    assert products == [(32, 40), (40, 32)]


def test_why_there_may_be_no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = onednn.why_missing.__wrapped__
    assert reason() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert reason() == "torch was built without oneDNN"
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert "has no products by oneDNN" in reason()
