"""Backward passes that cannot be differentiated again, and say so.

Torch's own `once_differentiable` says it only where the incoming gradient needs gradients itself. Where that is a
constant, as when an energy is a plain sum of outputs, what the gradient owes to the features would be lost without a
word, and forces that are trained on are just such gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward(ctx, *gradients) -> tuple` of an autograd function, whose results raise where they are differentiated
    by the incoming gradients or by any tensor that `ctx` saved."""

    @wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # no create_graph=True
            return found
        by = [x for x in (*gradients, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple(_Last.apply(x, *by) if by and x is not None else x for x in found)

    return once


class _Last(torch.autograd.Function):
    """The gradient as it is."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *by: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_: Tensor) -> Any:  # type: ignore[no-untyped-def]
        raise RuntimeError(
            "this backend's gradients cannot be differentiated again (create_graph=True); "
            'for second derivatives name backend="edge_list"'
        )
