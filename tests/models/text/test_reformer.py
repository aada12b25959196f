"""Reformer as message passing against Hugging Face's own on the same hashes, and its definition written out."""

from dataclasses import replace

import pytest
import torch
from error_bound import error_bound, largest

from mpnn import graphs
from mpnn.models import Reformer, ReformerConfig, ReformerLM, from_hf
from mpnn.models.text.reformer import Chunks, hash_buckets

transformers = pytest.importorskip("transformers")

from hf_models import made  # noqa: E402

SYSTEM, PEER = "Reformer", "Hugging Face Reformer"
BATCH, WORDS = 2, 99
SMALL = ReformerConfig(
    vocabulary=WORDS,
    dim=16,
    layers=["local", "lsh"],
    heads=2,
    head_dim=8,
    hidden=32,
    local=Chunks(4),
    lsh=Chunks(4),
    axial=[4, 8],
    axial_dims=[8, 8],
)
EXACT = error_bound(2, 64, torch.float64, scale=100)  # logits of nodes that attend to themselves alone are -1e5
BOUND = error_bound(2, 64)


def hugging_face(**changes):
    sizes = {
        "vocab_size": WORDS, "attn_layers": ["local", "lsh", "local", "lsh"], "max_position_embeddings": 64,
        "axial_pos_shape": [8, 8], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 8, "num_buckets": 4,
        "num_hashes": 3, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return made("reformer", transformers.ReformerModel, **sizes | changes)


def sentences(length, padding=False):
    lengths = torch.tensor([length, length - 9 if padding else length])
    mask = torch.arange(length) < lengths[:, None]
    return {"input_ids": torch.randint(3, WORDS, (BATCH, length)), "attention_mask": mask.long()}


@pytest.fixture(autouse=True)
def directions_of_one_type(monkeypatch):
    """Directions are drawn in float32 whatever the model's type, so that models of both types hash alike."""
    drawn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, dtype=None, **options: drawn(*size, **options).to(dtype))


def compare(theirs, batch, measured):
    """Hugging Face's in float64 with ours in both types: a token that attends to itself alone has the logit -1e5 there,
    which over several rounds leaves float32 with an error of 2^-8."""
    mask = batch["attention_mask"].bool()
    single, theirs = from_hf(theirs), theirs.double()
    options = {"output_hidden_states": True, "use_cache": False}
    expected = theirs(**batch, **options)
    for bound, ours in ((BOUND, single), (EXACT, from_hf(theirs))):
        found = ours(**batch, **options)
        assert type(found) is type(expected)
        error = largest(expected.last_hidden_state[mask] - found.last_hidden_state[mask])
        assert error < bound
        if ours is single:
            measured(SYSTEM, PEER, error, BOUND)
        for a, b in zip(expected.hidden_states, found.hidden_states, strict=True):
            assert largest(a[:, : mask.shape[1]][mask] - b[:, : mask.shape[1]][mask]) < bound * 10


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("causal", [False, True], ids=["both directions", "causal"])
@pytest.mark.parametrize("padding", [False, True], ids=["no padding", "padding"])
@pytest.mark.parametrize("length", [64, 40, 37])
@pytest.mark.covering
def test_equals_hugging_face(length, padding, causal, measured):
    theirs = hugging_face(is_decoder=causal)
    compare(theirs, sentences(length, padding), measured)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("causal", [False, True], ids=["both directions", "causal"])
@pytest.mark.covering
def test_short_sentences(length, causal, measured):
    compare(hugging_face(is_decoder=causal), sentences(length), measured)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_buckets": [2, 4]},
        {"num_buckets": None},
        {"num_buckets": None, "lsh_attn_chunk_length": 2, "max_position_embeddings": 64},
        {"num_hashes": 1},
        {"attn_layers": ["lsh", "lsh"], "lsh_num_chunks_after": 1},
        {"attn_layers": ["local"], "local_num_chunks_before": 2, "local_num_chunks_after": 1},
        {"axial_pos_embds": False},
        {"hidden_act": "gelu", "layer_norm_eps": 1e-6},
    ],
    ids=str,
)
@pytest.mark.sample(2)
def test_other_configurations(changes, measured):
    compare(hugging_face(**changes), sentences(41, padding=True), measured)


def test_another_number_of_rounds():
    theirs = hugging_face().double()
    ours, batch = from_hf(theirs), sentences(40) | {"num_hashes": 2, "use_cache": False}
    assert largest(theirs(**batch).last_hidden_state - ours(**batch).last_hidden_state) < EXACT
    assert largest(ours(**batch).last_hidden_state - ours(batch["input_ids"]).last_hidden_state) > 0.01


# ------------------------------------------------------------------------------------------------ as published


def written_out(model, layer, x1, x2, sizes):
    """Equations 3 to 5 and 9 for one sentence, in loops: rounds of hashing summed up by their normalizers."""
    attention, n = layer.attention, len(x2)
    h = layer.update.norm(x2)
    queries = attention.to_query(h).view(n, sizes.heads, sizes.head_dim)
    values = attention.to_value(h).view(n, sizes.heads, sizes.head_dim)
    found = hash_buckets(queries, sizes.bucket_factors(n), sizes.rounds, sizes.seed)
    size, rows = sizes.lsh.size, []
    for i in range(n):
        row = []
        for head in range(sizes.heads):
            outs, logs = [], []
            lists = [sorted(range(n), key=lambda j, r=r: (found[j, head, r].item(), j)) for r in range(sizes.rounds)]
            line = [j for one in lists for j in one]
            cut = [line[k : k + size] for k in range(0, len(line), size)]
            for r in range(sizes.rounds):
                chunk = (r * n + lists[r].index(i)) // size
                sources = [j for j in cut[chunk - 1] + cut[chunk] if j <= i and j != i] or [i]
                q = queries[i, head]
                keys = queries[sources, head] / (queries[sources, head].square().mean(-1, keepdim=True) + 1e-6).sqrt()
                score = keys @ q / sizes.head_dim**0.5 if sources != [i] else torch.full((1,), -1e5).to(q)
                logs.append(score.logsumexp(0))
                outs.append((score - logs[-1]).exp() @ values[sources, head])
            share = (torch.stack(logs) - torch.stack(logs).logsumexp(0)).exp()
            row.append((share[:, None] * torch.stack(outs)).sum(0))
        rows.append(attention.to_out(torch.cat(row)))
    y1 = x1 + torch.stack(rows)
    return y1, x2 + layer.update.ffn(layer.update.ffn_norm(y1))


def test_one_softmax_over_all_rounds_is_their_sum_by_normalizers(measured):
    sizes = ReformerConfig(
        vocabulary=WORDS, dim=16, layers=["lsh"], heads=2, head_dim=8, hidden=32, lsh=Chunks(4), buckets=4, rounds=3,
        seed=1, causal=True, axial=None, context=20,
    )  # fmt: skip
    model = Reformer(sizes).double().eval()
    tokens = torch.randint(WORDS, (1, 20))
    x = model.token(tokens[0]) + model.position.weight
    expected = model.norm(torch.cat(written_out(model, model.layers[0], x, x, sizes), -1))
    assert largest(expected - model(tokens).last[0]) < EXACT
    measured(SYSTEM, "formula", largest(expected - model.float()(tokens).last[0]), BOUND)


# ------------------------------------------------------------------------------------------------ the model itself


def test_a_swapped_graph_takes_the_place_of_chunks_and_hashes():
    theirs = hugging_face(local_attn_chunk_length=40, lsh_attn_chunk_length=40).double()
    short = hugging_face().double()
    short.load_state_dict(theirs.state_dict())
    batch = sentences(40, padding=True)
    mask = batch["attention_mask"].bool()
    expected = theirs(**batch).last_hidden_state
    ours = from_hf(short, graph=graphs.complete())
    assert largest(expected[mask] - ours(**batch).last_hidden_state[mask]) < EXACT
    assert from_hf(short, graph=graphs.window(2))(**batch).last_hidden_state.isfinite().all()


def test_another_graph_takes_the_place_of_hashes_and_causal_ones_refuse_the_future():
    model, tokens = ReformerLM(replace(SMALL, causal=True, seed=1)).eval(), torch.randint(WORDS, (1, 30))
    with pytest.raises(ValueError, match="node 0 attends to node 1"):
        ReformerLM(replace(SMALL, causal=True), graph=graphs.window(1))
    over = ReformerLM(replace(SMALL, causal=True), graph=graphs.causal() & graphs.window(3)).eval()
    over.load_state_dict(model.state_dict())
    assert largest(over(tokens)[:, :20] - model(tokens)[:, :20]) > 0.01
    torch.testing.assert_close(over(tokens[:, :20]), over(tokens)[:, :20])


def test_hashes_are_drawn_anew_at_each_call():
    model, tokens = Reformer(SMALL).eval(), torch.randint(WORDS, (2, 30))
    assert not torch.equal(model(tokens).last, model(tokens).last)
