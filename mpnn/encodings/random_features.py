"""Random features: numbers that mean nothing, and so tell nodes apart that no other encoding can."""

from __future__ import annotations

import torch
from torch import Tensor

from mpnn.encodings.check import not_negative


def random_features(num_nodes: int, k: int, seed: int) -> Tensor:
    """Standard normal numbers [num_nodes, k], the same for the same arguments (Sato et al. 2021, "Random features
    strengthen graph neural networks"). Draw with another seed in each step of training, so that no model learns
    particular ones; torch's own random state is left alone.

    Raises:
        ValueError: num_nodes or k is negative.
    """
    not_negative("num_nodes", num_nodes)
    not_negative("k", k)
    return torch.randn(num_nodes, k, generator=torch.Generator().manual_seed(seed))
