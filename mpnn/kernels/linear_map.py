"""Linear maps of a tensor as autograd functions. The derivative of one is its adjoint, which is linear again, so that
two functions suffice for derivatives of any order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def linear_map(x: Tensor, map: Map, adjoint: Map) -> Tensor:
    """Returns `map(x)`, whose gradient is `adjoint(d_out)`. `map` may run kernels, which record nothing; `adjoint` is
    differentiable where derivatives of higher order are wanted."""
    out: Tensor = _LinearMap.apply(x, map, adjoint)
    return out


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, map: Map, adjoint: Map) -> Tensor:
        ctx.adjoint = adjoint
        return map(x)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return ctx.adjoint(d_out), None, None
