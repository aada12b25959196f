"""A decorator for backward passes that raise an error when they are differentiated again.

Torch's own `once_differentiable` raises only if the incoming gradient requires gradients. If that is a constant, as
when an energy is a sum of outputs, the dependence of the gradient on the features would be lost silently. Training on
forces needs that dependence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `backward(ctx, *gradients) -> tuple` of an autograd function. Its results raise RuntimeError if they are
    differentiated by the incoming gradients or by a tensor that `ctx` saved."""

    @wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # no create_graph=True
            return results
        inputs = [x for x in (*gradients, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple(_Last.apply(x, *inputs) if inputs and x is not None else x for x in results)

    return once


class _Last(torch.autograd.Function):
    """The identity on a gradient; its backward raises."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_: Tensor) -> Any:  # type: ignore[no-untyped-def]
        raise RuntimeError(
            "these gradients cannot be differentiated again (create_graph=True); for second derivatives name "
            'backend="edge_list", and over several processes not transport="stream"'
        )
