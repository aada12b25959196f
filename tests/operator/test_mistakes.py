"""The same mistakes on every class: each raises TypeError or ValueError, and the sentence names the argument.

`tests/test_validation.py` compares single messages word by word; here every spec, update and model meets
every mistake.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpnn
from mpnn import MessagePassing, attention, graphs, models, ops, position, update

RULE = graphs.window(1)
GRAPH = RULE.bind(5)
X, NARROW = torch.rand(5, 4), torch.rand(5, 3)
COORDINATES = torch.rand(GRAPH.num_edges, 2)
LINEAR = nn.Linear(4, 4)

SPECS: dict[str, Callable[[], attention.Attention]] = {
    "DotProduct": lambda: attention.DotProduct(4, 2),
    "DotProduct with Rotary": lambda: attention.DotProduct(4, 2, position=position.Rotary(2)),
    "Additive": lambda: attention.Additive(4, 2, 2),
    "AdditiveV2": lambda: attention.AdditiveV2(4, 2, 2),
    "Bahdanau": lambda: attention.AdditiveV2(4, 2, 1, activation=torch.tanh, map_value=False),
    "Typed": lambda: attention.Typed(4, 4, 1),
    "Kernel": lambda: attention.Kernel(4, 2, features=8),
    "Kernel with elu": lambda: attention.Kernel(4, 2, features="elu"),
    "Degree": lambda: attention.Degree(4, 4),
    "Gaussian": lambda: attention.Gaussian(4, 4, 2, 2),
    "Near": lambda: attention.Near(nn.Linear(4, 6), 2),
    "Mapped": lambda: attention.Mapped(nn.Linear(4, 4)),
    "EdgeWeight": lambda: attention.EdgeWeight(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    "MAGNA": lambda: models.graph.magna.MagnaAttention(4, 2),
    "Linformer": lambda: models.text.linformer.Linformer(4, 2, length=8, landmarks=3),
}
COMPLETE = graphs.complete().bind(5)
DATA = SimpleNamespace(x=X, edge_index=COMPLETE.edge_index)


def called(spec: str, x: Any = X, **more: Any) -> Tensor:
    if spec == "Gaussian":
        more.setdefault("edge_attr", torch.rand(25, 2))
    return MessagePassing(COMPLETE, "sum", None, SPECS[spec]())(x, **more)


@pytest.mark.parametrize("spec", SPECS)
def test_specs_work(spec: str) -> None:
    assert called(spec).shape[:-1] == (5,)
    assert called(spec, source=torch.rand(5, 4)).shape[:-1] == (5,)
    with torch.autocast("cpu", torch.bfloat16):
        assert called(spec).shape[:-1] == (5,)
        called(spec, X.bfloat16())


FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "narrow features": ({"x": NARROW}, "x is 3 wide .* was made for a width of 4"),
    "half features": ({"x": X.half()}, r"x is torch.float16 and the weights of \w+ are torch.float32"),
    "double features": ({"x": X.double()}, "x is torch.float64 and the weights"),
    "a graph for features": ({"x": COMPLETE}, "x must be a tensor.*; got Graph; the order is op"),
    "an array for features": ({"x": X.numpy()}, "x must be a tensor.*; got ndarray"),
    "a list for features": ({"x": [[1.0]]}, "x must be a tensor.*; got list"),
    "narrow sources": ({"source": NARROW}, "source is 3 wide .* was made for a width of 4"),
    "double sources": ({"source": X.double()}, "source is torch.float64 and the weights"),
    "a list of sources": ({"source": [1, 2]}, "source must be a tensor"),
    "fewer sources": ({"source": torch.rand(3, 4)}, "the graph has 5 destinations and 5 sources"),
    "text for edge_attr": ({"edge_attr": "weight"}, "edge_attr must be a tensor; got str"),
    "a list for edge_attr": ({"edge_attr": [1.0] * 25}, "edge_attr must be a tensor; got list"),
    "few edge_attr": ({"edge_attr": torch.rand(3)}, "edge_attr must have a row for each of the 25 edges"),
    "an edge_index for the graph": ({"graph": COMPLETE.edge_index}, "graph must be .*; an edge_index becomes one by"),
    "a graph of networkx": ({"graph": networkx.Graph()}, r"graph must be .*; got Graph of networkx; .*from_networkx"),
    "a graph of PyTorch Geometric for x": ({"x": DATA}, r"x must be a tensor.*; got SimpleNamespace.*graphs.from_pyg"),
    "text for the graph": ({"graph": "causal"}, r"graph must be .*; got str; text becomes one by graphs.parse"),
    "a number for the cache": ({"cache": 3}, "cache must be an mpnn.decoding.cache.KVCache; got int"),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("given", "sentence"), FEATURES.values(), ids=FEATURES)
@pytest.mark.covering
def test_features_that_a_spec_cannot_take(spec: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        called(spec, **given)


WIDENED = ["DotProduct", "Additive", "AdditiveV2", "Typed", "Kernel", "Degree", "Gaussian"]


@pytest.mark.parametrize("spec", WIDENED)
def test_messages_that_an_aggregator_widens(spec: str) -> None:
    more = {"edge_attr": COORDINATES} if spec == "Gaussian" else {}
    with pytest.raises(ValueError, match=r"the aggregate made messages .* wide, but .* attention=Mapped"):
        MessagePassing(GRAPH, "pna", None, SPECS[spec]())(X, **more)


UPDATES: dict[str, Callable[[], update.Update]] = {
    "Add": lambda: update.Add(update.MLP(4, 4)),
    "SelfConnection": lambda: update.SelfConnection(4, 4),
    "Concat": lambda: update.Concat(4, 4),
    "GRU": lambda: update.GRU(4),
    "PreNorm": lambda: update.PreNorm(4, update.FeedForward(4)),
    "PreNorm with RMSNorm": lambda: update.PreNorm(4, update.FeedForward(4), norm=nn.RMSNorm),
    "PostNorm": lambda: update.PostNorm(4, update.FeedForward(4)),
    "DeepNorm": lambda: update.DeepNorm(4, update.FeedForward(4), alpha=1.0),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's RMSNorm
@pytest.mark.parametrize("name", UPDATES)
def test_features_that_an_update_cannot_take(name: str) -> None:
    def op() -> MessagePassing:
        return MessagePassing(RULE, "sum", UPDATES[name]())

    assert op()(X).shape == (5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        op()(X)
    with pytest.raises(
        ValueError, match=r"x is 3 wide .* for a width of 4|features and messages with a total width of 8"
    ):
        op()(NARROW)
    with pytest.raises(TypeError, match=r"x is torch.float16 and the weights of .* are torch.float32"):
        op()(X.half())
    with pytest.raises(ValueError, match=r"message is 3 wide|adds the message|messages with a total width of 8"):
        MessagePassing(RULE, "sum", UPDATES[name](), attention.Additive(4, 3))(X)


def test_streams_that_a_reversible_layer_cannot_take() -> None:
    layer = MessagePassing(RULE, "sum", update.Reversible(2, update.FeedForward(2)), attention.DotProduct(2, 1))
    assert layer(X).shape == (5, 4)
    for x in (torch.rand(5, 6), X.half()):
        with pytest.raises((TypeError, ValueError), match="x is"):
            layer(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: models.GCN(4, 3),
    "GAT": lambda: models.GAT(4, 3),
    "GATv2": lambda: models.GATv2(4, 3),
    "GIN": lambda: models.GIN(4, 3, hidden=8, layers=1),
    "GraphSAGE": lambda: models.GraphSAGE(4, 3, hidden=8),
    "GNN": lambda: models.GNN(4, 3, hidden=8),
    "RGCN": lambda: models.RGCN(4, 3, 1),
    "GGNN": lambda: models.GGNN(4, 3, dim=8, rounds=1),
    "MoNet": lambda: models.MoNet(4, 3),
    "PNA": lambda: models.PNA(4, 3, dim=8, layers=1),
    "MAGNA": lambda: models.MAGNA(4, 3, dim=8, heads=2, layers=1),
    "GraphTransformer": lambda: models.GraphTransformer(4, 3, hidden=4, heads=2, layers=1),
    "GPS": lambda: models.GPS(4, 3, dim=8, heads=2, layers=1, walk=4),
    "PinSage": lambda: models.PinSage(4, 3, hidden=8, layers=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_refuse_invalid_inputs(name: str) -> None:
    model = MODELS[name]().eval()
    assert model(X, GRAPH).shape[0] == 5
    with pytest.raises(TypeError, match="x must be a tensor; got Graph: features come first, then the graph"):
        model(GRAPH, X)
    with pytest.raises(TypeError, match="x must be a tensor; got ndarray"):
        model(X.numpy(), GRAPH)
    with pytest.raises(ValueError, match=r"x is 3 wide|features and messages with a total width of 8"):
        model(NARROW, GRAPH)
    with pytest.raises(TypeError, match=r"x is torch.float16 and the weights of .* are torch.float32"):
        model(X.half(), GRAPH)


OPERATOR = MessagePassing(RULE, "sum", None, attention.DotProduct(4, 2))


def assigned(name: str, value: Any) -> Callable[[], object]:
    return lambda: setattr(copy.deepcopy(OPERATOR), name, value)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "layer.graph": (assigned("graph", "causal"), "graph must be a Topology, a Graph or None; got str"),
    "layer.aggregate, a class": (
        assigned("aggregate", mpnn.aggregate.Max),
        r"an aggregator is an object.*pass Max\(\)",
    ),
    "layer.update": (assigned("update", "relu"), "an update is None, a function"),
    "layer.edge_dropout, text": (assigned("edge_dropout", "0.5"), "edge_dropout must be a number"),
    "explain, nothing": (
        lambda: mpnn.explain(OPERATOR),
        "explain.* takes what op.* takes: missing",
    ),
    "explain, swapped": (lambda: mpnn.explain(X, OPERATOR), "op must be a MessagePassing, .* or a Round; got Tensor"),
    "explain, a graph": (lambda: mpnn.explain(GRAPH, X), "op must be a MessagePassing, .* or a Round; got Graph"),
    "explain, a model": (
        lambda: mpnn.explain(nn.Linear(4, 3), X),
        "Linear ran no round of message passing",
    ),
    "explain, turned": (lambda: mpnn.explain(OPERATOR, GRAPH, X), "x must be a tensor.*; got Graph; the order is"),
    "explain, unknown": (lambda: mpnn.explain(OPERATOR, X, mask=3), "explain.* takes what op.* takes: .*'mask'"),
    "Activate": (lambda: update.Activate("relu"), "activation must be a module or a function; got 'relu'"),
    "Add": (lambda: update.Add("relu"), "f must be a module or a function; got 'relu'"),
    "SelfConnection": (lambda: update.SelfConnection(4, 4, "relu"), "f must be a module or a function"),
    "PreNorm": (lambda: update.PreNorm(update.FeedForward(4)), "dim must be an integer; got FeedForward"),
    "PreNorm, ffn": (lambda: update.PreNorm(4, 16), "ffn must be a module or a function; got 16"),
    "PostNorm": (lambda: update.PostNorm(4.0), "dim must be an integer; got 4.0"),
    "Reversible": (lambda: update.Reversible("4", LINEAR), "dim must be an integer; got '4'"),
    "Concat": (lambda: update.Concat(4, "4"), "out_dim must be an integer; got '4'"),
    "GRU": (lambda: update.GRU(4.0), "dim must be an integer; got 4.0"),
    "DotProduct, dim": (lambda: attention.DotProduct("4", 2), "dim must be an integer; got '4'"),
    "DotProduct, heads": (lambda: attention.DotProduct(4, 2.0), "heads must be an integer; got 2.0"),
    "DotProduct, head_dim": (lambda: attention.DotProduct(4, 2, head_dim=2.0), "head_dim must be an integer"),
    "Additive, in_dim": (lambda: attention.Additive("4", 2), "in_dim must be an integer; got '4'"),
    "AdditiveV2, out_dim": (lambda: attention.AdditiveV2(4, 2.0), "out_dim must be an integer; got 2.0"),
    "Typed, relations": (lambda: attention.Typed(4, 4, "3"), "relations must be an integer; got '3'"),
    "Kernel, heads": (lambda: attention.Kernel(4, 2.0), "heads must be an integer; got 2.0"),
    "Degree, out_dim": (lambda: attention.Degree(4, 4.0), "out_dim must be an integer; got 4.0"),
    "Gaussian, kernels": (lambda: attention.Gaussian(4, 4, 2.0, 2), "kernels must be an integer; got 2.0"),
    "aggregate, swapped": (lambda: ops.aggregate(X, GRAPH), "graph must be a Graph; got Tensor"),
    "aggregate, torch.sum": (lambda: ops.aggregate(GRAPH, X, torch.sum), "an aggregator must be a function of"),
    "from_pyg, a tensor": (lambda: graphs.from_pyg(GRAPH.edge_index), "from_pyg needs .*; got Tensor.* from_edges"),
    "from_pyg, nothing": (
        lambda: graphs.from_pyg(None),
        "from_pyg needs data with an edge_index or an adj_t; got None",
    ),
    "from_sparse_tensor": (lambda: graphs.from_sparse_tensor(np.eye(3)), "needs a torch_sparse.SparseTensor; got nd"),
    "to_scipy": (lambda: graphs.to_scipy(RULE), "graph must be of a size, and .* bind it first"),
    "to_networkx": (lambda: graphs.to_networkx("x"), "graph must be a Graph; got str"),
    "to_pyg": (lambda: graphs.to_pyg(X), "graph must be a Graph; got Tensor"),
    "to_torch_sparse": (lambda: graphs.to_torch_sparse(RULE), "graph must be of a size"),
    "to_sparse_tensor": (lambda: graphs.to_sparse_tensor(None), "graph must be a Graph; got NoneType"),
    "batch": (lambda: graphs.batch(GRAPH), "graphs must be a list of graphs; got Graph"),
    "related": (lambda: RULE.with_relation("left"), "relation must be a Relation, or an integer matrix .*; got str"),
    "rows": (lambda: GRAPH.rows("a", 3), "start must be an integer; got 'a'"),
    "induced": (lambda: GRAPH.subgraph("a"), "keep must be a bool tensor"),
    "drop_edges": (lambda: GRAPH.drop_edges("half"), "p must be a number from 0 to 1; got 'half'"),
    "with_self_loops": (lambda: GRAPH.with_self_loops("mean"), "fill must be a number"),
    "rows, too many": (lambda: GRAPH.rows(3, 6), "rows 3 to 6 are not among the 5 destinations"),
    "from_edges, pairs": (lambda: graphs.from_edges(torch.zeros(3, 2, dtype=torch.int64), 3), "; pass edge_index.T"),
    "from_edges, triples": (
        lambda: graphs.from_edges(torch.zeros(4, 3, dtype=torch.int64), 3),
        r"must have shape \[2, E\], sources above destinations; got \[4, 3\]$",
    ),
    "from_edges, negative": (lambda: graphs.from_edges([[], []], -1), "num_nodes must be at least 0; got -1"),
    "Kernel, dim": (lambda: attention.Kernel(5, 2, features=8), "2 heads do not divide a width of 5"),
    "StateSpace, groups": (lambda: attention.recurrent.StateSpace(8, 2, groups=3), "3 groups do not divide 2 heads"),
    "Recurrent, key_heads": (
        lambda: attention.recurrent.DeltaRule(8, 2, key_heads=3),
        "3 heads of keys do not divide 2 heads",
    ),
    "EdgeBias": (
        lambda: MessagePassing(GRAPH, "sum", None, attention.DotProduct(4, 2, position=position.EdgeBias(3, 2)))(X),
        "EdgeBias needs edge attributes",
    ),
    "a round without a bias": (
        lambda: mpnn.engine.run(mpnn.round.Round(GRAPH, X[:, None], bias=(None,), normalize="none")),
        "bias is a tuple of tensors and tables; got None",
    ),
    "explain, a round and features": (
        lambda: mpnn.explain(mpnn.round.Round(GRAPH, X[:, None], normalize="none"), X),
        r"explain\(round\) takes no further arguments",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), CALLS.values(), ids=CALLS)
def test_calls(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


Q = torch.rand(5, 2, 4)
ATTEND: dict[str, tuple[dict[str, Any], str]] = {
    "a scale for each head": ({"scale": torch.ones(2)}, r"scale must be one number; got Tensor of shape \[2\]"),
    "an array for a scale": ({"scale": np.ones(2)}, r"scale must be one number; got ndarray of shape \[2\]"),
    "text for a softcap": ({"softcap": "30"}, "softcap must be a number; got '30'"),
    "a softcap for each head": ({"softcap": torch.ones(2)}, "softcap must be one number; got Tensor .* write a score"),
    "a learned softcap": ({"softcap": torch.ones((), requires_grad=True)}, "softcap is a number, to which no gradient"),
    "text for dropout": ({"dropout": "0.1"}, "dropout must be a number in"),
    "a tensor for dropout": ({"dropout": torch.tensor(0.1)}, "dropout must be a number in"),
    "a list of normalizers": ({"normalize": ["softmax"]}, "there is no normalizer"),
    "a list of backends": ({"backend": ["dense"]}, 'backend must be "auto" or the name of one'),
    "no backend": ({"backend": None}, 'backend must be "auto" or the name of one; got None'),
}


@pytest.mark.parametrize(("given", "sentence"), ATTEND.values(), ids=ATTEND)
def test_attend(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        ops.attend(GRAPH, Q, Q, Q, **given)


# ---------------------------------------------------------------------------------------- what now works


def test_parts_of_a_layer_may_be_replaced() -> None:
    layer = copy.deepcopy(OPERATOR)
    layer.graph, layer.aggregate, layer.update = GRAPH, "max", lambda x, m: x - m
    expected = MessagePassing(GRAPH, "max", lambda x, m: x - m, layer.attention)
    assert torch.equal(layer(X), expected(X))
    layer.attention = None
    assert torch.equal(layer(X), X - ops.aggregate(GRAPH, X, "max"))
    layer.update = None
    assert torch.equal(pickle.loads(pickle.dumps(layer))(X), ops.aggregate(GRAPH, X, "max"))


def test_a_relation_of_heterogeneous_data_is_a_graph_between_two_sets() -> None:
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    data["author"].x, data["paper"].x = torch.rand(3, 2), torch.rand(6, 2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 3]])
    graph = graphs.from_pyg(data["author", "writes", "paper"])
    assert (graph.num_src, graph.num_dst, graph.edge_index.tolist()) == (3, 6, [[0, 1], [2, 3]])


def test_weights_of_networkx_are_numbers() -> None:
    path = networkx.path_graph(3)
    networkx.set_edge_attributes(path, "far", "weight")
    with pytest.raises(ValueError, match="weight must be the name of a numeric edge attribute; 'weight' is not"):
        graphs.from_networkx(path, "weight")


def negated(x: Tensor) -> Tensor:
    """The same numbers, in a view whose negative bit is set."""
    view = torch._neg_view(-x)
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


def test_edges_with_the_negative_bit_are_copied() -> None:
    graph = graphs.from_edges(negated(GRAPH.edge_index), 5, edge_attr=negated(COORDINATES))
    assert not graph.edge_index.is_neg()
    assert graph.runs.same_as(GRAPH.runs)
    imaginary = torch.view_as_complex(torch.rand(5, 4, 2)).conj().imag  # where such views come from
    assert imaginary.is_neg()
    torch.testing.assert_close(ops.aggregate(graph, imaginary, "max"), ops.aggregate(graph, imaginary.clone(), "max"))
