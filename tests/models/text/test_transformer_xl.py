"""Transformer-XL against the formula of its paper, written out; and a long text, read in segments."""

import math

import pytest
import torch
from error_bound import error_bound, largest
from parity import drawn, same_gradients
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.decoding.cache import KVCache
from mpnn.models import TransformerXL
from mpnn.models.layers.relative import RelativeDotProduct

VOCABULARY, DIM, HEADS, LAYERS, REMEMBER = 11, 16, 2, 3, 4
EXACT = error_bound(LAYERS, 4 * DIM, torch.float64)
BOUND = error_bound(LAYERS, 4 * DIM)


def small(dtype=torch.float32, **options):
    return drawn(TransformerXL(VOCABULARY, DIM, HEADS, LAYERS, **{"remember": REMEMBER, **options})).to(dtype)


def tokens(length, batch=2):
    return torch.randint(VOCABULARY, (batch, length))


def waves(offset, dtype):
    """Sines of all frequencies, then cosines."""
    frequency = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    return torch.cat([(offset * frequency).sin(), (offset * frequency).cos()]).to(dtype)


def attend(attention, x, source):
    """Section 3.3 for one sentence, pair by pair: x [N, dim] attends to source [m + N, dim] up to itself."""
    n, before, width = len(x), len(source) - len(x), DIM // HEADS
    rows = []
    for i in range(n):
        heads = []
        for h in range(HEADS):
            mine = slice(h * width, (h + 1) * width)
            query = attention.to_query.weight[mine] @ x[i]
            scores = []
            for j in range(i + before + 1):
                key = attention.to_key.weight[mine] @ source[j]
                place = attention.to_position.weight[mine] @ waves(i + before - j, x.dtype)
                by_content, by_position = attention.by_content[h], attention.by_position[h]
                scores.append(((query + by_content) @ key + (query + by_position) @ place) / math.sqrt(width))
            values = source[: i + before + 1] @ attention.to_value.weight[mine].T
            heads.append(torch.stack(scores).softmax(0) @ values)
        rows.append(attention.to_out.weight @ torch.cat(heads))
    return torch.stack(rows)


def logits(model, text, segments):
    """The whole model on one text, segment by segment, with the states that are remembered."""
    memory = [torch.zeros(0, DIM, dtype=model.bias.dtype) for _ in range(LAYERS)]
    found, at = [], 0
    for length in segments:
        h, at = model.token.weight[text[at : at + length]], at + length
        for k, layer in enumerate(model.layers):
            source = torch.cat([memory[k], h])
            memory[k] = source[-REMEMBER:].detach()
            update = layer.update
            z = F.layer_norm(h + attend(layer.attention, h, source), (DIM,), update.norm.weight, update.norm.bias)
            ffn = F.linear(F.relu(F.linear(z, update.ffn[0].weight, update.ffn[0].bias)), update.ffn[3].weight)
            h = F.layer_norm(z + ffn + update.ffn[3].bias, (DIM,), update.ffn_norm.weight, update.ffn_norm.bias)
        found.append(h @ model.token.weight.T + model.bias)
    return torch.cat(found)


def read(model, text, segments):
    memory, found = None, []
    for segment in text.split(segments, 1):
        out, memory = model(segment, memory)
        found.append(out)
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_formula_segment_by_segment(dtype, measured):
    model, text, segments = small(dtype), tokens(10), [5, 2, 3]
    expected = torch.stack([logits(model, sentence, segments) for sentence in text])
    error = largest(read(model, text, segments) - expected)
    measured("Transformer-XL", "formula", error, EXACT if dtype == torch.float64 else BOUND)


def test_gradients_equal_those_of_the_formula():
    model, text, segments = small(torch.float64), tokens(7, batch=1), [4, 3]
    weight = torch.randn(7, VOCABULARY, dtype=torch.float64)
    expected = (logits(model, text[0], segments) * weight).sum()
    same_gradients(model, (read(model, text, segments)[0] * weight).sum(), expected, EXACT)


def test_far_offsets_can_be_counted_alike():
    near = drawn(RelativeDotProduct(DIM, HEADS, furthest=2)).to(torch.float64)
    far = drawn(RelativeDotProduct(DIM, HEADS)).to(torch.float64)
    far.load_state_dict(near.state_dict())
    x = torch.randn(6, DIM, dtype=torch.float64)
    banded, causal = graphs.causal() & graphs.window(2), graphs.causal()

    def run(attention, graph):
        return MessagePassing(graph, "sum", None, attention)(x)

    assert largest(run(near, banded) - run(far, banded)) < EXACT
    assert largest(run(near, causal) - run(far, causal)) > 0.01


def test_generation_goes_on_from_the_memory():
    model = small(torch.float64, remember=30)
    prompt = tokens(5)
    out = model.generate(prompt, 10, temperature=0)
    assert torch.equal(out[:, :5], prompt)
    assert torch.equal(model(out[:, :-1])[0].argmax(-1)[:, 4:], out[:, 5:])
    _, memory = model(prompt[:, :3])
    assert torch.equal(model.generate(prompt[:, 3:], 10, memory, temperature=0)[:, 2:], out[:, 5:])


def test_its_attention_can_be_decoded_node_by_node():
    op = MessagePassing(graphs.causal() & graphs.window(3), "sum", None, RelativeDotProduct(DIM, HEADS).eval())
    drawn(op).to(torch.float64)
    x, cache = torch.randn(2, 9, DIM, dtype=torch.float64), KVCache(9)
    with torch.no_grad():
        steps = torch.cat([op(part, cache=cache) for part in x.split([4, 1, 1, 3], 1)], 1)
    assert largest(steps - op(x)) < EXACT


def test_bad_memory_gets_a_sentence():
    model = small()
    _, memory = model(tokens(3))
    with pytest.raises(ValueError, match=r"\[3, m, 16\] for each of 3 layers; got"):
        model(tokens(3, batch=3), memory)
    with pytest.raises(ValueError, match="for each of 3 layers"):
        model(tokens(3), memory[:2])
    with pytest.raises(ValueError, match="remember must be at least 0; got -1"):
        TransformerXL(VOCABULARY, DIM, HEADS, LAYERS, remember=-1)
