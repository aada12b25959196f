"""Linear attention layers: Performer's, elu(x) + 1 and Linformer, against the papers' formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import MessagePassing, Topology, explain, graphs
from mpnn.attention import Kernel
from mpnn.models import Linformer


def projected(spec: Kernel, x: Tensor) -> list[Tensor]:
    """Queries, keys and values, [H, N, D] each."""
    maps = (spec.to_query, spec.to_key, spec.to_value)
    return [to(x).unflatten(-1, (spec.heads, -1)).transpose(0, 1) for to in maps]


def phi(spec: Kernel, a: Tensor) -> Tensor:
    """Equation 5 of Choromanski et al. 2021, or elu(x) + 1 (Katharopoulos et al. 2020)."""
    if spec.directions is None:
        return F.elu(a) + 1
    a = a / a.shape[-1] ** 0.25
    return (a @ spec.directions.T - a.square().sum(-1, keepdim=True) / 2).exp() / 7**0.5


@pytest.mark.parametrize("features", [7, "elu"])
@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal(), graphs.window(2)], ids=str)
def test_is_the_formula(topology: Topology, features: Any) -> None:
    spec, x = Kernel(12, 3, features=features).double(), torch.randn(9, 12, dtype=torch.float64)
    query, key, value = projected(spec, x)
    weights = (phi(spec, query) @ phi(spec, key).mT) * topology.bind(9).dense()
    heads = (weights / weights.sum(-1, keepdim=True)) @ value
    expected = spec.to_out(heads.transpose(0, 1).flatten(1))
    torch.testing.assert_close(MessagePassing(topology, "sum", None, spec)(x), expected, rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal(), graphs.window(2)], ids=str)
def test_keys_of_one_document_do_not_vanish_beside_those_of_another(topology: Topology) -> None:
    """Features of long keys are e^-200 times those of short ones: beside these they would all be zero."""
    op = MessagePassing(None, "sum", None, Kernel(64, 1, features=64))
    long, short = 16 * torch.randn(2, 9, 64), torch.zeros(2, 5, 64)
    alone = [op(x, topology.bind(x.shape[1])) for x in (long, short)]
    together = op(torch.cat([long, short], 1), graphs.batch([topology.bind(9), topology.bind(5)]))
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("features", [0, -3, "relu", 2.5])
def test_a_wrong_kind_of_features_is_named(features: object) -> None:
    with pytest.raises(ValueError, match='features must be at least 1, or "elu"; got'):
        Kernel(4, 2, features=features)


# ---------------------------------------------------------------------------------------- Linformer


@pytest.mark.parametrize(("n", "sources"), [(11, 11), (7, 7), (5, 9)], ids=str)
def test_linformer_is_the_formula(n: int, sources: int) -> None:
    spec = Linformer(12, 3, length=11, landmarks=4).double()
    x, source = (torch.randn(2, m, 12, dtype=torch.float64) for m in (n, sources))
    by_key, by_value = spec.mix_keys[:, :sources], spec.mix_values[:, :sources]
    heads = []
    for h in range(3):
        rows = slice(4 * h, 4 * h + 4)
        query = x @ spec.to_query.weight[rows].T + spec.to_query.bias[rows]
        key = by_key @ source @ spec.to_key.weight[rows].T + spec.to_key.bias[rows]
        value = by_value @ source @ spec.to_value.weight[rows].T + spec.to_value.bias[rows]
        heads.append((query @ key.mT / 4**0.5).softmax(-1) @ value)
    op = MessagePassing(graphs.complete(), "sum", None, spec)
    torch.testing.assert_close(op(x, source=source), spec.to_out(torch.cat(heads, -1)), rtol=1e-10, atol=1e-10)


def test_linformer_writes_out_no_square(capsys: pytest.CaptureFixture[str]) -> None:
    op = MessagePassing(graphs.complete(), "sum", None, Linformer(16, 2, length=4096, landmarks=8))
    out, weights = op(torch.randn(4096, 16), return_weights=True)
    assert out.shape == (4096, 16)
    assert weights.shape == (4096 * 8, 2)
    torch.testing.assert_close(weights.view(4096, 8, 2).sum(1), torch.ones(4096, 2))
    assert "4,096 x 8, 32,768 edges" in str(explain(op, torch.randn(4096, 16)))


def test_linformer_says_what_it_cannot() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"it needs complete\(\)"):
        MessagePassing(graphs.causal(), "sum", None, Linformer(4, 2, length=6))(x)
    with pytest.raises(ValueError, match="got 6 sources, but this Linformer was made with length=5"):
        MessagePassing(graphs.complete(), "sum", None, Linformer(4, 2, length=5))(x)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 4"):
        Linformer(4, 3, length=6)
    with pytest.raises(ValueError, match="must be at least 1; got 6 and 0"):
        Linformer(4, 2, length=6, landmarks=0)
