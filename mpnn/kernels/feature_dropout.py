"""Dropout of features as a differentiable function, on CPU. Only a key is stored for the backward pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.kernels.memory import empty

_LEAST = 1 << 19  # components per part: about 0.2 ms


class FeatureDropout(torch.autograd.Function):
    """`FeatureDropout.apply(x, key, p)`: x [..., width], float32 or float64; `key` from `mpnn.request.rng.keys`."""

    @staticmethod
    def forward(ctx, x: Tensor, key: int, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.key, ctx.p = key, p
        return _drop(x, key, p)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        return FeatureDropout.apply(d_out, ctx.key, ctx.p), None, None


def _drop(x: Tensor, key: int, p: float) -> Tensor:
    from mpnn.kernels.cpu import drop, threads

    out, width = empty(x, *x.shape), x.shape[-1]
    source, target = (t.detach().resolve_neg().contiguous().numpy().reshape(-1) for t in (x, out))
    real, rows = source.dtype.type, x.shape[:-1].numel()
    count = max(1, min(rows, x.numel() // _LEAST, 4 * torch.get_num_threads()))
    shared = (source, target, np.uint32(key & 0xFFFFFFFF), np.uint32(round(p * (1 << 24))), real(1 / (1 - p)), width)
    parts = pairwise(rows * k // count for k in range(count + 1))
    threads.each(list(parts), lambda part: drop.drop(*part, *shared))
    return out
