"""Initial weights: logits start out undecided, and a round of message passing keeps the size of what it carries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mpnn import MessagePassing, graphs
from mpnn.attention import Typed
from mpnn.attention.typed import TypedAdditive
from mpnn.models import (
    GPT,
    Bert,
    BertConfig,
    BigBird,
    Convolution,
    Linformer,
    LinformerConfig,
    LinformerEncoder,
    Llama,
    LlamaConfig,
    Longformer,
    MaskedLM,
    ReformerConfig,
    ReformerLM,
    TransformerXL,
    XLNet,
    XLNetConfig,
)

VOCABULARY = 1000
SIZES = {"vocabulary": VOCABULARY, "dim": 64, "layers": 2, "heads": 2, "hidden": 128, "context": 32}
MODELS = {
    "Bert": lambda: MaskedLM(Bert(BertConfig(**SIZES))),
    "RoBERTa": lambda: MaskedLM(Bert(BertConfig(**SIZES, after_pad=True))),
    "BigBird": lambda: MaskedLM(BigBird(BertConfig(**SIZES), block=4)),
    "Longformer": lambda: MaskedLM(Longformer(BertConfig(**SIZES))),
    "Linformer": lambda: MaskedLM(LinformerEncoder(LinformerConfig(**SIZES, landmarks=8))),
    "GPT": lambda: GPT(VOCABULARY, 64, 2, 2),
    "Llama": lambda: Llama(LlamaConfig(**SIZES)),
    "Reformer": lambda: ReformerLM(ReformerConfig(VOCABULARY, 256, hidden=128, layers=("local", "lsh"))),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_guesses(name: str) -> None:
    """A loss far above log(vocabulary) would say that the model is sure of what it cannot know."""
    tokens = torch.randint(1, VOCABULARY, (8, 24))
    targets = torch.randint(1, VOCABULARY, (8, 24))
    loss = MODELS[name]().eval().loss(tokens, targets).item()
    assert abs(loss - math.log(VOCABULARY)) < 0.5


def test_models_that_remember_guess_too() -> None:
    tokens, targets = torch.randint(1, VOCABULARY, (2, 8, 24))
    loss, _ = TransformerXL(VOCABULARY, 64, 2, 2).loss(tokens, targets)
    assert abs(loss.item() - math.log(VOCABULARY)) < 0.5
    loss = XLNet(XLNetConfig(VOCABULARY, 64, 2, 2, 128)).loss(tokens)
    assert abs(loss.item() - math.log(VOCABULARY)) < 0.5


def test_pads_begin_at_zero_and_other_tables_do_not() -> None:
    embeddings = Bert(BertConfig(**SIZES, after_pad=True)).embeddings
    for table, pad in ((embeddings.token, 0), (embeddings.position, 0)):
        assert not table.weight[pad].any()
        assert table.weight[pad + 1 :].any(1).all()


def test_mixtures_of_linformer_keep_their_own_size() -> None:
    attention = LinformerEncoder(LinformerConfig(**SIZES, landmarks=8)).layers[0].attention
    assert isinstance(attention, Linformer)
    assert attention.mix_keys.std().item() == pytest.approx(32**-0.5, rel=0.2)  # of 256 numbers


@pytest.mark.parametrize(("relations", "width"), [(1, 64), (4, 64), (9, 32)])
def test_maps_by_class_keep_the_size_of_what_they_carry(relations: int, width: int) -> None:
    """Each map is Xavier's: what one neighbor says arrives as large as it was, however many classes there are."""
    nodes = 400
    edges = torch.stack([torch.arange(nodes).roll(1), torch.arange(nodes)])
    ring = graphs.from_edges(edges, nodes, edge_type=torch.arange(nodes) % relations)
    op = MessagePassing(ring, "sum", None, Typed(width, width, relations))
    assert op(torch.randn(nodes, width)).std().item() == pytest.approx(1.0, abs=0.1)


def test_maps_and_vectors_of_each_edge_type_begin_as_those_of_gat() -> None:
    attention = TypedAdditive(64, 16, relations=3, heads=4)
    for weight, bound in ((attention.weight, 6 / (64 + 64)), (attention.by_dst, 6 / (4 + 64))):
        assert weight.abs().max().item() == pytest.approx(bound**0.5, rel=0.1)


def test_a_convolution_begins_as_torchs() -> None:
    for kernel, channels in ((3, 8), ((1, 5), 16)):
        ours, theirs = Convolution(channels, 64, kernel), nn.Conv2d(channels, 64, kernel)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.abs().max().item() == pytest.approx(b.abs().max().item(), rel=0.1)
