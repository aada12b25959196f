"""Dropout of features, at the price of reading them.

Torch draws for one number after another on one thread, which on CPU takes longer than many of the layers around it.
Here numbers fall by the same hash as attention weights do (`mpnn.random`), eight at a time on every thread.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import random
from mpnn.kernels.feature_dropout import FeatureDropout

_LEAST = 1 << 14  # numbers; fewer are torch's


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`: in training each number becomes 0 with probability p, and the others grow by 1 / (1 - p).

    Which ones fall follows `torch.manual_seed`. Of sparse features [N, d] (COO) the stored numbers are drawn for only:
    bags of words are nearly all zeros.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not 0.0 < self.p < 1.0:
            return super().forward(x)
        if x.is_sparse:
            x = x.coalesce()
            kept = F.dropout(x.values(), self.p)
            return torch.sparse_coo_tensor(x.indices(), kept, x.shape, is_coalesced=True, check_invariants=False)
        if torch.compiler.is_compiling() or self.inplace or x.numel() < _LEAST or not _has_kernel(x):
            return super().forward(x)
        seed = random.new_seed(x.device)
        key = int(random.keys(seed, torch.zeros((), dtype=torch.int64)))
        out: Tensor = FeatureDropout.apply(x, key, self.p)
        return out


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, what a layer adds to x [..., N, d] becomes 0 with probability
    p for all nodes of a graph of the batch together, and grows by 1 / (1 - p) for the other graphs."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"the probability that a layer is left out must lie in [0, 1); got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        kept = torch.rand(*x.shape[:-2], 1, 1, device=x.device) >= self.p
        return x * (kept.to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _has_kernel(x: Tensor) -> bool:
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return plain and x.dim() > 0 and max(x.shape[-1], x.shape[:-1].numel()) < 2**31
