"""VAIN: what it predicts is the paper's formula, written out agent by agent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import graphs
from mpnn.models import VAIN

SYSTEM = "GAT, GATv2, MoNet, VAIN"
IN, OUT, DIM, PLACES = 4, 3, 8, 2
BOUND = error_bound(3, 17)


def mlp(layers: nn.Module, x: Tensor) -> Tensor:
    first, last = layers[0], layers[3]
    return F.linear(F.linear(x, first.weight, first.bias).relu(), last.weight, last.bias)


def formula(model: VAIN, x: Tensor, normalized: bool) -> Tensor:
    """Figure 1 of the paper, for x [N, IN]."""
    attention, update = model.layer.attention, model.layer.update
    encoded = mlp(attention.encode, x)
    said, place = encoded[:, :DIM], encoded[:, DIM:]
    out = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        weights = torch.stack([(-(place[i] - place[j]).square().sum()).exp() for j in others]) if others else []
        total = sum(weights) if normalized else 1.0
        pooled = sum((w / total * said[j] for w, j in zip(weights, others, strict=True)), torch.zeros_like(said[0]))
        out.append(mlp(update.decode, torch.cat([pooled, mlp(update.own, x[i])])))
    return torch.stack(out)


def drawn(normalized: bool) -> VAIN:
    """With weights as large as make attention choose."""
    model = VAIN(IN, OUT, DIM, PLACES, normalized=normalized)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("agents", [1, 2, 17])
def test_it_follows_the_formula(normalized: bool, agents: int, measured: Callable[..., None]) -> None:
    model = drawn(normalized)
    x = torch.randn(agents, IN)
    found = model(x)
    exact = x.double().requires_grad_()
    expected = formula(model.double(), exact, normalized)
    measured(SYSTEM, "formula", (found - expected).abs().max().item(), BOUND)
    again = model(exact)
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), exact)[0] for y in (again, expected)))


def test_two_teams_side_by_side_are_two_crowds_by_themselves() -> None:
    model, x = drawn(True), torch.randn(10, IN)
    apart = model(x, graphs.documents([4, 6]) - graphs.identity())
    torch.testing.assert_close(apart, torch.cat([model(x[:4]), model(x[4:])]))


def test_loss_is_the_mean_squared_error() -> None:
    model, x, target = drawn(True), torch.randn(2, 6, IN), torch.randn(2, 6, OUT)
    torch.testing.assert_close(model.loss(x, target), (model(x) - target).square().mean())
