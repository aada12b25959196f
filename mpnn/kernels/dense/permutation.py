"""Rows in another order, whose gradient is a copy too: torch's own adds row by row to zeros."""

from typing import Any

import torch
from torch import Tensor

from mpnn.kernels.derivatives import is_recorded


def permute(x: Tensor, order: Tensor, inverse: Tensor, dim: int) -> Tensor:
    """Returns `x.index_select(dim, order)` for an order [N] of all N rows along `dim`, and its inverse. It can be
    differentiated any number of times."""
    if not (is_recorded() and x.requires_grad):
        return x.index_select(dim, order)
    out: Tensor = _Permute.apply(x, order, inverse, dim)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.dim = dim
        return x.index_select(dim, order)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return permute(d_out, inverse, order, ctx.dim), None, None, None
