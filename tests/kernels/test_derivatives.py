"""mpnn.kernels.derivatives: gradients of a kernel's reference."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn.kernels.derivatives import (
    _refuse_behind,
    attention,
    differentiable_again,
    gradients_again,
    once_differentiable,
    refuse_second_derivatives,
)

NEEDS = [needs for needs in itertools.product((False, True), repeat=3) if any(needs)]


def function(x: Tensor, y: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of several types: one of both inputs, one of the second, a constant."""
    return (x * y).sin(), y.double().exp(), torch.ones(2)


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize("without", [None, 0, 1, 2], ids="without upstream gradient {}".format)
def test_gradients_are_those_of_the_reference(needs: tuple[bool, ...], without: int | None) -> None:
    tensors = [torch.randn(3).requires_grad_(need) for need in needs]
    # Kernels return other types than the reference, so that gradients come in these.
    upstream: list[Tensor | None] = [torch.randn(3).double(), torch.randn(3).bfloat16(), torch.randn(2)]
    if without is not None:
        upstream[without] = None
    found = gradients_again(function, tensors, needs, upstream)
    x, y, _ = (t.detach() for t in tensors)
    of_product = 0 if upstream[0] is None else (x * y).cos() * upstream[0].float()
    of_second = 0 if upstream[1] is None else (y.double().exp() * upstream[1].double()).float()
    expected = (of_product * y + 0 * x, of_product * x + of_second, 0 * x)
    for one, other, need in zip(found, expected, needs, strict=True):
        assert (one is not None) == need
        if one is not None:
            torch.testing.assert_close(one.detach(), other)
    if needs[1] and without is None:  # they are differentiable again
        assert found[1] is not None
        (again,) = torch.autograd.grad(found[1].sum(), tensors[1])
        of_product = -(x * y).sin() * upstream[0].float() * x.square()  # type: ignore[union-attr]
        torch.testing.assert_close(again, of_product + of_second)


def test_one_output_and_batches_of_upstream_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    upstream = torch.randn(4, 3)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, other)
            return x.square()

        @staticmethod
        def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
            return tuple(
                gradients_again(lambda x, other: x.double().square(), ctx.saved_tensors, (True, True), (d_out,))
            )

    other = torch.randn(3, requires_grad=True)
    out = Square.apply(x, other)
    found = torch.autograd.grad(out, x, upstream, is_grads_batched=True, retain_graph=True)[0]
    torch.testing.assert_close(found, 2 * x.detach() * upstream)
    of_x, of_other = torch.autograd.grad(out, (x, other), upstream[0], create_graph=True)
    torch.testing.assert_close(of_x.detach(), 2 * x.detach() * upstream[0])
    assert not of_other.any()


def test_a_copy_of_an_input_has_no_gradients_of_its_gradients() -> None:
    x = torch.randn(3)
    for tensors in ((x,), (None,)):
        with pytest.raises(RuntimeError):
            gradients_again(torch.sin, tensors, (True,), (x,))


@pytest.mark.parametrize(("causal", "masked"), [(False, None), (True, None), (False, "by bool"), (False, "by float")])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_attention_by_operations_is_torchs(
    causal: bool, scale: float | None, masked: str | None, heads: tuple[int, int]
) -> None:
    query, key, value = torch.randn(2, heads[0], 5, 8), torch.randn(2, heads[1], 7, 8), torch.randn(2, heads[1], 7, 3)
    mask = torch.rand(5, 7) > 0.4
    mask[3] = False  # a row without keys
    given: Tensor | None = None
    if masked:
        given = mask if masked == "by bool" else torch.randn(5, 7).masked_fill(~mask, -torch.inf)
    found = attention(query, key, value, given, causal, scale)
    options = {"attn_mask": given, "is_causal": causal, "scale": scale, "enable_gqa": heads[0] != heads[1]}
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(query, key, value, **options))
    entries = [torch.stack([x, 2 * x, -x]) for x in (query, key, value)]
    found_of_entries = attention(*entries, given, causal, scale)  # type: ignore[misc]
    torch.testing.assert_close(found_of_entries[0], found)
    narrow = attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), given, causal, scale)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), found, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_heads_share_keys_whatever_their_width_is(heads: tuple[int, int], width: int) -> None:
    query, key, value = (torch.randn(2, n, 5, width) for n in (heads[0], heads[1], heads[1]))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(attention(query, key, value, None, False, None), expected)


class Product(torch.autograd.Function):
    """`x * y`, of which a kernel computes first derivatives, and of which `more` has none."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, y, None)
        ctx.set_materialize_grads(False)
        return x * y, x + 1

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        x, y, _ = ctx.saved_tensors
        return d_out * y, d_out * x, None


def test_gradients_that_are_differentiable_once() -> None:
    x, y, more = (torch.randn(3, requires_grad=True) for _ in range(3))
    out = Product.apply(x, y, more)[0]
    of_x, of_y = torch.autograd.grad(out.sum(), (x, y), retain_graph=True)
    assert of_x.equal(y)
    assert of_y.equal(x)
    assert not of_x.requires_grad
    of_x, of_y, of_more = torch.autograd.grad(out.sum(), (x, y, more), create_graph=True, allow_unused=True)
    assert of_x.detach().equal(y.detach())
    assert of_more is None
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        of_x.sum().backward()
    upstream = torch.randn(3, requires_grad=True)
    alone = Product.apply(x, y.detach(), None)[0]
    (of_x,) = torch.autograd.grad(alone, x, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(of_x.sum(), upstream)
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.grad(out, x, torch.ones(2, 3), is_grads_batched=True)


def test_what_is_differentiable_once_has_no_tangents() -> None:
    x, y, upstream = (torch.randn(3, requires_grad=True) for _ in range(3))
    out = Product.apply(x, y, None)[0]
    with forward_ad.dual_level():
        (of_x,) = torch.autograd.grad(out, x, upstream.detach(), retain_graph=True)
        assert of_x.equal(upstream.detach() * y.detach())
        dual = forward_ad.make_dual(upstream.detach(), torch.ones(3))
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            torch.autograd.grad(out, x, dual, retain_graph=True)


def test_derivatives_of_second_order_are_refused_behind_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    of_x, constant = x.sin(), torch.ones(3)
    _refuse_behind([None, constant, of_x])
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        of_x.sum().backward()
    # Only torch's flash kernel lacks them.
    (first,) = torch.autograd.grad(refuse_second_derivatives(x.sin()).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], -x.detach().sin())
    assert refuse_second_derivatives(constant) is constant
    assert differentiable_again(constant) is constant


@pytest.mark.parametrize("kind", ["none", "by bool", "by float", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_second_derivatives_of_torchs_attention(kind: str, scale: float | None) -> None:
    inputs = [torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 7, 7)]
    mask: Tensor | None = None
    if kind.startswith("by"):
        allowed = torch.rand(5, 7) > 0.4
        mask = allowed if kind == "by bool" else torch.randn(5, 7).masked_fill(~allowed, -torch.inf)
    causal = kind == "causal"
    options = {"attn_mask": mask, "is_causal": causal, "scale": scale}
    kernel = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)  # type: ignore[arg-type]
    seconds = []
    for out in (differentiable_again(kernel), attention(*inputs, mask, causal, scale)):  # type: ignore[misc]
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), inputs))
    torch.testing.assert_close(*seconds, rtol=1e-3, atol=1e-4)
