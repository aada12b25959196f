"""Linformer encoders: the formula, and how their error against softmax falls with the number of landmarks."""

import math

import pytest
import torch
from error_bound import error_bound, largest
from parity import drawn
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.models import Linformer, LinformerConfig, LinformerEncoder

DIM, HEADS, VOCABULARY, CONTEXT, LANDMARKS = 16, 2, 11, 12, 5
EXACT = error_bound(2, 32, torch.float64)
BOUND = error_bound(2, 32)
CONFIG = LinformerConfig(VOCABULARY, DIM, 2, HEADS, 32, CONTEXT, landmarks=LANDMARKS)


def rough(dtype=torch.float32):
    return drawn(LinformerEncoder(CONFIG)).to(dtype)


def normed(x, norm):
    return F.layer_norm(x, (DIM,), norm.weight, norm.bias, norm.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [CONTEXT, 7])
def test_is_the_formula(n, dtype, measured):
    """Equation 7 of Wang et al. 2020: softmax(Q (E K)^T / sqrt(D)) (F V), in BERT's layers."""
    model, tokens = rough(dtype), torch.randint(VOCABULARY, (2, n))
    found = model(tokens).last
    for b in range(2):
        x = model.embeddings(tokens[b], torch.arange(n), torch.zeros(n, dtype=torch.int64))
        for op in model.layers:
            attention, heads = op.attention, []
            for h in range(HEADS):
                mine = slice(h * DIM // HEADS, (h + 1) * DIM // HEADS)
                query = x @ attention.to_query.weight[mine].T + attention.to_query.bias[mine]
                key = attention.mix_keys[:, :n] @ x @ attention.to_key.weight[mine].T + attention.to_key.bias[mine]
                value = attention.mix_values[:, :n] @ x @ attention.to_value.weight[mine].T
                value = value + attention.to_value.bias[mine]
                heads.append((query @ key.T / (DIM // HEADS) ** 0.5).softmax(-1) @ value)
            message = torch.cat(heads, -1) @ attention.to_out.weight.T + attention.to_out.bias
            z = normed(x + message, op.update.norm)
            x = normed(z + op.update.ffn(z), op.update.ffn_norm)
        measured(
            "Linformer, Performer",
            "formula (Linformer)",
            largest(found[b] - x),
            EXACT if dtype == torch.float64 else BOUND,
        )


def averaging(exact, length, landmarks):
    """Linformer attention with the maps of `exact`, whose landmarks are the means of equal pieces of the sequence."""
    attention = Linformer(DIM, HEADS, length=length, landmarks=landmarks).double()
    attention.load_state_dict(exact.state_dict(), strict=False)
    size = length // landmarks
    means = torch.eye(landmarks, dtype=torch.float64).repeat_interleave(size, 1) / size
    with torch.no_grad():
        attention.mix_keys.copy_(means)
        attention.mix_values.copy_(means)
    return MessagePassing(graphs.complete(), "sum", None, attention)


def test_its_error_against_softmax_falls_with_the_square_of_the_number_of_landmarks():
    """Over features that change smoothly along the sequence, the mean of a piece stands for its nodes but for how their
    places vary, (size^2 - 1) / 12 for pieces of that size; as many landmarks as nodes are the nodes themselves."""
    length = 256
    exact = DotProduct(DIM, HEADS).double()
    place = torch.linspace(0, 2 * math.pi, length, dtype=torch.float64)[:, None]
    waves = torch.cat([(k * place).sin() for k in (1, 2)] + [(k * place).cos() for k in (1, 2)], 1)
    x = waves @ torch.randn(4, DIM, dtype=torch.float64)
    expected = MessagePassing(graphs.complete(), "sum", None, exact)(x)
    error = {k: largest(averaging(exact, length, k)(x) - expected) for k in (32, 64, 128, 256)}
    assert error[256] < EXACT
    variance = {k: (length // k) ** 2 - 1 for k in error}
    for k in (32, 64):
        assert error[k] / error[2 * k] == pytest.approx(variance[k] / variance[2 * k], rel=0.1)


def test_sentences_of_several_lengths_are_refused():
    keep = torch.arange(CONTEXT) < torch.tensor([[CONTEXT], [7]])
    with pytest.raises(ValueError, match=r"landmarks mix all sources, so it needs complete\(\)"):
        rough()(torch.randint(VOCABULARY, (2, CONTEXT)), padding_mask=~keep)
