"""Llama: rotary positions, shared keys and values, a gate; what its definition promises."""

from __future__ import annotations

import math

import pytest
import torch

from mpnn.graphs import causal, complete, window
from mpnn.models import Llama, LlamaConfig
from mpnn.position import Llama3Rotary, Rotary
from mpnn.update import GatedFeedForward

SMALL = LlamaConfig(vocabulary=11, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, context=24)


def small(graph=causal(), **changes) -> Llama:  # noqa: B008  a topology is immutable
    made = Llama(LlamaConfig(**{**vars(SMALL), **changes}), graph)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.double().eval()


def tokens(batch: int = 2, length: int = 24):
    return torch.randint(11, (batch, length))


def test_only_distances_count():
    """The same words further on mean the same to a window that sees nothing else."""
    model, x = small(causal() & window(3)), tokens(1, 20)
    later = model(torch.cat([tokens(1, 4), x], 1))[:, 4:]
    assert torch.allclose(later[:, 6:], model(x)[:, 6:], atol=1e-12)  # two layers of three
    assert not torch.allclose(later[:, :6], model(x)[:, :6], atol=1e-3)


def test_mistral_is_llama_over_a_window():
    full, banded = small(), small(causal() & window(3))
    banded.load_state_dict(full.state_dict())
    x = tokens()
    assert torch.allclose(full(x)[:, :4], banded(x)[:, :4], atol=1e-12)
    assert not torch.allclose(full(x)[:, 4:], banded(x)[:, 4:], atol=1e-3)


@pytest.mark.parametrize("graph", [causal(), causal() & window(3)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"trained_context": 8, "factor": 4.0}, {"tied": True, "head_dim": 6}], ids=str)
def test_generation_step_by_step_is_the_greedy_choice_of_the_full_pass(graph, changes):
    model = small(graph, **changes)
    out = model.generate(tokens(2, 4), steps=20, temperature=0)
    assert torch.equal(model(out[:, :-1]).argmax(-1)[:, 3:], out[:, 4:])


def test_shared_keys_and_values_take_less_room():
    grouped, own = small(), small(kv_heads=None)
    assert grouped.layers[0].attention.to_key.weight.shape == (8, 16)
    assert own.layers[0].attention.to_key.weight.shape == (16, 16)


def test_the_gate_is_the_formula():
    ffn, x = GatedFeedForward(3, 5).double(), torch.randn(4, 3, dtype=torch.float64)
    gate, hidden, out = (ffn.to_gate.weight, ffn.to_hidden.weight, ffn.to_out.weight)
    a = x @ gate.T
    expected = (a / (1 + torch.exp(-a)) * (x @ hidden.T)) @ out.T
    assert torch.allclose(ffn(x), expected, atol=1e-14)


def test_interpolated_positions_are_those_of_the_trained_reach():
    """Twice as many positions at half the distance: every second angle is one that was trained on."""
    assert Rotary(8, 100.0, factor=2.0).frequencies == tuple(f / 2 for f in Rotary(8, 100.0).frequencies)


def test_llama3_keeps_what_turns_often_and_stretches_what_hardly_turns():
    plain, stretched = Rotary(64, 500.0).frequencies, Llama3Rotary(64, 500.0, 8.0, 1.0, 4.0, 128).frequencies
    for before, after in zip(plain, stretched, strict=True):
        turns = 128 * before / (2 * math.pi)
        if turns >= 4:
            assert after == before
        elif turns <= 1:
            assert after == pytest.approx(before / 8)
        else:
            assert before / 8 < after < before


def test_what_does_not_fit_gets_a_sentence():
    with pytest.raises(ValueError, match="node 0 attends to node 23; use causal"):
        small(complete())
    with pytest.raises(ValueError, match="got 25 tokens, but this model was made with context=24"):
        small()(tokens(1, 25))
    with pytest.raises(ValueError, match="3 key/value heads do not divide 4 heads"):
        small(kv_heads=3)
