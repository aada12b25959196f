"""The short convolution against torch's, and its documents against each alone."""

import pytest
import torch
from torch.nn import functional as F

from mpnn.kernels.short_convolution import short_convolution


@pytest.mark.parametrize("nodes", [0, 1, 3, 9])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_torchs_convolution(nodes: int, biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, nodes, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    bias = torch.randn(5, dtype=torch.float64) if biased else None
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=5).mT if nodes else x
    assert torch.allclose(short_convolution(x, weight, bias), expected)


def test_documents_are_apart() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 10, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    alone = torch.cat([short_convolution(part, weight) for part in x.split([2, 1, 0, 7], 1)], 1)
    assert torch.equal(short_convolution(x, weight, documents=[2, 1, 0, 7]), alone)


@pytest.mark.parametrize("documents", [None, [2, 1, 5]])
def test_gradients(documents: list[int] | None) -> None:
    torch.manual_seed(0)
    shapes = (2, 8, 3), (3, 4), (3,)
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(lambda *x: short_convolution(*x, documents), inputs)


def test_lengths_that_do_not_sum_to_the_nodes() -> None:
    with pytest.raises(ValueError, match=r"must sum to the 4 nodes; got \[1, 2\]"):
        short_convolution(torch.ones(1, 4, 2), torch.ones(2, 3), documents=[1, 2])
