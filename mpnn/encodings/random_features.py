"""Random features: they distinguish nodes that no other encoding can distinguish."""

import torch
from torch import Tensor

from mpnn.graph.arguments import not_negative


def random_features(num_nodes: int, k: int, seed: int) -> Tensor:
    """Standard normal numbers [num_nodes, k], the same for the same arguments (Sato et al. 2021, "Random features
    strengthen graph neural networks"). Use another seed in each training step, so that the model cannot learn
    particular numbers. Torch's global random state is not changed.

    Raises:
        ValueError: if num_nodes or k is negative.
    """
    not_negative("num_nodes", num_nodes)
    not_negative("k", k)
    return torch.randn(num_nodes, k, generator=torch.Generator().manual_seed(seed))
