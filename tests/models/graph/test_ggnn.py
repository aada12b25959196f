"""GGNN: over edges of several classes it follows the equations of the paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from torch import Tensor
from torch.nn import functional as F

from mpnn import graphs
from mpnn.models import GGNN

SYSTEM = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
N, IN, DIM, CLASSES, RELATIONS = 11, 4, 6, 3, 3
BOUND = error_bound(4, 3 * DIM)


def edges() -> Tensor:
    """Repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    found = torch.randint(0, N, (2, 30))
    found[1] = found[1].clamp(min=2)
    return found


def readout(model: GGNN, h: Tensor, x: Tensor) -> Tensor:
    """Equation 7, before the sum."""
    both = torch.cat([h, x], 1)
    gate, vote = model.readout.gate, model.readout.vote
    return F.linear(both, gate.weight, gate.bias).sigmoid() * F.linear(both, vote.weight, vote.bias)


def formula(model: GGNN, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
    """Equations 1 to 6, with the gates of a GRU written out as torch arranges them."""
    cell, maps, bias = model.layer.update.cell, model.layer.attention.weight, model.layer.attention.bias
    h = torch.cat([x, x.new_zeros(N, DIM - IN)], 1)
    for _ in range(model.rounds):
        a = bias.repeat(N, 1)
        for j, i, r in zip(*edge_index.tolist(), kind.tolist(), strict=True):
            a[i] = a[i] + h[j] @ maps[r]
        of_a, of_h = (
            F.linear(v, w, b).chunk(3, 1)
            for v, w, b in ((a, cell.weight_ih, cell.bias_ih), (h, cell.weight_hh, cell.bias_hh))
        )
        reset, keep = (of_a[0] + of_h[0]).sigmoid(), (of_a[1] + of_h[1]).sigmoid()
        h = (1 - keep) * (of_a[2] + reset * of_h[2]).tanh() + keep * h
    return readout(model, h, x)


def test_edges_of_several_classes_follow_the_formula(measured: Callable[..., None]) -> None:
    model = GGNN(IN, CLASSES, DIM, rounds=3, relations=RELATIONS).double()
    torch.nn.init.normal_(model.layer.attention.bias)
    x, edge_index = torch.randn(N, IN, dtype=torch.float64, requires_grad=True), edges()
    kind = torch.randint(0, RELATIONS, (30,))
    graph = graphs.from_edges(edge_index, N, edge_type=kind)
    found, expected = model(x, graph), formula(model, x, edge_index, kind)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)))
    rough = model.float()(x.detach().float(), graph)
    measured(SYSTEM, "formula", (rough - expected).abs().max().item(), BOUND)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="dim must be at least in_dim; got dim = 2 and in_dim = 4"):
        GGNN(4, CLASSES, dim=2)
