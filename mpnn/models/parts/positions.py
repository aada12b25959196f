"""Absolute positions: where a node stands in a sequence, as a vector to add to its features.

Sinusoidal positions are Vaswani's; `binary` and `normalised` are the simpler ones that do not do, kept to show why (see
their docstrings and tests/test_positions.py). Learned ones are a plain `nn.Embedding` (`parts.blocks.Embeddings`), and
those that speak of the offset between two nodes are in `mpnn.position`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoidal(length: int, dim: int, *, halves: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Positions 0 to length - 1 as waves, [length, dim] (Vaswani et al. 2017, section 3.5), see `sinusoid`."""
    return sinusoid(torch.arange(length), dim, halves=halves, dtype=dtype)


def sinusoid(at: Tensor, dim: int, *, halves: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Positions [...], any numbers, as waves [..., dim] (Vaswani et al. 2017, section 3.5):

        P(p)_2k = sin(p * 10000^(-2k / dim)),   P(p)_2k+1 = cos(p * 10000^(-2k / dim))

    P(p + t) = A_t P(p), where A_t turns each pair (2k, 2k + 1) by the angle t * 10000^(-2k / dim), whatever p is: what
    a linear map makes of an offset at one place, it makes of it at every place.

    Args:
        halves: all sines before all cosines, as Marian and Transformer-XL have them, in place of alternating.
        dtype: of the result; default: torch's default.
    """
    component = torch.arange(dim, device=at.device)
    # in float64, as a far position times a rounded frequency is way off
    angle = at.double()[..., None] * 10000.0 ** (-2 * (component // 2).double() / dim)
    waves = torch.where(component % 2 == 0, angle.sin(), angle.cos()).to(dtype or torch.get_default_dtype())
    return torch.cat([waves[..., 0::2], waves[..., 1::2]], -1) if halves else waves


def binary(length: int, bits: int) -> Tensor:
    """Positions 0 to length - 1 in base two, the lowest bit first, [length, bits]: a counter-example.

    Every position has its own vector, but neighbours need not be near: 7 and 8 differ in four bits, 8 and 10 in one.
    So nothing smooth tells offsets from the vectors, and no linear map goes from each position to the next.

    Raises:
        ValueError: `length` positions do not fit into so many bits.
    """
    if length > 2**bits:
        raise ValueError(f"{bits} bits number {2**bits} positions; got a length of {length}")
    return (torch.arange(length)[:, None] >> torch.arange(bits) & 1).to(torch.get_default_dtype())


def normalised(length: int) -> Tensor:
    """Positions as fractions of the way, [length, 1], from 0 at the first to 1 at the last: a counter-example.

    A step is 1 / (length - 1), so that the same offset means another distance in each sequence, and no model can learn
    what "the word before" is for all lengths.
    """
    return torch.linspace(0, 1, length)[:, None]
