"""Dropout's hash inside kernels; `mpnn.random` is the specification."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(inline="always")
def mix(x):  # type: ignore[no-untyped-def]
    """`mpnn.random.mix` on uint32; numba would widen products to 64 bits."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))
