"""mpnn.kernels.dense.onednn: which operands products read where they lie."""

import pytest
import torch

from mpnn.kernels.dense import onednn


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_which_operands_products_read() -> None:
    x = torch.randn(3, 4)
    nested = torch.nested.nested_tensor([x, x])
    assert all(map(onednn.reads, (x, x.T, torch.nn.Parameter(x))))
    others = (x.double(), torch._neg_view(x), nested, x.to_sparse(), x.to("meta"))
    assert not any(map(onednn.reads, others))


def test_which_operands_need_gradients() -> None:
    x, leaf = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert onednn.needs_grad(x, leaf, None)
    assert not onednn.needs_grad(x, None)
    with torch.no_grad():
        assert not onednn.needs_grad(leaf)
