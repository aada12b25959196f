"""Dropout's hash on tiles of edges; `mpnn.rng` is the specification."""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """`mpnn.rng.mix` on uint32, whose shifts move zeros in."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep(keys, dst, src, threshold):
    """Whether each edge is kept, bool [R, E, BH], of keys [BH] int32 and node numbers dst and src [R, E] or [R, 1]."""
    row = mix(keys.to(tl.uint32, bitcast=True) ^ dst.to(tl.uint32)[:, :, None])
    return (mix(row ^ src.to(tl.uint32)[:, :, None]) >> 8) >= tl.cast(threshold, tl.uint32)
