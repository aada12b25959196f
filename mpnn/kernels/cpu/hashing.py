"""Dropout's hash inside kernels, number by number and vector by vector; `mpnn.request.rng` is the specification."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit

_A, _B = 0x7FEB352D, 0x846CA68B


@njit(inline="always")
def mix(x):  # type: ignore[no-untyped-def]
    """`mpnn.request.rng.mix` on uint32; numba would widen products to 64 bits."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(_A))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(_B))
    return np.uint32(x ^ (x >> np.uint32(16)))


def reaches(b: Any, x: Any, limit: Any) -> Any:
    """Whether `mix(x) >> 8` reaches the limit, lane by lane, for vectors of 32-bit integers: IR."""

    def whole(n: int) -> Any:
        return ir.Constant(x.type, [n] * x.type.count)

    def shifted(y: Any, bits: int) -> Any:
        return b.xor(y, b.lshr(y, whole(bits)))

    y = shifted(b.mul(shifted(x, 16), whole(_A)), 15)
    return b.icmp_unsigned(">=", b.lshr(shifted(b.mul(y, whole(_B)), 16), whole(8)), limit)
