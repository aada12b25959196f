"""Backward passes that raise an error when they are differentiated again: a decorator for those of this library, and a
hook for those of torch's attention.

Torch's own `once_differentiable` raises only if the incoming gradient requires gradients. If that is a constant, as
when an energy is a sum of outputs, the dependence of the gradient on the features would be lost silently. Training on
forces needs that dependence.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `backward(ctx, *gradients) -> tuple` of an autograd function. Its results raise RuntimeError if they are
    differentiated by the incoming gradients or by a tensor that `ctx` saved. Batches of gradients raise at once,
    because kernels read addresses."""

    @wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_batches(*gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # no create_graph=True
            return results
        inputs = [x for x in (*gradients, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple(_Last.apply(x, *inputs) if inputs and x is not None else x for x in results)

    return once


def refuse_batches(*gradients: Tensor | None) -> None:
    """Raises RuntimeError for batches of gradients."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients):
        raise RuntimeError(
            "this backend computes one gradient at a time, not a batch (is_grads_batched=True, or jacobian and "
            'hessian with vectorize=True): call torch.autograd.grad in a loop, or name backend="edge_list"'
        )


class _Last(torch.autograd.Function):
    """The identity on a gradient; its backward raises."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_: Tensor) -> Any:  # type: ignore[no-untyped-def]
        _refuse()


def refuse_second_derivatives(out: Tensor) -> Tensor:
    """`out` of torch's scaled dot product attention, whose fused kernels have no second derivatives: these raise the
    sentence of this module instead of the name of torch's operation."""
    node = out.grad_fn
    if node is not None and node.name().startswith(("ScaledDotProduct", "FlashAttention")):
        node.register_hook(_refuse_behind)
    return out


def _refuse_behind(gradients: Any, _: Any) -> None:
    """Lets the backward pass of these gradients raise, where they have one (create_graph=True)."""
    for node in {x.grad_fn for x in gradients if x is not None and x.grad_fn is not None}:
        node.register_prehook(_refuse)


def _refuse(*_: Any) -> Any:
    raise RuntimeError(
        "these gradients cannot be differentiated again (create_graph=True); for second derivatives name "
        'backend="edge_list", and over several processes not transport="stream"'
    )
