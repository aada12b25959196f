"""Allocation of results.

On CPU, large tensors are allocated by numpy, in huge pages: 86 MB took 14 ms, and 59 ms with torch's allocator.
"""

import math

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 22  # bytes from which the system allocates, so that the first write to each page is slow
_LINE = 64  # bytes of a cache line


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized tensor on the device of `like`, by default of its dtype, on CPU aligned to cache lines."""
    dtype = like.dtype if dtype is None else dtype
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not like.is_cpu:
        # torch reads sizes one by one faster than a tuple of them.
        return like.new_empty(*shape, dtype=dtype)
    buffer = np.empty(size + _LINE, np.uint8)
    first = -buffer.ctypes.data % _LINE
    return torch.from_numpy(buffer[first : first + size]).view(dtype).view(shape)


def plain(x: Tensor) -> Tensor:
    """x as kernels read it: contiguous, and without a pending negation or a gradient."""
    if x._is_zerotensor():  # a tangent that torch did not write out
        return torch.zeros(x.shape, dtype=x.dtype)
    if x.is_contiguous() and not (x.requires_grad or x.is_neg()):
        return x  # three operations fewer, of a call over a molecule
    return x.detach().resolve_neg().contiguous()


def zeros(like: Tensor, *shape: int) -> Tensor:
    """The same, filled with zeros."""
    return empty(like, *shape).zero_()
