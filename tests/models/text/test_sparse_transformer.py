"""Sparse Transformer: its patterns and its three ways to share them out, against dense attention with masks."""

import copy
import math

import pytest
import torch
from error_bound import error_bound, largest
from parity import drawn, same_gradients
from torch.nn import functional as F

from mpnn import graphs
from mpnn.models import SparseTransformer
from mpnn.models.text.gpt import GPTConfig
from mpnn.models.text.sparse_transformer import fixed_patterns, strided_patterns

DIM, HEADS, LAYERS, CONTEXT, VOCABULARY = 16, 4, 3, 13, 11
EXACT = error_bound(LAYERS, 4 * DIM, torch.float64)
BOUND = error_bound(LAYERS, 4 * DIM)
CONFIG = GPTConfig(VOCABULARY, DIM, LAYERS, HEADS, context=CONTEXT)

# Section 4.3: which j node i attends to in each of the two steps, as a predicate on pairs; i itself in both.
STRIDED = (lambda i, j: i - j < 4, lambda i, j: (i - j) % 4 == 0)
FIXED = (lambda i, j: i // 4 == j // 4, lambda i, j: i == j or (i // 4 > j // 4 and j % 4 >= 2))
KINDS = {"strided": (strided_patterns(4), STRIDED), "fixed": (fixed_patterns(4, 2), FIXED)}


def model_of(patterns, by, dtype=torch.float64):
    return drawn(SparseTransformer(CONFIG, patterns, by=by).to(dtype))


def masks(rules, by):
    """Whether head h of layer l lets i attend to j: bool [layers, heads, N, N], pair by pair."""
    allowed = torch.zeros(LAYERS, HEADS, CONTEXT, CONTEXT, dtype=torch.bool)
    for layer in range(LAYERS):
        for head in range(HEADS):
            taken = {"layers": [rules[layer % 2]], "heads": [rules[head % 2]], "none": rules}[by]
            for i in range(CONTEXT):
                for j in range(i + 1):
                    allowed[layer, head, i, j] = any(rule(i, j) for rule in taken)
    return allowed


def logits(model, tokens, allowed):
    """GPT-2 for one text, dense, with a mask for each layer and head."""
    x = model.token.weight[tokens] + model.position.weight[: len(tokens)]
    for op, mask in zip(model.layers, allowed, strict=True):
        attention, update = op.attention, op.update
        h = F.layer_norm(x, (DIM,), update.norm.weight, update.norm.bias)
        query, key, value = (
            (h @ to.weight.T + to.bias).unflatten(-1, (HEADS, -1)).transpose(0, 1)
            for to in (attention.to_query, attention.to_key, attention.to_value)
        )
        scores = (query @ key.mT / (DIM // HEADS) ** 0.5).masked_fill(~mask, -math.inf)
        heads = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        z = x + heads @ attention.to_out.weight.T + attention.to_out.bias
        h = F.layer_norm(z, (DIM,), update.ffn_norm.weight, update.ffn_norm.bias)
        hidden = F.gelu(h @ update.ffn[0].weight.T + update.ffn[0].bias, approximate="tanh")
        x = z + hidden @ update.ffn[3].weight.T + update.ffn[3].bias
    return F.layer_norm(x, (DIM,), model.norm.weight, model.norm.bias) @ model.token.weight.T


@pytest.mark.parametrize("by", ["none", "layers", "heads"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_dense_attention_with_masks(kind, by, measured):
    patterns, rules = KINDS[kind]
    tokens = torch.randint(VOCABULARY, (2, CONTEXT))
    model, allowed = model_of(patterns, by), masks(rules, by)
    expected = torch.stack([logits(model, text, allowed) for text in tokens])
    assert largest(model(tokens) - expected) < EXACT * expected.abs().max()
    single = copy.deepcopy(model).float()
    expected = torch.stack([logits(single, text, allowed) for text in tokens])
    measured("Sparse Transformer", "formula", largest(single(tokens) - expected), BOUND)


@pytest.mark.parametrize("by", ["none", "heads"])
def test_gradients_equal_those_of_dense_attention(by):
    patterns, rules = KINDS["strided"]
    tokens, weight = torch.randint(VOCABULARY, (1, CONTEXT)), torch.randn(CONTEXT, VOCABULARY, dtype=torch.float64)
    model = model_of(patterns, by)
    expected = (logits(model, tokens[0], masks(rules, by)) * weight).sum()
    same_gradients(model, (model(tokens)[0] * weight).sum(), expected, EXACT)


@pytest.mark.parametrize(
    ("patterns", "whole"),
    [(strided_patterns(4), graphs.strided(4)), (fixed_patterns(4, 2), graphs.fixed(4, 2))],
    ids=["strided", "fixed"],
)
def test_patterns_add_up_and_two_steps_reach_every_earlier_token(patterns, whole):
    first, second = (pattern.bind(CONTEXT) for pattern in patterns)
    assert torch.equal((first | second).dense(), whole.bind(CONTEXT).dense())
    assert torch.equal(((first | second).power(2)).dense(), graphs.causal().bind(CONTEXT).dense())


def test_refuses_what_it_cannot():
    with pytest.raises(ValueError, match='by must be "layers", "heads" or "none"; got \'tokens\''):
        SparseTransformer(CONFIG, strided_patterns(4), by="tokens")
    with pytest.raises(ValueError, match="node 0 attends to node 2"):
        SparseTransformer(CONFIG, [graphs.causal(), graphs.window(2)], by="layers")
