"""Performers: the formula, and how their error against softmax falls with the number of features."""

import math

import pytest
import torch
from error_bound import error_bound, largest
from parity import drawn
from torch.nn import functional as F

from mpnn import graphs
from mpnn.attention import Kernel
from mpnn.models import BertConfig, Performer, PerformerConfig, PerformerEncoder, PerformerEncoderConfig
from mpnn.models.text.bert import Bert
from mpnn.models.text.gpt import GPT2, GPTConfig

DIM, HEADS, VOCABULARY, CONTEXT, FEATURES = 16, 2, 11, 12, 9
EXACT = error_bound(2, 32, torch.float64)
BOUND = error_bound(2, 32)
SIZES = {"vocabulary": VOCABULARY, "dim": DIM, "layers": 2, "heads": HEADS, "hidden": 32, "context": CONTEXT}


def attend(attention, h, mask):
    """Attention with the positive features of Choromanski et al. (lemma 1), for one text [N, dim]."""
    heads = []
    for k in range(HEADS):
        mine = slice(k * DIM // HEADS, (k + 1) * DIM // HEADS)
        query, key, value = (
            h @ to.weight[mine].T + to.bias[mine] for to in (attention.to_query, attention.to_key, attention.to_value)
        )

        def phi(x):
            x = x / (DIM // HEADS) ** 0.25
            return (x @ attention.directions.T - (x * x).sum(-1, keepdim=True) / 2).exp() / FEATURES**0.5

        weights = phi(query) @ phi(key).T * mask
        heads.append(weights @ value / weights.sum(-1, keepdim=True))
    return torch.cat(heads, -1) @ attention.to_out.weight.T + attention.to_out.bias


def normed(x, norm):
    return F.layer_norm(x, (DIM,), norm.weight, norm.bias, norm.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_language_model_is_the_formula(dtype, measured):
    model = drawn(Performer(PerformerConfig(**SIZES, features=FEATURES))).to(dtype)
    tokens = torch.randint(VOCABULARY, (CONTEXT,))
    x = model.token.weight[tokens] + model.position.weight
    for op in model.layers:
        mask = torch.ones(CONTEXT, CONTEXT, dtype=dtype).tril()
        z = x + attend(op.attention, normed(x, op.update.norm), mask)
        x = z + op.update.ffn(normed(z, op.update.ffn_norm))
    error = largest(model(tokens[None])[0] - normed(x, model.norm) @ model.token.weight.T)
    measured("Linformer, Performer", "formula (Performer)", error, EXACT if dtype == torch.float64 else BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_encoder_is_the_formula(dtype, measured):
    model = drawn(PerformerEncoder(PerformerEncoderConfig(**SIZES, features=FEATURES))).to(dtype)
    tokens, keep = torch.randint(VOCABULARY, (2, CONTEXT)), torch.arange(CONTEXT) < torch.tensor([[CONTEXT], [7]])
    found = model(tokens, padding_mask=~keep).last
    for b, n in enumerate((CONTEXT, 7)):
        x = model.embeddings(tokens[b, :n], torch.arange(n), torch.zeros(n, dtype=torch.int64))
        for op in model.layers:
            z = normed(x + attend(op.attention, x, torch.ones(n, n, dtype=dtype)), op.update.norm)
            x = normed(z + op.update.ffn(z), op.update.ffn_norm)
        measured(
            "Linformer, Performer",
            "formula (Performer)",
            largest(found[b, :n] - x),
            EXACT if dtype == torch.float64 else BOUND,
        )


def drawn_again(model, seed):
    """The same model with other random features, those of each layer its own."""
    for k, op in enumerate(model.layers):
        features = len(op.attention.directions)
        op.attention.directions = Kernel(DIM, HEADS, features=features, seed=100 * seed + k).directions.double()


@pytest.mark.parametrize("kind", ["language model", "encoder"])
@pytest.mark.sample(2)
def test_its_error_against_softmax_falls_with_the_root_of_the_number_of_features(kind):
    """On one and the same weights: each weight is a mean over features, so the mean squared difference of a model's
    outputs from those with softmax attention is about c / features. Queries and keys are small: exp(omega x) of large
    ones has so heavy a tail that a mean of a thousand is far from its limit.
    """
    exact = GPT2(GPTConfig(**SIZES)) if kind == "language model" else Bert(BertConfig(**SIZES))
    exact = exact.double().eval()
    for op in exact.layers:
        for to in (op.attention.to_query, op.attention.to_key):
            to.weight.data.mul_(0.5)
    tokens, counts, seeds = torch.randint(VOCABULARY, (2, CONTEXT)), (64, 1024), 20

    def output(model):
        return model(tokens) if kind == "language model" else model(tokens).last

    mean, uncertain = [], []
    for features in counts:
        if kind == "language model":
            model = Performer(PerformerConfig(**SIZES, features=features))
        else:
            model = PerformerEncoder(PerformerEncoderConfig(**SIZES, features=features))
        model.double().eval().load_state_dict(exact.state_dict(), strict=False)
        found = []
        for seed in range(seeds):
            drawn_again(model, seed)
            with torch.no_grad():
                found.append((output(model) - output(exact)).square().mean())
        found = torch.stack(found)
        mean.append(found.mean())
        uncertain.append(found.std() / found.mean() / seeds**0.5)
    span = math.log(counts[1] / counts[0])
    slope, deviation = (mean[1] / mean[0]).log() / span, torch.stack(uncertain).norm() / span
    assert deviation < 0.1
    assert abs(slope + 1) < 4 * deviation


def test_attends_along_its_graph():
    model = drawn(Performer(PerformerConfig(**SIZES), graphs.causal() & graphs.window(2))).to(torch.float64)
    before = torch.randint(VOCABULARY, (1, CONTEXT))
    after = before.clone()
    after[:, 3] = (after[:, 3] + 1) % VOCABULARY
    changed = (model(before) - model(after)).abs().amax(-1)[0] > 1e-9
    assert changed.nonzero().flatten().tolist() == [3, 4, 5, 6, 7]  # two layers of two
