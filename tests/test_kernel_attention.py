"""Performer's attention: the formula, what it approximates, and rows that hear nobody."""

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, graphs
from mpnn.attention import Kernel


def projected(spec: Kernel, x: Tensor) -> list[Tensor]:
    """Queries, keys and values, [H, N, D] each."""
    maps = (spec.to_query, spec.to_key, spec.to_value)
    return [to(x).unflatten(-1, (spec.heads, -1)).transpose(0, 1) for to in maps]


@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal(), graphs.window(2)], ids=str)
def test_is_the_formula(topology: object) -> None:
    spec, x = Kernel(12, 3, features=7).double(), torch.randn(9, 12, dtype=torch.float64)
    query, key, value = projected(spec, x)

    def phi(a: Tensor) -> Tensor:
        a = a / a.shape[-1] ** 0.25
        return (a @ spec.directions.T - a.square().sum(-1, keepdim=True) / 2).exp() / 7**0.5

    weights = (phi(query) @ phi(key).mT) * topology.bind(9).dense()
    heard = (weights / weights.sum(-1, keepdim=True)) @ value
    expected = spec.to_out(heard.transpose(0, 1).flatten(1))
    torch.testing.assert_close(MessagePassing(topology, "sum", None, spec)(x), expected, rtol=1e-10, atol=1e-10)


def test_comes_closer_to_softmax_with_more_features() -> None:
    x = torch.randn(40, 16, dtype=torch.float64)
    errors = []
    for features in (16, 128, 1024):
        found = []
        for seed in range(8):
            torch.manual_seed(1)
            spec = Kernel(16, 2, features=features, seed=seed).double()
            query, key, value = projected(spec, x)
            exact = (query @ key.mT / 8**0.5).softmax(-1) @ value
            exact = spec.to_out(exact.transpose(0, 1).flatten(1))
            op = MessagePassing(graphs.complete(), "sum", None, spec, backend="dense")
            found.append((op(x) - exact).square().mean())
        errors.append(torch.stack(found).mean().sqrt().item())
    # the error of a mean of independent terms falls with the square root of their number: by 2.8 from one to the next
    assert errors[0] > 1.8 * errors[1] > 1.8**2 * errors[2]


def test_directions_are_orthogonal_in_blocks_and_follow_the_seed() -> None:
    one = Kernel(8, 1, features=20, seed=3).directions
    angles = torch.nn.functional.normalize(one[:8], dim=1)
    torch.testing.assert_close(angles @ angles.T, torch.eye(8), rtol=0, atol=1e-5)
    assert torch.equal(one, Kernel(8, 1, features=20, seed=3).directions)
    assert not torch.equal(one, Kernel(8, 1, features=20, seed=4).directions)


def test_large_features_do_not_overflow_and_empty_rows_give_the_output_bias() -> None:
    spec = Kernel(8, 2, features=32)
    op = MessagePassing(graphs.causal() - graphs.identity(), "sum", None, spec)
    x = (100 * torch.randn(2, 11, 8)).requires_grad_()
    out = op(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(out[:, 0], spec.to_out.bias.expand(2, 8))


def test_gradients() -> None:
    op = MessagePassing(graphs.causal(), "sum", None, Kernel(4, 2, features=5).double())
    assert torch.autograd.gradcheck(op, torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True))
