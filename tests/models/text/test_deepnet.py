"""DeepNet against the formulas of its paper, and what they are for: hundreds of layers that train."""

import math
from itertools import pairwise

import pytest
import torch
from error_bound import error_bound, largest
from parity import drawn
from torch import nn
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.models import DeepNet
from mpnn.models.text.deepnet import initialize, scales
from mpnn.models.text.gpt import GPT2, GPTConfig
from mpnn.update import DeepNorm, FeedForward

DIM, HEADS, VOCABULARY = 16, 2, 11
EXACT = error_bound(1, 32, torch.float64)
BOUND = error_bound(1, 32)


def sizes(layers):
    still = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    return GPTConfig(VOCABULARY, DIM, layers, HEADS, hidden=32, context=8, activation="relu", norm_first=False, **still)


class PostLN(GPT2):
    """The same without DeepNorm: keeps itself once, and all weights begin at full size."""

    def _initialize(self):
        super()._initialize()
        for layer in self.layers:
            initialize(layer, beta=1.0)


def deep(kind, layers):
    torch.manual_seed(0)
    model = kind(sizes(layers))
    for table in (model.token, model.position):
        nn.init.normal_(table.weight, std=DIM**-0.5)
    return model


def layer(x, op, alpha):
    """DeepNorm (figure 2) around softmax attention to whoever comes before, for one sentence [N, dim]."""
    attention, update = op.attention, op.update
    heads = []
    for h in range(HEADS):
        mine = slice(h * DIM // HEADS, (h + 1) * DIM // HEADS)
        query, key, value = (
            x @ to.weight[mine].T + to.bias[mine] for to in (attention.to_query, attention.to_key, attention.to_value)
        )
        scores = (query @ key.T / (DIM // HEADS) ** 0.5).masked_fill(
            ~torch.ones(len(x), len(x)).tril().bool(), -math.inf
        )
        heads.append(scores.softmax(-1) @ value)
    message = torch.cat(heads, -1) @ attention.to_out.weight.T + attention.to_out.bias
    z = F.layer_norm(alpha * x + message, (DIM,), update.norm.weight, update.norm.bias)
    hidden = (z @ update.ffn[0].weight.T + update.ffn[0].bias).relu()
    ffn = hidden @ update.ffn[3].weight.T + update.ffn[3].bias
    return F.layer_norm(alpha * z + ffn, (DIM,), update.ffn_norm.weight, update.ffn_norm.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_is_the_formula(dtype, measured):
    alpha = 2.3
    update = DeepNorm(DIM, FeedForward(DIM, 32, nn.ReLU), alpha=alpha)
    op = drawn(MessagePassing(graphs.causal(), "sum", update, DotProduct(DIM, HEADS)).to(dtype))
    x = torch.randn(3, 7, DIM, dtype=dtype)
    error = largest(op(x) - torch.stack([layer(sentence, op, alpha) for sentence in x]))
    measured("DeepNet", "formula", error, EXACT if dtype == torch.float64 else BOUND)


def test_the_model_is_its_layers():
    model = deep(DeepNet, 5).double()
    tokens = torch.randint(VOCABULARY, (1, 8))
    x = (model.token(tokens) + model.position.weight)[0]
    for op in model.layers:
        x = layer(x, op, 10**0.25)
    assert largest(model(tokens)[0] - x @ model.token.weight.T) < EXACT


def test_the_residual_scale_follows_from_the_depth():
    """Figure 2 of the paper, at the depths of its experiments: 200 layers."""
    assert scales(200) == (400**0.25, 1600**-0.25)
    one = DeepNet(sizes(8)).layers[0]
    assert one.update.alpha == 2.0


def test_weights_begin_smaller_by_beta_where_the_stream_is_added_to():
    ffn = FeedForward(256, 512)
    wide = MessagePassing(graphs.causal(), "sum", DeepNorm(256, ffn, alpha=2.0), DotProduct(256, 4))
    initialize(wide, beta=0.25)
    attention = wide.attention
    for linear, gain in (
        (attention.to_query, 1.0),
        (attention.to_key, 1.0),
        (attention.to_value, 0.25),
        (attention.to_out, 0.25),
        (ffn[0], 0.25),
        (ffn[3], 0.25),
    ):
        count, expected = linear.weight.numel(), gain * (2 / sum(linear.weight.shape)) ** 0.5
        # the standard deviation of n normal numbers is itself uncertain by 1 / sqrt(2 n)
        assert abs(linear.weight.std().item() / expected - 1) < 5 / (2 * count) ** 0.5
        assert not linear.bias.any()


def test_gradients_reach_the_first_of_a_hundred_layers():
    """DeepNorm's first and last layer learn alike; without, gradients are lost on the way down."""
    ratios = {}
    for kind in (DeepNet, PostLN):
        model, tokens = deep(kind, 100), torch.randint(VOCABULARY, (8, 9))
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        first, last = (model.layers[k].update.ffn[0].weight.grad.norm() for k in (0, -1))
        ratios[kind] = float(first / last)
    assert 0.3 < ratios[DeepNet] < 3
    assert ratios[PostLN] < 0.03


@pytest.mark.slow
def test_two_hundred_layers_train_where_post_ln_does_not():
    """To say back each token is to pass it through all layers: DeepNet gets better at it, step by step, and Post-LN of
    the same size, learning rate and data never leaves chance, log(vocabulary)."""
    losses = {}
    for kind in (DeepNet, PostLN):
        model, history = deep(kind, 200), []
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(15):
            tokens = torch.randint(VOCABULARY, (8, 8))
            loss = model.loss(tokens, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses[kind] = [sum(history[k : k + 5]) / 5 for k in range(0, 15, 5)]
    assert all(later < earlier for earlier, later in pairwise(losses[DeepNet]))
    assert losses[DeepNet][-1] < 0.25 * math.log(VOCABULARY)
    assert losses[PostLN][-1] > 0.95 * math.log(VOCABULARY)
