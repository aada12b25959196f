"""Fresh memory for results.

Large tensors come from numpy, which asks the system for huge pages: getting 86 MB then took 14 ms where torch's
allocator took 59.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes
_LINE = 64  # bytes of a cache line


def empty(like: Tensor, *shape: int) -> Tensor:
    """An unwritten tensor of the type of `like`, on the CPU, aligned to cache lines."""
    count = math.prod(shape)
    if count * like.element_size() < _LARGE:
        return like.new_empty(shape)
    buffer = np.empty(count + _LINE, torch.empty(0, dtype=like.dtype).numpy().dtype)
    first = -buffer.ctypes.data % _LINE // buffer.itemsize
    return torch.from_numpy(buffer[first : first + count]).view(shape)


def is_large(x: Tensor) -> bool:
    """Whether `empty` got it from the system for itself, so that each page that is written costs."""
    return x.numel() * x.element_size() >= _LARGE


def zeros(like: Tensor, *shape: int) -> Tensor:
    """The same, of zeros."""
    return empty(like, *shape).zero_()
