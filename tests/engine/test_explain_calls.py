"""Plans of functions and of whole models: the rounds that run in a call, which changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mpnn
import mpnn.hf
from mpnn import MessagePassing, graphs, ops
from mpnn.attention import DotProduct
from mpnn.engine import listeners
from mpnn.models import GAT, GCN, GIN, GraphPredictor

GRAPH = graphs.window(2).bind(50)


def test_functions_of_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(50, 2, 8)
    plan = mpnn.explain(ops.attend, GRAPH, x, x, x, bias=torch.randn(GRAPH.num_edges, 2))
    assert plan.backend in {one.name for one in plan.candidates if one.reason is None}
    assert "dot-product attention, softmax" in str(plan)
    assert str(plan) in capsys.readouterr().out
    named = mpnn.explain(ops.attend, GRAPH, x, x, x, backend="edge_list")
    assert named.backend == "edge_list"
    assert "aggregation" in mpnn.explain(ops.aggregate, GRAPH, x[:, 0], "max").work


def test_a_function_of_several_rounds() -> None:
    x = torch.randn(50, 8)

    def twice(x: Tensor) -> Tensor:
        return ops.aggregate(GRAPH, ops.aggregate(GRAPH, x, "mean"), "max")

    plans = mpnn.explain(twice, x)
    assert len(plans) == 2
    assert plans[1] == mpnn.explain(ops.aggregate, GRAPH, x, "max")
    with pytest.raises(ValueError, match="<lambda> ran no round of message passing"):
        mpnn.explain(lambda x: x + 1, x)


def test_a_model_in_place_names_its_compiled_layers(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2)).eval()
    mpnn.hf.use(model)
    tokens = torch.randint(60, (2, 9))
    with torch.no_grad():
        plans = mpnn.explain(model, tokens)  # the first call also compares each layer with its class, unheard
        assert [plan.is_whole_layer for plan in plans] == [True, True]
        assert mpnn.explain(model, tokens) == plans
    assert capsys.readouterr().out.startswith("encoder.layer.0, encoder.layer.1:\n")
    assert "BertLayer, 2 x 9 x 64" in plans[0].work
    assert "compiled layer" in plans[0]._repr_html_()
    assert not any(plan.is_whole_layer for plan in mpnn.explain(model.train(), tokens))


def test_a_model_in_place_says_why_no_call_computes_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    tokens = torch.randint(60, (2, 9))

    def explained(heads: int = 2, **options: Any) -> str:
        model = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=heads)).eval()
        mpnn.hf.use(model, **options)
        with torch.no_grad():
            plans = mpnn.explain(model, tokens)
        out = capsys.readouterr().out
        assert out.startswith("encoder.layer.0, encoder.layer.1:\n") == bool(plans[0].layer)
        return str(plans[0].layer)

    assert "the compiled call takes heads of" in explained(heads=8)
    assert "the model has a topology" in explained(graph="window(2)")
    assert explained(layers=False) == ""
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2)).eval()
    mpnn.hf.use(model)
    assert "the compiled call has no backward pass" in mpnn.explain(model, tokens)[1].layer


def test_a_model_shows_each_layer_once_and_stays_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """Batch normalization counts no batch, dropout draws no number, and hooks are gone."""
    x, graph = torch.randn(50, 6), GRAPH
    model = GIN(6, 3, 8, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plans = mpnn.explain(model, x, graph)
    assert torch.get_rng_state().equal(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.layers)
    assert len(plans) == 3
    out = capsys.readouterr().out
    assert "layers.0:" in out
    assert "layers.1, layers.2:" in out
    pool = graphs.from_edges([[*range(50)], [0] * 50], num_src=50, num_dst=1)
    of_graph = mpnn.explain(GraphPredictor(GCN(6, 8), 8, 1), x, graph, pool)
    assert len(of_graph) == 3
    assert "1 round of functions or of other libraries' layers:" in capsys.readouterr().out


def test_what_a_layer_says_alone_it_says_in_a_model() -> None:
    x, graph = torch.randn(50, 6), graphs.from_edges(torch.randint(50, (2, 300)), 50)
    model = GAT(6, 3).eval()
    plans = mpnn.explain(model, x, graph)
    assert plans[0] == mpnn.explain(model.layers[0], x, graph)
    layer = MessagePassing(GRAPH, "sum", None, DotProduct(6, 2))
    assert mpnn.explain(torch.nn.Sequential(layer), x)[0] == mpnn.explain(layer, x)


def test_an_error_in_a_model_leaves_nothing_behind() -> None:
    model = GCN(6, 3)
    with pytest.raises(ValueError, match="x is 5 wide"):
        mpnn.explain(model, torch.randn(50, 5), GRAPH)
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.layers)
    assert listeners.of_rounds == []
