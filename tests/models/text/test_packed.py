"""Packed documents in ready-made models: `lengths=` computes each document as if it were alone; `graph=` replaces the
graph for one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import graphs
from mpnn.decoding.cache import KVCache
from mpnn.models import (
    GPT,
    Bert,
    BertConfig,
    DeepNet,
    GPTConfig,
    LinformerConfig,
    LinformerEncoder,
    Llama,
    LlamaConfig,
    MaskedLM,
    SentenceClassifier,
    SparseTransformer,
    Transformer,
    TransformerConfig,
)
from mpnn.models.layers.packing import Packing

WORDS, CONTEXT = 23, 8
LENGTHS = [5, 1, 7]  # longer than the context together
TOTAL = sum(LENGTHS)

SIZES = GPTConfig(WORDS, 16, 2, 4, context=CONTEXT)
LLAMA = LlamaConfig(WORDS, 16, 2, 4, 2, hidden=24, context=CONTEXT)
BERT = BertConfig(WORDS, 16, 2, 4, 24, CONTEXT)
DECODERS: dict[str, Callable[[], Any]] = {
    "GPT": lambda: GPT(WORDS, 16, 4, 2, context=CONTEXT),
    "GPT, window": lambda: GPT(WORDS, 16, 4, 2, graphs.causal() & graphs.window(2), context=CONTEXT),
    "Llama": lambda: Llama(LLAMA),
    "Mistral": lambda: Llama(LLAMA, graphs.causal() & graphs.window(3)),
    "DeepNet": lambda: DeepNet(SIZES),
    "SparseTransformer": lambda: SparseTransformer(SIZES, [graphs.strided(2), graphs.fixed(3)], "heads"),
}


@pytest.fixture(params=DECODERS)
def decoder(request: Any) -> Any:
    torch.manual_seed(0)
    return DECODERS[request.param]().eval()


def words(seed: int = 0, total: int = TOTAL) -> Tensor:
    return torch.randint(0, WORDS, (2, total), generator=torch.Generator().manual_seed(seed))


def test_logits_are_those_of_each_document_alone(decoder: Any) -> None:
    tokens = words()
    alone = torch.cat([decoder(document) for document in tokens.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(decoder(tokens, lengths=LENGTHS), alone, rtol=0, atol=1e-5)


def test_a_document_does_not_change_another_by_a_bit(decoder: Any) -> None:
    tokens, other = words(), words(1)
    first, _, last = tokens.split(LENGTHS, 1)
    changed = torch.cat([first, other[:, 5:6], last], 1)
    before, after = (decoder(x, lengths=LENGTHS) for x in (tokens, changed))
    assert torch.equal(before[:, :5], after[:, :5])
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_gradients_stay_in_their_document() -> None:
    model = DECODERS["Llama"]()
    embedded: list[torch.Tensor] = []
    model.token.register_forward_hook(lambda module, tokens, vectors: embedded.append(vectors))
    logits = model(words(), lengths=LENGTHS)
    (vectors,) = embedded
    (grad,) = torch.autograd.grad(logits[:, :5].square().sum(), vectors)
    assert bool((grad[:, :5] != 0).any(-1).all())
    assert not bool(grad[:, 5:].any())


def test_the_loss_predicts_nothing_across_the_end_of_a_document(decoder: Any) -> None:
    text = words(2, TOTAL + 1)
    tokens, targets = text[:, :-1], text[:, 1:]
    loss = decoder.loss(tokens, targets, lengths=LENGTHS)
    logits = [decoder(document)[:, :-1].flatten(0, 1) for document in tokens.split(LENGTHS, 1)]
    labels = [document[:, 1:].flatten() for document in tokens.split(LENGTHS, 1)]
    torch.testing.assert_close(loss, F.cross_entropy(torch.cat(logits), torch.cat(labels)))
    assert torch.equal(targets, text[:, 1:])  # the caller's targets are not written to


def test_a_graph_replaces_the_models_own_for_one_call() -> None:
    window = graphs.causal() & graphs.window(2)
    own, swapped = GPT(WORDS, 16, 4, 2, context=16), GPT(WORDS, 16, 4, 2, window, context=16)
    swapped.load_state_dict(own.state_dict())
    tokens = words()
    for graph in (window, window.bind(TOTAL)):
        torch.testing.assert_close(own(tokens, graph=graph), swapped(tokens))
    torch.testing.assert_close(own.loss(tokens, tokens, graph=window), swapped.loss(tokens, tokens))
    torch.testing.assert_close(own(tokens, graph=window, lengths=LENGTHS), swapped(tokens, lengths=LENGTHS))
    assert not torch.allclose(own(tokens), swapped(tokens))


def test_calls_with_documents_compile_whole() -> None:
    torch._dynamo.reset()
    model, given = DECODERS["GPT"](), {"graph": graphs.causal() & graphs.window(2), "lengths": LENGTHS}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(words(), **given), model(words(), **given))
    with pytest.raises(Exception, match="must not attend to the tokens"):
        compiled(words(total=6), graph=graphs.window(1))


# ---------------------------------------------------------------------------------------------------- encoders


def test_packing_numbers_tokens_row_by_row() -> None:
    packing = Packing.of(torch.tensor([[True, False, True], [False, True, False]]))
    x = torch.arange(6.0).view(2, 3, 1)
    assert packing.pack(x).flatten().tolist() == [0, 2, 4]
    assert packing.unpack(packing.pack(x)).squeeze(-1).tolist() == [[0, 0, 2], [0, 4, 0]]
    assert packing.first(x).flatten().tolist() == [0, 4]
    assert packing.bind(graphs.causal()).dense().int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_sentences_of_one_length_share_one_graph() -> None:
    packing = Packing.of(torch.ones(5, 17, dtype=torch.bool))
    assert packing.bind(graphs.window(2)) is graphs.window(2).bind(17)
    assert packing.pack(torch.zeros(5, 17, 8)).shape == (5, 17, 8)


@pytest.mark.parametrize("after_pad", [False, True], ids=["BERT", "RoBERTa"])
@pytest.mark.parametrize("graph", [None, graphs.window(1) | graphs.global_nodes(1)], ids=["complete", "hubs"])
def test_an_encoder_computes_each_document_alone(graph: Any, after_pad: bool) -> None:
    config = BertConfig(WORDS, 16, 2, 4, 24, CONTEXT, pad=1, after_pad=after_pad)
    model = Bert(config, graph).eval()
    tokens, rows = words(), {"return_weights": True}
    packed, alone = model(tokens, lengths=LENGTHS, **rows), [model(x, **rows) for x in tokens.split(LENGTHS, 1)]
    torch.testing.assert_close(packed.last, torch.cat([x.last for x in alone], 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(packed.pooled, torch.stack([x.pooled for x in alone], 1), rtol=0, atol=1e-5)
    blocks = torch.zeros_like(packed.weights[0])
    for document, (start, stop) in zip(alone, [(0, 5), (5, 6), (6, 13)], strict=True):
        blocks[..., start:stop, start:stop] = document.weights[0]
    torch.testing.assert_close(packed.weights[0], blocks, rtol=0, atol=1e-5)


def test_an_encoders_graph_is_replaced_for_one_call() -> None:
    own, swapped = Bert(BERT).eval(), Bert(BERT, graphs.window(1)).eval()
    swapped.load_state_dict(own.state_dict())
    tokens, keep = words(total=6), torch.arange(6) < torch.tensor([[6], [4]])
    for given in ({}, {"padding_mask": ~keep}, {"lengths": [2, 4]}):
        torch.testing.assert_close(own(tokens, graph=graphs.window(1), **given).last, swapped(tokens, **given).last)


def test_heads_take_packed_documents() -> None:
    tokens, encoder = words(), Bert(BERT).eval()
    lm, classifier = MaskedLM(encoder).eval(), SentenceClassifier(encoder, 3).eval()
    alone = tokens.split(LENGTHS, 1)
    torch.testing.assert_close(lm(tokens, lengths=LENGTHS), torch.cat([lm(x) for x in alone], 1))
    torch.testing.assert_close(classifier(tokens, lengths=LENGTHS), torch.stack([classifier(x) for x in alone], 1))


# ---------------------------------------------------------------------------------------------------- translation

TRANSLATOR = TransformerConfig(
    vocabulary=WORDS, dim=16, heads=4, hidden=24, encoder_layers=1, decoder_layers=2, context=CONTEXT, dropout=0.0
)
SOURCES = [3, 4, 2]


@pytest.mark.parametrize("learned", [False, True])
def test_a_translator_computes_each_pair_alone(learned: bool) -> None:
    changes = {"learned_positions": learned, "smoothing": 0.1}
    model = Transformer(TransformerConfig(**{**vars(TRANSLATOR), **changes})).eval()
    source, target = words(3, sum(SOURCES)), words(4)
    pairs = list(zip(source.split(SOURCES, 1), target.split(LENGTHS, 1), strict=True))
    lengths = {"source_lengths": SOURCES, "target_lengths": LENGTHS}
    alone = torch.cat([model(*pair) for pair in pairs], 1)
    torch.testing.assert_close(model(source, target, **lengths), alone, rtol=0, atol=1e-5)
    logits = torch.cat([model(*pair)[:, :-1] for pair in pairs], 1)
    labels = torch.cat([pair[1][:, 1:] for pair in pairs], 1)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(model.loss(source, target, **lengths), expected)


# ---------------------------------------------------------------------------------------------------- refusals


def decode(**given: Any) -> Any:
    return DECODERS["Llama"]()(words(), **given)


def generate(**given: Any) -> Any:
    return DECODERS["Llama"]().generate(words(total=5), 2, **given)


def translate(total: int = TOTAL, **given: Any) -> Any:
    return Transformer(TRANSLATOR)(words(3, sum(SOURCES)), words(total=total), source_lengths=SOURCES, **given)


def mixed(**given: Any) -> Any:
    return LinformerEncoder(LinformerConfig(WORDS, 16, 2, 4, 24, 16, landmarks=2))(words(), **given)


NEAR, CAUSAL = graphs.window(1), graphs.causal()
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "the future": (decode, {"graph": NEAR}, "must not attend to the tokens that it predicts"),
    "the future, bound": (decode, {"graph": NEAR.bind(TOTAL)}, "must not attend to the tokens"),
    "the future in a document": (decode, {"graph": NEAR, "lengths": LENGTHS}, "must not attend to the tokens"),
    "other lengths": (decode, {"lengths": [5, 7]}, r"at least 1 each and 13 together.* got 12 in \[5, 7\]"),
    "an empty document": (decode, {"lengths": [0, 13]}, "at least 1 each"),
    "too long a document": (decode, {"lengths": [13]}, "got a document of 13 tokens, but .* context=8"),
    "a cache and a graph": (decode, {"graph": CAUSAL, "cache": KVCache(16)}, "one text in each row.* graph"),
    "a cache and lengths": (decode, {"lengths": LENGTHS, "cache": KVCache(16)}, "one text in each row.* lengths"),
    "generation of documents": (generate, {"lengths": [2, 3]}, "Give each document a row of its own"),
    "generation over a graph": (generate, {"graph": CAUSAL}, "Give each document a row of its own"),
    "fewer targets": (translate, {"target_lengths": [6, 7]}, "as many of both; got 2 and 3"),
    "no targets": (translate, {"total": 5}, "as many of both; got 0 and 3"),
    "mixtures of places": (mixed, {"lengths": LENGTHS}, "complete"),
    "padding and packing": (
        lambda **given: Bert(BERT)(words(), **given),
        {"padding_mask": words() < 0, "lengths": LENGTHS},
        "give either padding_mask or lengths",
    ),
}


@pytest.mark.parametrize(("call", "given", "sentence"), REFUSED.values(), ids=REFUSED)
def test_invalid_values_are_refused_with_a_reason(
    call: Callable[..., Any], given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        call(**given)
