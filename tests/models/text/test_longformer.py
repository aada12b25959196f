"""Longformer as message passing against Hugging Face's own, and with dilation against its formula."""

import math

import pytest
import torch
from error_bound import error_bound, largest

from mpnn import graphs
from mpnn.models import BertConfig, Longformer, from_hf

transformers = pytest.importorskip("transformers")

from hf_models import made  # noqa: E402

SYSTEM, PEER = "Longformer", "Hugging Face Longformer"
BATCH, WORDS = 3, 99
SOFTMAX = 2e-6  # theirs takes softmax in float32 whatever the model's type, so float64 agrees to some 2^-24 only
BOUND = error_bound(2, 64)

LENGTH = 29
LENGTHS = torch.tensor([29, 12, 20])
RIGHT = torch.arange(LENGTH) < LENGTHS[:, None]
MASKS = {
    "no padding": torch.ones(BATCH, LENGTH, dtype=torch.bool),
    "right padding": RIGHT,
    "left padding": RIGHT.flip(1),
    "holes": torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7,
}


def longformer(**changes):
    changes = {"attention_window": [4, 8], "vocab_size": WORDS, "max_position_embeddings": 80} | changes
    return made("longformer", transformers.LongformerModel, **changes)


def sentences(mask, hubs=True):
    shape = mask.shape
    given = {"input_ids": torch.randint(3, WORDS, shape), "attention_mask": mask.long()}
    if hubs:  # of every sentence its own, padding among them
        given["global_attention_mask"] = (torch.rand(shape) < torch.tensor([[0.0], [0.2], [0.5]])).long()
    return given


@pytest.mark.parametrize("hubs", [True, False], ids=["global tokens", "none"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.covering
def test_equals_hugging_face_on_every_token(mask, hubs, measured):
    theirs = longformer()
    batch = sentences(mask, hubs) | {"output_hidden_states": True}
    expected, found = theirs(**batch), from_hf(theirs)(**batch)
    assert type(found) is type(expected)
    measured(SYSTEM, PEER, largest(expected.last_hidden_state[mask] - found.last_hidden_state[mask]), BOUND)
    theirs = theirs.double()
    expected, found = theirs(**batch), from_hf(theirs)(**batch)
    for a, b in zip(expected.hidden_states, found.hidden_states, strict=True):
        assert largest(a[mask] - b[mask]) < SOFTMAX
    first = mask[:, 0]
    assert largest(expected.pooler_output[first] - found.pooler_output[first]) < SOFTMAX


@pytest.mark.parametrize("length", [1, 3, 8, 9, 16, 31])
def test_any_length_without_padding(length, measured):
    theirs = longformer()
    ids = torch.randint(3, WORDS, (2, length))
    first = (torch.arange(length) == 0).long().expand(2, -1)
    expected, found = (m(ids, global_attention_mask=first).last_hidden_state for m in (theirs, from_hf(theirs)))
    measured(SYSTEM, PEER, largest(expected - found), BOUND)


def test_a_swapped_graph_takes_the_place_of_the_windows():
    theirs = longformer(attention_window=8).double()
    wider = longformer(attention_window=16).double()
    wider.load_state_dict(theirs.state_dict())
    batch = sentences(RIGHT)
    expected = wider(**batch).last_hidden_state
    found = from_hf(theirs, graph=graphs.window(8))(**batch).last_hidden_state
    assert largest(expected[RIGHT] - found[RIGHT]) < SOFTMAX


def written_out(model, tokens, radius, dilation, hubs):
    """Section 3.1 for one sentence and one layer, in loops over destinations and heads."""
    x = model.embeddings(tokens, model.positions(tokens), torch.zeros_like(tokens))[0]
    layer, n = model.layers[0], tokens.shape[1]
    near, wide, dim = layer.near.attention, layer.wide.attention, x.shape[1] // layer.near.attention.heads
    rows = []
    for i in range(n):
        maps = wide if hubs[i] else near
        window = [j for j in range(n) if (i - j) % dilation == 0 and abs(i - j) <= radius * dilation]
        sources = range(n) if hubs[i] else sorted({*window, *(j for j in range(n) if hubs[j])})
        query, keys = maps.to_query(x[i]), maps.to_key(x[list(sources)])
        values, row = maps.to_value(x[list(sources)]), []
        for h in range(maps.heads):
            part = slice(h * dim, (h + 1) * dim)
            score = torch.stack([query[part] @ key[part] / math.sqrt(dim) for key in keys]).exp()
            row.append((score[:, None] * values[:, part]).sum(0) / score.sum())
        rows.append(near.to_out(torch.cat(row)))
    z = layer.update.norm(x + torch.stack(rows))
    return layer.update.ffn_norm(z + layer.update.ffn(z))


@pytest.mark.parametrize(("radius", "dilation"), [(2, 1), (2, 3), (1, 4)])
def test_dilated_windows_equal_the_formula(radius, dilation, measured):
    sizes = BertConfig(vocabulary=WORDS, dim=16, layers=1, heads=2, hidden=32, context=30)
    model = Longformer(sizes, graphs.window(radius, dilation=dilation)).double().eval()
    tokens, hubs = torch.randint(3, WORDS, (1, 17)), torch.rand(1, 17) < 0.2
    expected = written_out(model, tokens, radius, dilation, hubs[0].tolist())
    assert largest(expected - model(tokens, hubs=hubs).last[0]) < 1e-12
    single = model.float()(tokens, hubs=hubs).last[0]
    measured(SYSTEM, "formula, dilated windows", largest(expected - single), BOUND)


def test_the_first_token_is_a_hub_by_default():
    sizes = BertConfig(vocabulary=WORDS, dim=16, layers=2, heads=2, hidden=32, context=30)
    model, tokens = Longformer(sizes, [graphs.window(1), graphs.window(2)]).eval(), torch.randint(3, WORDS, (2, 9))
    first = torch.arange(9).expand(2, -1) == 0
    assert torch.equal(model(tokens).last, model(tokens, hubs=first).last)
    assert not torch.equal(model(tokens).last, model(tokens, hubs=~first).last)
