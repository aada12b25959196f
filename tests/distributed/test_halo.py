"""mpnn.distributed.halo: what travels between processes, in one process."""

from types import SimpleNamespace

import torch

from mpnn.distributed.halo import _Add, _Take


def test_rows_that_travel_and_their_derivatives() -> None:
    leaving = [torch.tensor([4, 0, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([2, 3])]
    exchange = SimpleNamespace(leaving=leaving, sizes=[3, 0, 2])
    rows = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    own, travelling = _Take.apply(rows, exchange)
    assert own.equal(rows)
    assert travelling.equal(rows[[4, 0, 2, 2, 3]])
    total = _Add.apply(own, travelling, exchange)
    assert total.equal(rows * torch.tensor([2.0, 1, 3, 2, 2])[:, None, None])
    for function, inputs in (
        (lambda x: _Take.apply(x.sin(), exchange), (rows,)),
        (lambda x, y: _Add.apply(x.sin(), y, exchange), (rows, torch.randn_like(travelling).requires_grad_())),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
