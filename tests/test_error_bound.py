"""The bound of parity tests: roundings stay within it, and a mistake of one part in a thousand does not."""

import copy

import pytest
import torch
from error_bound import error_bound

from mpnn.models import GPT2, GPTConfig

LAYERS, DIM, HIDDEN = 3, 32, 64


@pytest.fixture
def model() -> GPT2:
    """Random weights of a size at which attention weights differ."""
    sizes = GPTConfig(vocabulary=50, dim=DIM, layers=LAYERS, heads=4, hidden=HIDDEN, context=16)
    gpt = GPT2(sizes).eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.normal_(std=0.3)
    return gpt


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_float32_differs_from_float64_by_less_than_the_bound(model: GPT2) -> None:
    tokens = torch.randint(50, (4, 16))
    exact = copy.deepcopy(model).double()(tokens)
    scale = exact.abs().max().item()
    assert largest_difference(model(tokens), exact) < error_bound(LAYERS, HIDDEN, scale=scale)


@pytest.mark.parametrize("name", ["to_query.weight", "to_value.weight", "ffn.0.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_that_is_off_by_a_thousandth_exceeds_the_bound(model: GPT2, name: str, dtype: torch.dtype) -> None:
    tokens, model = torch.randint(50, (4, 16)), model.to(dtype)
    wrong = copy.deepcopy(model)
    (weight,) = [p for full, p in wrong.named_parameters() if full.startswith("layers.0.") and full.endswith(name)]
    with torch.no_grad():
        weight.mul_(1.001)
    exact = model(tokens)
    scale = exact.abs().max().item()
    assert largest_difference(wrong(tokens), exact) > error_bound(LAYERS, HIDDEN, dtype, scale)
