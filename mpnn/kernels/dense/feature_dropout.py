"""Dropout of features as a differentiable function, on CPU. Only keys are stored for the backward pass.

`mpnn/kernels/cpu/feature_dropout.cpp` states the formula.
"""

from ctypes import Structure, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address
from mpnn.kernels.dropout_threshold import threshold
from mpnn.kernels.linear_map import linear_map
from mpnn.kernels.memory import empty

_MIN_COMPONENTS = 1 << 17  # components per part: about 50 us


class _Parameters(Structure):
    """`struct FeatureDropout` of feature_dropout.cpp."""

    _fields_ = (
        *library.fields(c_void_p, "x out keys"),
        *library.fields(c_int64, "rows width threshold"),
        ("growth", c_double),
    )


def drops_features(x: Tensor) -> bool:
    """Whether `drop_features` takes this tensor."""
    plain = type(x) is Tensor and x.is_cpu and x.dtype in (torch.float32, torch.float64)
    fits = x.dim() > 0 and max(x.shape[-1], x.shape[:-1].numel()) < 2**31
    return plain and fits and library.why_missing() is None


def drop_features(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """x [..., width] with each number set to 0 with probability p and the others scaled by 1 / (1 - p). `keys` int32
    [3]: `mpnn.graph.rng.keys` of one stream. It can be differentiated any number of times."""
    # The map is its own adjoint, so that all derivatives are this function again.
    return linear_map(x, lambda x: _drop(x, keys, p), lambda d_out: drop_features(d_out, keys, p))


def _drop(x: Tensor, keys: Tensor, p: float) -> Tensor:
    out = empty(x, *x.shape)
    rows = x.shape[:-1].numel()
    width = x.shape[-1]
    x = x.resolve_neg().contiguous()
    parameters = _Parameters(address(x), address(out), address(keys), rows, width, threshold(p), 1 / (1 - p))
    parts = max(1, min(rows, x.numel() // _MIN_COMPONENTS, 4 * torch.get_num_threads()))
    library.run("feature_dropout", x.dtype, parameters, parts=parts)
    return out
