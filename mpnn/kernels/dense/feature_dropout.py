"""Dropout of features as a differentiable function, on CPU. Only keys are stored for the backward pass.

`mpnn/kernels/cpu/feature_dropout.cpp` states the formula.
"""

from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address
from mpnn.kernels.dropout_threshold import threshold
from mpnn.kernels.memory import empty

_MIN_COMPONENTS = 1 << 17  # components per part: about 50 us


class _Parameters(Structure):
    """`struct FeatureDropout` of feature_dropout.cpp."""

    _fields_ = (
        *library.fields(c_void_p, "x out keys"),
        *library.fields(c_int64, "rows width threshold"),
        ("growth", c_double),
    )


class FeatureDropout(torch.autograd.Function):
    """`FeatureDropout.apply(x, keys, p)`: x [..., width], float32 or float64; `keys` int32 [3]: `mpnn.graph.rng.keys`
    of one stream."""

    @staticmethod
    def forward(ctx, x: Tensor, keys: Tensor, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.keys = keys
        ctx.p = p
        return _drop(x, keys, p)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        # The map is linear and its own adjoint, so that all derivatives are this function again.
        return FeatureDropout.apply(d_out, ctx.keys, ctx.p), None, None


def _drop(x: Tensor, keys: Tensor, p: float) -> Tensor:
    out = empty(x, *x.shape)
    rows = x.shape[:-1].numel()
    width = x.shape[-1]
    x = x.resolve_neg().contiguous()
    parameters = _Parameters(address(x), address(out), address(keys), rows, width, threshold(p), 1 / (1 - p))
    parts = max(1, min(rows, x.numel() // _MIN_COMPONENTS, 4 * torch.get_num_threads()))
    library.run("feature_dropout", x.dtype, parameters, parts=parts)
    return out
