"""Absolute positions as vectors that are added to features.

`sinusoidal` is that of Vaswani et al. 2017. `binary` and `normalized` are simpler encodings that do not work well. They
are counter-examples (see their docstrings and tests/operator/test_position.py). Learned positions are an `nn.Embedding`
(`layers.blocks.Embeddings`). Relative positions are in `mpnn.position`.
"""

import torch
from torch import Tensor


def sinusoidal(length: int, dim: int, *, halves: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Returns `sinusoid` of positions 0 to length - 1, [length, dim] (Vaswani et al. 2017, section 3.5)."""
    return sinusoid(torch.arange(length), dim, halves=halves, dtype=dtype)


def sinusoid(at: Tensor, dim: int, *, halves: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Returns sinusoidal vectors [..., dim] of positions [...], any numbers (Vaswani et al. 2017, section 3.5):

        P(p)_2k = sin(p * 10000^(-2k / dim)),   P(p)_2k+1 = cos(p * 10000^(-2k / dim))

    P(p + t) = A_t P(p), where A_t rotates each pair (2k, 2k + 1) by the angle t * 10000^(-2k / dim). A_t does not
    depend on p, so a linear map can represent an offset in the same way at every position.

    Args:
        at: positions, of any shape.
        dim: width of the vectors.
        halves: all sines before all cosines, as in Marian and Transformer-XL, instead of alternating.
        dtype: dtype of the result; default: `torch.get_default_dtype()`.
    """
    component = torch.arange(dim, device=at.device)
    # float64, because a large position times a frequency rounded to float32 has a large error
    angle = at.double()[..., None] * 10000.0 ** (-2 * (component // 2).double() / dim)
    waves = torch.where(component % 2 == 0, angle.sin(), angle.cos()).to(dtype or torch.get_default_dtype())
    return torch.cat([waves[..., 0::2], waves[..., 1::2]], -1) if halves else waves


def binary(length: int, bits: int) -> Tensor:
    """Returns positions 0 to length - 1 in base two, lowest bit first, [length, bits]. A counter-example.

    Positions have distinct vectors, but adjacent positions may differ more than distant ones: 7 and 8 differ in four
    bits, 8 and 10 in one. No linear map takes every position to the next.

    Raises:
        ValueError: if `length` positions do not fit into this number of bits.
    """
    if length > 2**bits:
        raise ValueError(f"{bits} bits encode at most {2**bits} positions; got a length of {length}")
    return (torch.arange(length)[:, None] >> torch.arange(bits) & 1).to(torch.get_default_dtype())


def normalized(length: int) -> Tensor:
    """Returns positions scaled to [0, 1], [length, 1]. A counter-example.

    A step is 1 / (length - 1), so the difference between adjacent positions depends on the length, and a model cannot
    learn "the previous word" for all lengths.
    """
    return torch.linspace(0, 1, length)[:, None]
