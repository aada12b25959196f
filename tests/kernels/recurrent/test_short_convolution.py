"""The short convolution against torch's, and its documents against each alone."""

import pytest
import torch
from torch.nn import functional as F

from mpnn.kernels.recurrent.convolution import short_convolution


@pytest.mark.parametrize("nodes", [1, 3, 9])
def test_it_is_torchs_convolution(nodes: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, nodes, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight.flip(0).T[:, None], groups=5).mT
    assert torch.allclose(short_convolution(x, weight), expected)


def test_documents_are_apart() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 10, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    alone = torch.cat([short_convolution(part, weight) for part in x.split([2, 1, 0, 7], 1)], 1)
    assert torch.equal(short_convolution(x, weight, [2, 1, 0, 7]), alone)


@pytest.mark.parametrize("documents", [None, [2, 1, 5]])
def test_gradients(documents: list[int] | None) -> None:
    torch.manual_seed(0)
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 8, 3), (4, 3)))
    assert torch.autograd.gradcheck(lambda *x: short_convolution(*x, documents), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: short_convolution(*x, documents).sin(), inputs)
