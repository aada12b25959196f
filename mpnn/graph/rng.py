"""Counter-based dropout: whether an edge is kept follows from words of its stream, its destination and its source.

    kept if   s_h r_i k_j  >=  (p - 1/2) 2^32      product of odd 32-bit words modulo 2^32, compared as a signed number

Fused kernels store no mask for the backward pass, which draws the same mask again. For one seed every backend drops the
same edges, in whatever order it visits them. Streams number the (batch, head) pairs; repeated edges from i to j are
kept or dropped together.

A word is a hash of a number under a key that the seed determines: "lowbias32" of C. Wellons, "Prospecting for Hash
Functions" (2018), made odd. So a kernel hashes each node once, and a pair of nodes costs a multiplication and a
comparison, where a hash of the pair takes eight more operations. For fixed r_i and random k_j the product is uniform
over the odd words, which makes the rate exact. Masks of rows i and i' depend on one another only where r_i / r_i'
modulo 2^32 is a ratio of small numbers: a correlation of 1 / m or more has a chance of about m log(m) / 2^31, while a
row of N edges hides what is below 1 / sqrt(N). Joined by ^, words of two rows and two columns would cancel.

Measured over 8,192 nodes with p = .1: rates, 26 lags along rows, columns and diagonals, products over 2 x 2 blocks,
bytes along rows and columns, nine other streams and seeds, pairs of rows and columns, spectra and singular values vary
as random numbers do, by at most 2.3 standard errors. With lowbias32 of each pair a lag varies by 4.6 and bytes by 7.6.
Over 1,024 nodes, 40 seeds and p of .01, .1 and .9, squared correlations of all pairs of rows, in one head and between
two, have the mean that chance gives within 2.5 standard errors. Joined by ^, pairs deviate by 109 standard errors over
2,048 nodes. `tests/test_rng.py` repeats these in small.
"""

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.kernels.dropout_threshold import threshold

# multipliers of lowbias32, as signed words
_A = 0x7FEB352D
_B = 0x846CA68B - (1 << 32)


def new_seed(device: torch.device) -> Tensor:
    """A seed from torch's default generator, so that `torch.manual_seed` repeats a run; int64 scalar."""
    return torch.randint(0, 2**62, (), device=device)


def keep(seed: Tensor, stream: Tensor, dst: Tensor, src: Tensor, p: float) -> Tensor:
    """True with probability 1 - p, for each broadcast (stream, dst, src) of int64."""
    dst_key, src_key, stream_key = _role_keys(seed)
    rows = words(stream_key, stream) * words(dst_key, dst)
    return rows * words(src_key, src) >= threshold(p)


def keys(seed: Tensor, stream: Tensor) -> Tensor:
    """Returns the keys for kernels, int32 [2 + S]: the keys of destinations and of sources, then the words of the
    streams [S]."""
    dst_key, src_key, stream_key = _role_keys(seed)
    return torch.cat([torch.stack([dst_key, src_key]), words(stream_key, stream)])


def words(key: Tensor, number: Tensor) -> Tensor:
    """Odd words, int32, of int64 numbers under a key."""
    return mix(key ^ number.int()) | 1


def _role_keys(seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys of destinations, sources and streams: different functions of the seed's 62 bits."""
    low, high = seed.int(), (seed >> 32).int()
    nodes = mix(low) ^ high
    return mix(nodes), mix(~nodes), low ^ mix(high)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, int32, that flips about half of all bits for each bit of its input."""
    x = (x ^ _shifted(x, 16)) * _A
    x = (x ^ _shifted(x, 15)) * _B
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own shift repeats the sign bit."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def numbers(graph: Graph, dst: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numbers to hash for destinations and sources: their numbers, or those of `graph.node_ids`."""
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
