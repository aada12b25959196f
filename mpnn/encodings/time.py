"""Times as features."""

import torch
from torch import Tensor, nn

from mpnn.graph.arguments import at_least


class TimeEncoding(nn.Module):
    """`Phi(t) = cos(w t + b)` of times or differences of times, with learned w and b (TGAT, Xu et al. 2020,
    arXiv:2002.07962, section 3.1; TGN, Rossi et al. 2020). At first, the frequencies w are 1 to 10^-9, as in the
    authors' code, and b is 0.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        at_least("dim", dim, 1)
        self.frequency = nn.Parameter(torch.logspace(0, -9, dim))
        self.phase = nn.Parameter(torch.zeros(dim))

    def forward(self, t: Tensor) -> Tensor:
        """t [...], integers or floating point -> [..., dim]. Pass differences of large integers, not the integers."""
        return torch.cos(t.to(self.frequency.dtype)[..., None] * self.frequency + self.phase)
