"""Counter-based dropout: whether an edge is kept is a hash of (seed, stream, i, j).

Fused kernels store no mask for the backward pass, which draws the same mask again. For one seed every backend drops the
same edges, in whatever order it visits them. The mixing function is the 32-bit finaliser "lowbias32" published in
C. Wellons, "Prospecting for Hash Functions" (2018). Streams number the (batch, head) pairs; repeated edges from i to j
are kept or dropped together.
"""

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.kernels.dropout_threshold import BITS, threshold

_A, _B = 0x7FEB352D, 0x846CA68B - (1 << 32)  # multipliers of lowbias32, as signed words


def new_seed(device: torch.device) -> Tensor:
    """A seed from torch's default generator, so that `torch.manual_seed` repeats a run; int64 scalar."""
    return torch.randint(0, 2**62, (), device=device)


def keep(seed: Tensor, stream: Tensor, dst: Tensor, src: Tensor, p: float) -> Tensor:
    """True with probability 1 - p, for each broadcast (stream, dst, src) of int64."""
    row = mix(keys(seed, stream) ^ dst.int())
    return _shifted(mix(row ^ src.int()), 32 - BITS) >= threshold(p)


def keys(seed: Tensor, stream: Tensor) -> Tensor:
    """The hash of the seed and the stream numbers, int32: the part of `keep` that all edges share."""
    return mix(seed.int() ^ mix((seed >> 32).int()) ^ stream.int())


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, int32, that flips about half of all bits for each bit of its input."""
    x = (x ^ _shifted(x, 16)) * _A
    x = (x ^ _shifted(x, 15)) * _B
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own shift repeats the sign bit."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def numbers(graph: Graph, dst: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    """What is hashed for destinations and sources: their numbers, or those of `graph.node_ids`."""
    if graph.node_ids is None:
        return dst, src
    return graph.node_ids[0][dst], graph.node_ids[1][src]


def streams(
    batch: torch.Size, heads: int, device: torch.device | str = "cpu", head_ids: tuple[int, int] | None = None
) -> Tensor:
    """The number of each (batch, head) pair, int64 [*batch, heads]. `head_ids`: see `Round`."""
    first, count = (0, heads) if head_ids is None else head_ids
    numbers = torch.arange(batch.numel(), device=device)[:, None] * count + torch.arange(heads, device=device) + first
    return numbers.view(*batch, heads)
