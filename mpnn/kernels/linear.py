"""A linear map by oneDNN, which torch contains: y = x W^T + b, a differentiable function of tensors.

torch computes `F.linear` in float32 by MKL, which leaves AVX-512 unused on processors of AMD. oneDNN uses it, and reads
W in a packed layout. A packed copy would go stale when the weight changes: `Tensor._version` counts neither the steps
of fused optimizers nor writes through `.data`. So W is packed in each call, and no copy is kept.

    dx = dy W,   dW = dy^T x,   db = sum_rows dy

Each is computed by oneDNN or by torch. `mpnn/maps.py` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Chosen = Callable[[int, int, int, bool], bool]
"""Whether oneDNN computes a product, by its rows, depth and width, and whether its operands are transposed."""


@cache
def why_missing() -> str | None:
    """The reason why oneDNN cannot be used here, or None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return f"torch {torch.__version__} has no packed products (torch.ops.mkldnn)"
    return None


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a b^T + bias`, [M, N], for a [M, K], b [N, K] and bias [N]: float32 on CPU, of any strides, M, K, N > 0."""
    packed = torch.ops.mkldnn._reorder_linear_weight.default(b, a.shape[0])
    return torch.ops.mkldnn._linear_pointwise.default(a, packed, bias, "none", [], "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Chosen) -> Tensor:
    """`x W^T + b`, [M, N], with x [M, K], weight [N, K], bias [N] or None: float32 on CPU.

    Args:
        chosen: which products of the backward pass oneDNN computes. Second derivatives are torch's.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Linear.apply(x, weight, bias, chosen)
        return out
    return product(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Chosen) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chosen = chosen
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (rows, depth), width = x.shape, len(weight)
        by_torch = torch.is_grad_enabled() or _is_batch(d_out)  # create_graph=True, is_grads_batched=True
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            quick = not by_torch and ctx.chosen(rows, width, depth, False)
            d_x = product(d_out, weight.t()) if quick else d_out @ weight
        if ctx.needs_input_grad[1]:
            quick = not by_torch and ctx.chosen(width, rows, depth, True)
            d_weight = product(d_out.t(), x.t()) if quick else d_out.t() @ x
        return d_x, d_weight, d_out.sum(0) if ctx.needs_input_grad[2] else None, None


def _is_batch(gradient: Tensor) -> bool:
    """Whether this stands for several gradients, which kernels cannot read."""
    return torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(gradient)
