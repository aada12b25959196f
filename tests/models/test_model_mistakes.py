"""What models say of input that they cannot take, and what they make of batches that are odd."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from mpnn import MessagePassing, graphs, models
from mpnn.models import GIN, GPT, PNA, Bert, BertConfig, Convolution, GPSLayer, Llama, LlamaConfig
from mpnn.update import MLP, Add

TOKENS = torch.arange(9)[None]
SIZES = {"vocabulary": 17, "dim": 16, "layers": 2, "heads": 2, "hidden": 32, "context": 12}
WINDOW = graphs.window(2).bind(9)

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a sentence alone": (
        lambda: Bert(BertConfig(**SIZES))(TOKENS[0]),
        "tokens must be a batch of sentences, [batch, length]; got shape [9]",
    ),
    "a graph that sees later nodes": (
        lambda: GPT(17, 16, 2, 1, [WINDOW]),
        "must not attend to the tokens that it predicts",
    ),
    "topologies for other layers": (
        lambda: Llama(LlamaConfig(**SIZES), [graphs.causal()] * 3),
        "graph must be one topology, or one for each of 2 layers; got 3",
    ),
    "an unknown activation": (
        lambda: Bert(BertConfig(**SIZES, activation="gleu")),
        "there is no activation 'gleu'; there are gelu, gelu_new, gelu_pytorch_tanh, relu, silu, tanh",
    ),
    "an edge network without features of edges": (
        lambda: models.MPNN(4, 3, 2)(torch.randn(9, 4), WINDOW),
        "an edge network needs edge features",
    ),
    "a graph network without features of edges": (
        lambda: models.GraphNetwork(4, 3, 2)(torch.randn(9, 4), WINDOW),
        "GraphNetwork needs edge features",
    ),
    "towers without features of edges": (
        lambda: PNA(4, 3, 8, edge_dim=3)(torch.randn(9, 4), WINDOW),
        "a layer with edge_dim needs edge features: pass edge_attr, or a graph that has edge_attr",
    ),
    "towers": (lambda: PNA(6, 3, 16, towers=3), "3 towers cannot share a width of 16 evenly"),
    "three sizes": (
        lambda: Convolution(3, 4, (1, 2, 3)),
        "a size must be one integer, or two: height and width; got [1, 2, 3]",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()


def test_sentences_without_any_place_are_nothing() -> None:
    found = Bert(BertConfig(**SIZES)).eval()(torch.zeros(2, 0, dtype=torch.int64))
    assert found.last.shape == (2, 0, 16)
    assert found.pooled.shape == (2, 16)


@pytest.mark.parametrize("width", [16, 7], ids=["as wide as", "other than"])
def test_batch_norm_is_over_nodes_however_they_are_batched(width: int) -> None:
    """16 nodes with 16 features: torch's own batch norm would take one for the other without a word."""
    graph, x = graphs.grid(4, 4).bind(16), torch.randn(3, 16, width)
    apart = graphs.batch([graph] * 3)
    for make in (
        lambda: GIN(width, 2, hidden=width, dropout=0.0),
        lambda: GPSLayer(MessagePassing(None, "sum", Add(MLP(width, width))), width, 1),
    ):
        model = make().train()
        among = () if isinstance(model, GIN) else (graphs.documents([16] * 3),)
        side_by_side = model(x.flatten(0, 1), apart, *among)
        torch.testing.assert_close(model(x, graph).flatten(0, 1), side_by_side)
