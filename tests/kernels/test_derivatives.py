"""mpnn.kernels.derivatives: gradients of a kernel's reference."""

import itertools

import pytest
import torch
from torch import Tensor

from mpnn.kernels.derivatives import attention, gradients_again

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
