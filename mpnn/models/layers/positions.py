"""Absolute positions as vectors that are added to features: those of Vaswani et al. 2017.

Learned positions are an `nn.Embedding` (`layers.blocks.Embeddings`). Relative positions are in `mpnn.position`.
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
