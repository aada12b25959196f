"""Positions: what sinusoids can do, what binary and normalized numbers cannot; and relative ones as published."""

import math

import pytest
import torch
from error_bound import error_bound

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.models.layers.positions import sinusoidal
from mpnn.position import T5, ALiBi, Rotary, Shaw

EXACT = error_bound(1, 16, torch.float64)
BOUND = error_bound(1, 16)
DOUBLE = torch.float64


def largest(difference):
    return difference.abs().max().item()


@pytest.mark.parametrize(("buckets", "bidirectional"), [(3, True), (0, True), (1, False), (32, True)])
def test_t5_refuses_buckets_that_its_logarithm_cannot_fill(buckets, bidirectional):
    with pytest.raises(ValueError, match=f"of {buckets} buckets . hold one offset each; .* max_distance=8"):
        T5(2, buckets, 8, bidirectional)


def test_shaw_refuses_a_distance_below_zero():
    with pytest.raises(ValueError, match="max_distance must be at least 0; got -1"):
        Shaw(4, -1)


def test_rotary_refuses_keys_of_another_width_too():
    graph = graphs.complete().bind(3)
    with pytest.raises(ValueError, match="for heads of width 4; got 2"):
        Rotary(4).rotate(torch.ones(3, 1, 4), torch.ones(3, 1, 2), graph)


# ------------------------------------------------------------------------------------------------ sinusoids


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoids_are_the_papers(dim):
    """Section 3.5: sin at even components, cos at odd ones, written out one by one."""
    found = sinusoidal(50, dim, dtype=DOUBLE)
    for p in range(50):
        for k in range(dim):
            angle = p / 10000 ** (2 * (k // 2) / dim)
            assert abs(found[p, k].item() - (math.cos(angle) if k % 2 else math.sin(angle))) < EXACT


@pytest.mark.parametrize("dim", [16, 17])
def test_halves_are_those_of_marian(dim, measured):
    marian = pytest.importorskip("transformers.models.marian.modeling_marian")
    theirs = marian.MarianSinusoidalPositionalEmbedding(100, dim).create_weight()
    measured("Positional encodings", "Hugging Face Marian", largest(theirs - sinusoidal(100, dim, halves=True)), BOUND)


# ------------------------------------------------------------------------------------------------ relative ones


def dense(position, graph):
    """The bias of each pair, [H, N, N]."""
    bias = position.bias(graph)
    matrix = torch.zeros(bias.table.shape[1], graph.num_dst, graph.num_src)
    src, dst = graph.edge_index
    matrix[:, dst, src] = bias.table[bias.ids(graph)].float().T
    return matrix


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_biases_are_those_of_t5(decoder, measured):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(d_model=16, num_heads=4, d_kv=4, is_decoder=decoder)
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5(4, bidirectional=not decoder)
    with torch.no_grad():
        ours.table.copy_(theirs.relative_attention_bias.weight.normal_())
        found, expected = dense(ours, graphs.complete().bind(200)), theirs.compute_bias(200, 200)[0]
    measured("Positional encodings", "Hugging Face T5", largest(found - expected), BOUND)


@pytest.mark.parametrize("heads", [4, 6, 12])
def test_alibi_biases_are_those_of_mpt(heads, measured):
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    theirs = mpt.build_mpt_alibi_tensor(heads, 60).flatten(1)  # of the last node, which attends to all
    found = dense(ALiBi(heads), graphs.causal().bind(60))[:, -1]
    measured("Positional encodings", "Hugging Face MPT (ALiBi)", largest(found - theirs), BOUND)


def test_rotary_rotations_equal_llama(measured):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    query, key = torch.randn(2, 60, 4, 8), torch.randn(2, 60, 2, 8)
    cos, sin = llama.LlamaRotaryEmbedding(config)(query, torch.arange(60)[None])
    theirs = llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    ours = Rotary(8).rotate(query, key, graphs.causal().bind(60))
    error = max(map(largest, map(torch.sub, ours, theirs)))
    measured("Positional encodings", "Hugging Face Llama (rotary)", error, BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shaw_is_the_formula(dtype, measured):
    """Equations 3 and 4 of Shaw et al. 2018, pair by pair, with offsets beyond 2 counted as 2."""
    shaw = Shaw(4, max_distance=2)
    attention = DotProduct(8, 2, position=shaw).to(dtype)
    x = torch.randn(6, 8, dtype=dtype)
    query, key, value = (
        to(x).unflatten(-1, (2, 4)) for to in (attention.to_query, attention.to_key, attention.to_value)
    )
    heads = torch.empty(6, 2, 4, dtype=dtype)
    for i in range(6):
        for h in range(2):
            at = [min(max(j - i, -2), 2) + 2 for j in range(6)]
            scores = torch.stack([query[i, h] @ (key[j, h] + shaw.keys[at[j], 0]) / 2 for j in range(6)])
            weights = scores.softmax(0)
            heads[i, h] = sum(weights[j] * (value[j, h] + shaw.values[at[j], 0]) for j in range(6))
    error = largest(MessagePassing(graphs.complete(), "sum", None, attention)(x) - attention.to_out(heads.flatten(1)))
    if dtype == torch.float64:
        assert error < EXACT
    else:
        measured("Positional encodings", "formula", error, BOUND)
