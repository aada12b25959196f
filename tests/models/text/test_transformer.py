"""The Transformer against `torch.nn.Transformer` on the same weights, and what is ours: packing, caching, saving."""

import warnings
from dataclasses import replace

import pytest
import torch
from error_bound import error_bound, largest
from parity import moved
from torch import nn
from torch.nn import functional as F

from mpnn import graphs
from mpnn.decoding.cache import KVCache
from mpnn.models import ViT, ViTConfig
from mpnn.models.layers.cross_attention import StackOutput
from mpnn.models.text.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(
    vocabulary=50, dim=32, heads=4, hidden=48, encoder_layers=2, decoder_layers=3, context=30, final_norm=True
)
SOURCE = torch.arange(11) < torch.tensor([7, 11, 1])[:, None]
TARGET = torch.arange(8) < torch.tensor([8, 3, 5])[:, None]
MASKS = {"source_padding_mask": ~SOURCE, "target_padding_mask": ~TARGET}
EXACT = error_bound(3, 64, torch.float64)
BOUND = error_bound(3, 64)


def small(dtype=torch.float64, graph=None, target_graph=None, **changes):
    return moved(Transformer(replace(CONFIG, **changes), graph, target_graph).to(dtype), by=0.2)


def sentences():
    return torch.randint(3, 50, SOURCE.shape), torch.randint(3, 50, TARGET.shape)


def theirs(ours):
    """A `torch.nn.Transformer` with the same weights."""
    c, like = ours.config, ours.source.token.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that its own fast path does not take norm_first
        model = nn.Transformer(
            *(c.dim, c.heads, c.encoder_layers, c.decoder_layers, c.hidden, 0.0, c.activation),
            batch_first=True,
            norm_first=c.pre_norm,
            dtype=like.dtype,
        )
    pairs = [(model.encoder.norm, ours.encoder_norm), (model.decoder.norm, ours.decoder_norm)]
    for layer, own in zip(model.encoder.layers, ours.encoder, strict=True):
        take(layer.self_attn, own.attention)
        pairs += [(layer.norm1, own.update.norm), (layer.norm2, own.update.ffn_norm)]
        pairs += [(layer.linear1, own.update.ffn[0]), (layer.linear2, own.update.ffn[-1])]
    for layer, own in zip(model.decoder.layers, ours.decoder, strict=True):
        within, across = own.within, own.across
        take(layer.self_attn, within.attention)
        take(layer.multihead_attn, across.attention)
        pairs += [(layer.norm1, within.update.norm), (layer.norm2, across.update.norm)]
        pairs += [(layer.norm3, across.update.ffn_norm)]
        pairs += [(layer.linear1, across.update.ffn[0]), (layer.linear2, across.update.ffn[-1])]
    for to, given in pairs:
        to.load_state_dict(given.state_dict())
    return model.eval()


def take(attention, own):
    maps = own.to_query, own.to_key, own.to_value
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([m.weight for m in maps]))
        attention.in_proj_bias.copy_(torch.cat([m.bias for m in maps]))
    attention.out_proj.load_state_dict(own.to_out.state_dict())


def padded(ours, model, source, target):
    """Logits by their model, with masks where ours has packing; embedded by hand (sections 3.4 and 3.5)."""

    def embed(tokens):
        at = torch.arange(tokens.shape[1], dtype=torch.float64)[:, None]
        angle = at / 10000 ** (torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        return ours.source.token(tokens) * 32**0.5 + waves.to(ours.source.token.weight)

    states = model(
        embed(source),
        embed(target),
        tgt_mask=torch.ones(8, 8, dtype=torch.bool).triu(1),
        src_key_padding_mask=~SOURCE,
        tgt_key_padding_mask=~TARGET,
        memory_key_padding_mask=~SOURCE,
    )
    return states @ ours.source.token.weight.T


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_on_every_token(pre_norm, dtype, measured):
    ours, (source, target) = small(dtype, pre_norm=pre_norm), sentences()
    # logits are sums of 32 products with embeddings of about 0.3: their errors are of the states' size
    expected = padded(ours, theirs(ours), source, target)
    found = ours(source, target, **MASKS)
    error = largest((expected - found)[TARGET])
    measured("Transformer, encoder–decoder", "torch.nn.Transformer", error, EXACT if dtype == torch.float64 else BOUND)
    assert not found[~TARGET].any()


def test_gradients_equal_torch():
    ours, (source, target) = small(), sentences()
    model = theirs(ours)
    weight = torch.randn(3, 8, 50, dtype=torch.float64) * TARGET[..., None]
    (padded(ours, model, source, target) * weight).sum().backward()
    of_tokens = ours.source.token.weight.grad.clone()
    ours.zero_grad()
    (ours(source, target, **MASKS) * weight).sum().backward()
    assert largest(ours.source.token.weight.grad - of_tokens) < EXACT * of_tokens.abs().max()
    with torch.no_grad():
        for own in ours.parameters():
            own.copy_(own.grad)
    for (name, a), b in zip(model.named_parameters(), theirs(ours).parameters(), strict=True):
        assert largest(a.grad - b) < EXACT * (1 + a.grad.abs().max()), name


def test_weights_of_each_round_are_matrices_whose_rows_add_up_to_one():
    ours, (source, target) = small(), sentences()
    memory = ours.encode(source, padding_mask=~SOURCE, return_weights=True)
    found = ours.decode(target, memory, padding_mask=~TARGET, return_weights=True)
    assert [w.shape for w in memory.weights] == [(3, 4, 11, 11)] * 2
    assert [w.shape for w in found.cross_weights] == [(3, 4, 8, 11)] * 3
    for weights, keep in [(memory.weights[0], SOURCE), (found.weights[0], TARGET), (found.cross_weights[0], TARGET)]:
        torch.testing.assert_close(weights.sum(-1), keep[:, None, :].expand(-1, 4, -1).double())
    assert not found.cross_weights[0].movedim(-1, 1)[~SOURCE].any()
    assert not found.weights[0].triu(1).any()


# ------------------------------------------------------------------------------------------------ word by word


def test_generation_is_the_greedy_choice_of_the_full_pass_and_stops_at_the_end():
    ours, (source, _) = small(), sentences()
    ours.target.token.weight.data[2] *= 3  # so that some sentences end
    found = ours.generate(source, 20, padding_mask=~SOURCE)
    assert found.shape[1] <= 21
    assert (found[:, 0] == CONFIG.start).all()
    choice = ours(source, found, source_padding_mask=~SOURCE).argmax(-1)
    for row, chosen in zip(found.tolist(), choice.tolist(), strict=True):
        end = row.index(CONFIG.eos) + 1 if CONFIG.eos in row else len(row)
        assert row[1:end] == chosen[: end - 1]
        assert set(row[end:]) <= {CONFIG.eos}


def best_of_all(ours, source, steps, penalty):
    """The best translation by looking at every one there is: words 1 to 4, where 2 ends it."""
    texts = [[]]
    for _ in range(steps):
        texts = [[*t, w] if 2 not in t else t for t in texts for w in (range(5) if 2 not in t else [2])]

    def score(text):
        log_p = ours(source, torch.tensor([[ours.config.start, *text]])).log_softmax(-1)[0]
        total = sum(log_p[i, w] for i, w in enumerate(text))
        return (total / ((5 + len(text)) / 6) ** penalty).item()

    best = max(map(tuple, texts), key=score)
    return [ours.config.start, *best, *[2] * (steps - len(best))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("penalty", [0.6, 0.0, 3.0])
def test_a_search_that_is_wide_enough_finds_the_best_of_all(penalty):
    ours = small(vocabulary=5, encoder_layers=1, decoder_layers=1)
    ours.source.token.weight.data *= 0.3  # so that the best is not clear from the beginning
    source, keep = torch.randint(0, 5, (3, 4)), torch.arange(4) < torch.tensor([4, 2, 3])[:, None]
    with torch.no_grad():
        expected = [best_of_all(ours, source[b : b + 1, : int(keep[b].sum())], 3, penalty) for b in range(3)]
    wide = ours.search(source, 3, padding_mask=~keep, beams=125, penalty=penalty)
    found = F.pad(wide, (0, 4 - wide.shape[1]), value=2)
    assert found.tolist() == expected


# ------------------------------------------------------------------------------------------------ the model itself


def test_loss_is_the_smoothed_cross_entropy_of_each_next_word():
    ours, (source, target) = small(), sentences()
    found = ours.loss(source, target, **MASKS)
    log_p = ours(source, target, **MASKS).log_softmax(-1)
    terms = [
        0.9 * log_p[b, i - 1, target[b, i]] + 0.1 * log_p[b, i - 1].mean()
        for b in range(3)
        for i in range(1, 8)
        if TARGET[b, i]
    ]
    torch.testing.assert_close(found, -torch.stack(terms).mean())


def test_both_graphs_are_arguments():
    ours, (source, target) = small(), sentences()
    near, before = graphs.window(1), ours(source, target)
    for given in ((near, None), (None, graphs.causal() & near)):
        other = Transformer(ours.config, *given).double().eval()
        other.load_state_dict(ours.state_dict())
        assert largest(before - other(source, target)) > 0.1


def test_two_languages_may_have_two_tables():
    ours, (source, target) = small(target_vocabulary=60, learned_positions=True, embedding_norm=True), sentences()
    assert ours(source, target).shape == (3, 8, 60)
    assert ours.source.token is not ours.target.token


def test_the_decoder_reads_patches_and_vectors():
    ours, (_, target) = small(torch.float32).eval(), sentences()
    patches = ViT(ViTConfig(image=8, patch=4, dim=32, layers=1, heads=4, hidden=64))(torch.randn(3, 3, 8, 8))
    whole = ours.decode(target, patches).last
    assert torch.equal(whole, ours.decode(target, patches.last).last)
    other = ours.decode(target, patches.last.flip(0)).last
    assert not torch.allclose(whole[0], other[0]), "each target reads its own image"
    assert torch.allclose(whole[1], other[1], atol=BOUND)
    cache = KVCache(8)
    with torch.no_grad():
        words = [ours.decode(target[:, k : k + 1], StackOutput.of(patches), cache=cache).last for k in range(8)]
    assert largest(torch.cat(words, 1) - whole) < BOUND
    with pytest.raises(TypeError, match=r"vectors \[batch, length, dim\]; got \[3, 5\]"):
        ours.decode(target, torch.zeros(3, 5))


def test_bad_input_gets_a_sentence():
    ours, (source, target) = small(), sentences()
    with pytest.raises(ValueError, match="got 33 tokens, but this model was made with context=30"):
        ours(source.repeat(1, 3), target)
    with pytest.raises(ValueError, match="node 0 attends to node 29; use causal"):
        Transformer(CONFIG, target_graph=graphs.complete())
    with pytest.raises(ValueError, match="steps must be less than the context of 30; got 30"):
        ours.generate(source, 30)
    with pytest.raises(ValueError, match="beams must be at least 1; got 0"):
        ours.search(source, 5, beams=0)
    with torch.no_grad(), pytest.raises(ValueError, match="with a cache, rows must have no padding"):
        ours.decode(target, ours.encode(source), padding_mask=~TARGET, cache=KVCache(8))
