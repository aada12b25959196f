"""How far apart two correct implementations of a model may be, derived from its depth, its width and its precision."""

import math

import torch


def error_bound(depth: int, width: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> float:
    """The largest difference that roundings explain between two implementations of `depth` layers of `width` numbers.

    Each operation rounds by at most u = eps / 2 of its result. Roundings are independent, so those of n operations add
    up as a random walk: the error exceeds 5 sqrt(n) u with probability 2 exp(-5² / 2), 7e-6 (Higham and Mary 2019,
    "A new approach to probabilistic rounding error analysis", theorem 2.4). A layer is a chain of some eight sums over
    `width` numbers (query, key and value, logits, their weighted sum, output, two of the feed-forward network, two
    norms), so n = 8 * depth * width; `width` is the longest of these sums. Both implementations err, hence the 2.
    `scale` is the size of the numbers: norms keep them near 1, and a test without norms passes their maximum.

    Example: depth 2, width 32, float32 gives 1.3e-5. `tests/test_error_bound.py` shows that a matrix that is off by one
    part in a thousand exceeds it.
    """
    return 2 * 5 * math.sqrt(8 * depth * width) * torch.finfo(dtype).eps / 2 * scale


def largest(difference: torch.Tensor) -> float:
    """The largest absolute difference."""
    return difference.abs().max().item()
