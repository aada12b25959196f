"""Dropout of features as a differentiable function, on CPU; nothing is stored for the backward pass but a key."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.kernels.memory import empty

_LEAST = 1 << 19  # numbers that are worth a part: some 0.2 ms


class FeatureDropout(torch.autograd.Function):
    """`FeatureDropout.apply(x, key, p)`: x [..., width], float32 or float64; `key` as `mpnn.random.keys` gives it."""

    @staticmethod
    def forward(ctx, x: Tensor, key: int, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.key, ctx.p = key, p
        return _dropped(x, key, p)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        return FeatureDropout.apply(d_out, ctx.key, ctx.p), None, None


def _dropped(x: Tensor, key: int, p: float) -> Tensor:
    from mpnn.kernels.cpu import drop, threads

    out, width = empty(x, *x.shape), x.shape[-1]
    given, into = (t.detach().resolve_neg().contiguous().numpy().reshape(-1) for t in (x, out))
    real, rows = given.dtype.type, x.shape[:-1].numel()
    count = max(1, min(rows, x.numel() // _LEAST, 4 * torch.get_num_threads()))
    shared = (given, into, np.uint32(key & 0xFFFFFFFF), np.uint32(round(p * (1 << 24))), real(1 / (1 - p)), width)
    parts = pairwise(rows * k // count for k in range(count + 1))
    threads.each(list(parts), lambda part: drop.drop(*part, *shared))
    return out
