"""Linear maps by oneDNN against torch's, and packed copies that are never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_maps import Products, products
from torch import Tensor, nn

from mpnn import maps
from mpnn.kernels import linear as onednn
from mpnn.kernels.cpu import library

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


# ------------------------------------------------------------------------------------------------ packed copies


@pytest.fixture
def layer(products: Products) -> maps.Linear:
    """A map whose packed weight is kept."""
    if library.why_missing() is not None:
        pytest.skip("no compiled kernels, so no digests")
    torch.manual_seed(0)
    layer = maps.Linear(70, 40)
    check(layer)
    assert layer.weight in onednn._kept
    assert products == [(32, 40)]
    return layer


def check(layer: nn.Module, x: Tensor | None = None) -> None:
    """That the layer computes with the weight that it has now."""
    x = torch.linspace(-1, 1, 32 * 70).view(32, 70).sin() if x is None else x
    with torch.no_grad():
        close(layer(x), F.linear(x, layer.weight, layer.bias))


def counted_packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    packs: list[int] = []
    pack = onednn._pack
    monkeypatch.setattr(onednn, "_pack", lambda weight, rows: (packs.append(rows), pack(weight, rows))[1])
    return packs


def test_a_weight_that_stays_the_same_is_packed_once(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = counted_packs(monkeypatch)
    for rows in (32, 100, 16):
        check(layer, torch.randn(rows, 70))
    assert packs == []


def step(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Linear], None]:
    def change(layer: nn.Linear) -> None:
        made = optimizer(layer.parameters(), lr=0.1, **options)
        for parameter in layer.parameters():  # set by hand: a backward pass would drop the copy
            parameter.grad = torch.ones_like(parameter)
        made.step()

    return change


def merge(layer: nn.Linear) -> None:
    """As PEFT merges LoRA."""
    layer.weight.data += 0.1 * (torch.randn(40, 3) @ torch.randn(3, 70))


def swap(layer: nn.Linear) -> None:
    """As averages of weights are swapped in."""
    average = copy.deepcopy(layer.weight.data).mul_(0.5)
    kept = layer.weight.data.clone()
    layer.weight.data.copy_(average)
    check(layer)
    layer.weight.data.copy_(kept).add_(1e-3)


def move(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 2


def by_numpy(layer: nn.Linear) -> None:
    layer.weight.detach().numpy()[3, 5] += 1


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(1.5)


def copied(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.randn(40, 70))


def exchanged_rows(layer: nn.Linear) -> None:
    layer.weight.data[[0, 1]] = layer.weight.data[[1, 0]]


def exchanged_columns(layer: nn.Linear) -> None:
    layer.weight.data[:, [0, 64]] = layer.weight.data[:, [64, 0]]


def last_bit(layer: nn.Linear) -> None:
    layer.weight.data.view(torch.int32)[39, 69] ^= 1


def transposed(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.view(70, 40).t()


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "fused Adam": step(torch.optim.AdamW, fused=True),
    "fused SGD": step(torch.optim.SGD, fused=True),
    "fused Adagrad": step(torch.optim.Adagrad, fused=True),
    "foreach Adam": step(torch.optim.AdamW, foreach=True),
    "plain SGD": step(torch.optim.SGD, foreach=False),
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(70, 40).state_dict()),
    "load_state_dict, assign": lambda layer: layer.load_state_dict(nn.Linear(70, 40).state_dict(), assign=True),
    "copy_": copied,
    "in place": in_place,
    ".data +=": merge,
    ".data = ": move,
    "a swap of averages": swap,
    "numpy": by_numpy,
    "two rows exchanged": exchanged_rows,
    "two columns exchanged": exchanged_columns,
    "a bit": last_bit,
    "strides": transposed,
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(40, 70))),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.randn(40 * 71), layer.parameters()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_packed_copy_is_never_stale(name: str, layer: nn.Linear) -> None:
    before = layer.weight.detach().clone()
    CHANGES[name](layer)
    assert not torch.equal(layer.weight, before)
    check(layer)
    check(layer)


def test_training_drops_the_copy(layer: nn.Linear, products: Products) -> None:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        x = torch.randn(32, 70)
        layer(x).square().mean().backward()
        assert layer.weight not in onednn._kept
        optimizer.step()
        optimizer.zero_grad()
        check(layer, x)
    assert len(products) == 1 + 3 * 3


def test_copies_share_nothing(layer: nn.Linear) -> None:
    other = copy.deepcopy(layer)
    other.weight.data.add_(1)
    check(other)
    check(layer)


def test_copies_take_no_more_than_the_limit(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    other = maps.Linear(70, 40)
    monkeypatch.setattr(onednn, "MAX_BYTES", 2 * 40 * 70 * 4 - 1)
    packs = counted_packs(monkeypatch)
    for _ in range(2):
        check(other)
        check(layer)
    assert len(packs) == 2
    assert list(onednn._kept) == [layer.weight]


def test_a_copy_dies_with_its_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros(40, 70))
    assert len(onednn._kept) == 0


@pytest.mark.usefixtures("products")
def test_a_copy_made_in_inference_mode_serves_training_and_evaluation() -> None:
    layer, x = maps.Linear(70, 40), torch.randn(32, 70)
    with torch.inference_mode():
        layer(x)
    check(layer, x)
    layer.requires_grad_(False)
    y = layer(x) * torch.ones((), requires_grad=True)
    y.sum().backward()
    close(y.detach(), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 63, 64, 1000])
def test_each_number_is_in_the_digest(threads: int, count: int) -> None:
    if library.why_missing() is not None:
        pytest.skip("no compiled kernels")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.zeros(count)
        digests = {onednn.digest_of(x)}
        for k in range(count):
            x.view(torch.int32)[k] = 1
            digests.add(onednn.digest_of(x))
            x[k] = 0
        assert len(digests) == count + 1
    finally:
        torch.set_num_threads(before)
