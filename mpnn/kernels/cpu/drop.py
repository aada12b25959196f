"""Dropout of features: which numbers fall is drawn again in the backward pass, eight at a time."""

from __future__ import annotations

import numpy as np

from mpnn.kernels.cpu.caching import njit
from mpnn.kernels.cpu.hashing import mix
from mpnn.kernels.cpu.vector import MATH, drop_row

_LANES = (0,) * 8


@njit(fastmath=MATH, cache=True, nogil=True)
def drop(first, last, x, out, key, threshold, grow, width):  # type: ignore[no-untyped-def]
    """out = x * grow where `mpnn.request.rng.keep` keeps (row, column), else 0, for rows `first` to `last`."""
    count = width // len(_LANES)
    for r in range(first, last):
        row_key = mix(np.uint32(key ^ np.uint32(r)))
        drop_row(x, out, r * width, count, row_key, threshold, grow, _LANES)
        for c in range(count * len(_LANES), width):
            kept = mix(np.uint32(row_key ^ np.uint32(c))) >> np.uint32(8) >= threshold
            out[r * width + c] = x[r * width + c] * grow if kept else 0
