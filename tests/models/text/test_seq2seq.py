"""Translation by aligning, against the paper's equations written out word by word."""

import pytest
import torch
from error_bound import error_bound
from parity import moved, same_gradients

from mpnn import MessagePassing
from mpnn.attention import AdditiveV2
from mpnn.graphs import complete
from mpnn.models.text.seq2seq import Seq2Seq

EXACT = error_bound(2, 32, torch.float64)
BOUND = error_bound(2, 32)
KEEP = torch.arange(6) < torch.tensor([4, 6, 1])[:, None]


def small(dtype=torch.float64):
    return moved(Seq2Seq(20, 24, embedding=10, dim=12).to(dtype))


def sentences():
    return torch.randint(3, 20, (3, 6)), torch.randint(3, 24, (3, 5))


def gru(x, h, weights):
    """One step of torch's GRU; weights of input and state and their biases, of the gates r, z, n."""
    of_x, of_h, bias_x, bias_h = weights
    xs, hs = (of_x @ x + bias_x).chunk(3), (of_h @ h + bias_h).chunk(3)
    r, z = torch.sigmoid(xs[0] + hs[0]), torch.sigmoid(xs[1] + hs[1])
    return (1 - z) * torch.tanh(xs[2] + r * hs[2]) + z * h


def formula(model, source, target):
    """Logits [M, vocabulary] and alignments [M, N] of one pair of sentences: appendix A.2, word by word."""
    read = dict(model.reader.named_parameters())
    passes = []
    for suffix, words in (("", source.tolist()), ("_reverse", source.tolist()[::-1])):
        weights = [read[f"{name}_l0{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        state, states = torch.zeros(12, dtype=torch.float64), []
        for word in words:
            state = gru(model.source.weight[word], state, weights)
            states.append(state)
        passes.append(states)
    annotations = [torch.cat(both) for both in zip(passes[0], passes[1][::-1], strict=True)]
    state = torch.tanh(model.to_state.weight @ passes[1][-1] + model.to_state.bias)
    a, w = model.align.attention, model.writer
    logits, alignments = [], []
    for word in target.tolist():
        energy = [
            a.vector[0] @ torch.tanh(a.to_query.weight @ state + a.to_value.weight @ h) for h in annotations
        ]  # e_ij
        alpha = torch.stack(energy).exp() / torch.stack(energy).exp().sum()
        context = sum(share * h for share, h in zip(alpha, annotations, strict=True))
        known = torch.cat([model.target.weight[word], context])
        t = model.readout.weight @ torch.cat([state, known]) + model.readout.bias
        logits.append(model.to_logits.weight @ torch.maximum(t[0::2], t[1::2]) + model.to_logits.bias)
        state = gru(known, state, (w.weight_ih, w.weight_hh, w.bias_ih, w.bias_hh))
        alignments.append(alpha)
    return torch.stack(logits), torch.stack(alignments)


@pytest.mark.parametrize("keep", [KEEP, None], ids=["lengths differ", "one length"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_formula(keep, dtype, measured):
    model, (source, target) = small(dtype), sentences()
    found, weights = model(source, target, source_padding_mask=None if keep is None else ~keep, return_weights=True)
    assert found.dtype == dtype
    model.double()
    errors = []
    for b, n in enumerate([6] * 3 if keep is None else keep.sum(1).tolist()):
        logits, alignments = formula(model, source[b, :n], target[b])
        errors += [(found[b] - logits).abs().max().item(), (weights[b, :, :n] - alignments).abs().max().item()]
        assert not weights[b, :, n:].any()
    measured("seq2seq with attention (Bahdanau)", "formula", max(errors), EXACT if dtype == torch.float64 else BOUND)


def test_gradients_equal_the_formulas():
    model, (source, target) = small(), sentences()
    weight = torch.randn(3, 5, 24, dtype=torch.float64)
    expected = sum(
        (formula(model, source[b, :n], target[b])[0] * weight[b]).sum() for b, n in enumerate(KEEP.sum(1).tolist())
    )
    same_gradients(model, (model(source, target, source_padding_mask=~KEEP) * weight).sum(), expected, EXACT)


def test_what_follows_from_the_source_alone_is_computed_once():
    model, (source, target) = small(), sentences()
    shapes = []
    model.align.attention.to_value.register_forward_hook(lambda module, given, out: shapes.append(out.shape))
    model(source, target, source_padding_mask=~KEEP)
    assert [shape.numel() for shape in shapes] == [int(KEEP.sum()) * 12, 0, 0, 0, 0]


@pytest.mark.parametrize("concat", [True, False])
def test_several_heads_attend_to_unprojected_sources(concat):
    attention = AdditiveV2(4, 3, heads=2, concat=concat, activation=torch.tanh, source_dim=5, map_value=False).double()
    x, h = torch.randn(2, 4).double(), torch.randn(6, 5).double()
    found = MessagePassing(complete(), "sum", None, attention)(x, source=h)
    energy = (attention.to_query(x)[:, None] + attention.to_value(h)).tanh().unflatten(-1, (2, 3)) * attention.vector
    alpha = energy.sum(-1).softmax(1)  # [2, 6, heads]
    expected = torch.einsum("ijh,jd->ihd", alpha, h)
    torch.testing.assert_close(found, expected.flatten(1) if concat else expected.mean(1))


def test_loss_is_the_cross_entropy_of_each_next_word():
    model, (source, target) = small(), sentences()
    keep = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    log_p = model(source, target).log_softmax(-1)
    terms = [log_p[b, i - 1, target[b, i]] for b in range(3) for i in range(1, 5) if keep[b, i]]
    torch.testing.assert_close(model.loss(source, target, target_padding_mask=~keep), -torch.stack(terms).mean())


def test_generation_is_the_greedy_choice_of_the_full_pass_and_stops_at_the_end():
    model, (source, _) = small(), sentences()
    model.to_logits.bias.data[model.eos] += 1  # so that some sentences end
    found = model.generate(source, 15, padding_mask=~KEEP)
    assert (found[:, 0] == model.start).all()
    choice = model(source, found, source_padding_mask=~KEEP).argmax(-1)
    for row, chosen in zip(found.tolist(), choice.tolist(), strict=True):
        end = row.index(model.eos) + 1 if model.eos in row else len(row)
        assert row[1:end] == chosen[: end - 1]
        assert set(row[end:]) <= {model.eos}


def test_bad_input_gets_a_sentence():
    model, (source, target) = small(), sentences()
    for keep in (KEEP.flip(1), torch.zeros_like(KEEP)):
        with pytest.raises(ValueError, match="padding must follow the words of each sentence"):
            model(source, target, source_padding_mask=~keep)
    with pytest.raises(ValueError, match="dim must be even"):
        Seq2Seq(9, 9, 4, 7)
