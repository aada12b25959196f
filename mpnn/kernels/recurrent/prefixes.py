"""Aggregates of all prefixes of a sequence, by running sums and maxima, as differentiable functions of tensors on CPU:

    out_i = reduce_(j <= i) x_j

So a causal average takes time linear in the nodes. All passes are torch's operations, which are differentiable again.
"""

from typing import Any

import torch
from torch import Tensor


def prefix_sums(x: Tensor) -> Tensor:
    """x [N, F] -> the sum of x_j for j <= i."""
    return x.cumsum(0)


def prefix_means(x: Tensor) -> Tensor:
    """x [N, F] -> the mean of x_j for j <= i."""
    return x.cumsum(0) / _counts(x)


def prefix_variances(x: Tensor) -> Tensor:
    """x [N, F] -> the variance of x_j for j <= i, computed in float64 and around the first node, so that a large
    common part does not cancel, and no node depends on later ones."""
    wide = x.double()
    centered = wide - wide[:1].detach()
    mean = prefix_means(centered)
    variance = prefix_means(centered.square()) - mean.square()
    # Rounding may leave a variance below 0, whose root would be NaN.
    return variance.clamp(min=0.0).to(x.dtype)


def prefix_maxima(x: Tensor) -> Tensor:
    """x [N, F] -> the largest x_j for j <= i. Equal maxima share the gradient evenly."""
    out: Tensor = _Maxima.apply(x)
    return out


def prefix_minima(x: Tensor) -> Tensor:
    """x [N, F] -> the smallest x_j for j <= i. Equal minima share the gradient evenly."""
    return -prefix_maxima(-x)


def _counts(x: Tensor) -> Tensor:
    return torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)[:, None]


class _Maxima(torch.autograd.Function):
    """The running maximum is a step function. A node that equals it gets the gradients of the rest of its step, each
    divided by the number of such nodes in the step so far."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.cummax(0).values
        ctx.save_for_backward(x == out, out)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        hit, out = ctx.saved_tensors
        rows = torch.arange(len(out))[:, None]
        # A step is a stretch of nodes with the same running maximum.
        begins = torch.ones_like(hit)
        begins[1:] = out[1:] != out[:-1]
        first = torch.where(begins, rows, 0).cummax(0).values
        ends = torch.ones_like(hit)
        ends[:-1] = begins[1:]
        last = torch.where(ends, rows, len(out)).flip(0).cummin(0).values.flip(0)
        # Sums over the part of a step: those up to its end, without those before.
        hits = hit.to(out.dtype).cumsum(0)
        count = hits - (hits.gather(0, first) - hit.gather(0, first).to(out.dtype))
        shares = d_out / count.clamp(min=1)
        return torch.where(hit, _sums_to(shares, last), torch.zeros_like(shares))


def _sums_to(x: Tensor, last: Tensor) -> Tensor:
    """The sum of x_k for i <= k <= last_i."""
    before = torch.cat([torch.zeros_like(x[:1]), x.cumsum(0)])
    return before.gather(0, last + 1) - before[:-1]
