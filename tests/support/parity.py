"""What comparisons of models with formulas share: weights that tell, and gradients in two precisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from error_bound import largest
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def moved(model: Model, by: float = 0.3) -> Model:
    """The model in evaluation, with weights large enough for attention to choose, of which none stays at a special
    value such as zero; running statistics too are then no longer what they begin as."""
    for parameter in model.parameters():
        parameter.add_(by * torch.randn_like(parameter))
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return model.eval()


@torch.no_grad()
def drawn(model: Model, std: float = 0.3) -> Model:
    """The model in evaluation, with all weights normal: attention chooses, norms and biases are not trivial."""
    for parameter in model.parameters():
        parameter.normal_(std=std)
    return model.eval()


def same_gradients(model: nn.Module, found: Tensor, expected: Tensor, bound: float) -> None:
    """Two scalars have the same gradient by each parameter, up to `bound` of its size."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = (torch.autograd.grad(scalar, parameters) for scalar in (found, expected))
    for name, a, b in zip(names, *gradients, strict=True):
        assert largest(a - b) < bound * (1 + largest(b)), name


def equals_formula(
    model: nn.Module, run: Callable[[torch.dtype], Any], formula: Callable[[], Any], note: Callable[[float], None]
) -> None:
    """`run(float32)` against `formula()`, which reads the weights of the model in float64: results, whose largest
    difference `note` gets, and gradients. `run(float64)` equals it to 1e-12."""

    def backward(out: Any) -> Any:
        out = out if isinstance(out, tuple) else (out,)
        sum(part.square().sum() for part in out).backward()
        return out

    found = backward(run(torch.float32))
    single = [p.grad.clone() for p in model.parameters()]
    model.double().zero_grad()
    expected = backward(formula())
    note(max(largest(a - b) for a, b in zip(found, expected, strict=True)))
    scale = max(largest(p.grad) for p in model.parameters())
    for p, grad in zip(model.parameters(), single, strict=True):
        torch.testing.assert_close(grad.double(), p.grad, rtol=1e-3, atol=1e-6 * scale)
    exact = run(torch.float64)
    torch.testing.assert_close(exact if isinstance(exact, tuple) else (exact,), expected, rtol=0, atol=1e-12)
