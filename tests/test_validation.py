"""Bad input to the operator: one sentence that says what was given, what was expected and what to do."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, engine, graphs, ops, position
from mpnn.aggregate import Mean
from mpnn.attention import Additive, AdditiveV2, Attention, DotProduct, Typed
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.round import Round, validation
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Role
from mpnn.update import Add, Concat, PreNorm, Update

GRAPH = graphs.from_edges(torch.tensor([[0, 1, 2, 4], [1, 0, 0, 2]]), num_dst=3, num_src=5)
Q, K, V = torch.zeros(3, 4, 2), torch.zeros(5, 4, 2), torch.zeros(5, 4, 6)


def attend(graph: Graph = GRAPH, q: Tensor = Q, k: Tensor = K, v: Tensor = V, **more: object) -> Tensor:
    return ops.attend(graph, q, k, v, **more)


def cases(values: dict[str, Any], types: dict[str, Any]) -> Any:
    """Mistakes that raise ValueError, and those that raise TypeError."""
    rows = [(*row, ValueError) for row in values.values()] + [(*row, TypeError) for row in types.values()]
    return pytest.mark.parametrize(("given", "sentence", "kind"), rows, ids=[*values, *types])


def test_the_good_case_of_all_that_follow() -> None:
    assert attend().shape == (3, 4, 6)
    assert attend(bias=torch.zeros(4, 4), dropout=0.1, normalize="sigmoid").shape == (3, 4, 6)


ATTEND_VALUES: dict[str, tuple[dict[str, object], str]] = {
    "nodes of the query": (
        {"q": torch.zeros(4, 4, 2)},
        "query has 4 nodes (shape [4, 4, 2]), but Graph(3 x 5, 4 edges) has 3 destinations",
    ),
    "nodes of the key": (
        {"k": torch.zeros(3, 4, 2)},
        "key has 3 nodes (shape [3, 4, 2]), but Graph(3 x 5, 4 edges) has 5 sources",
    ),
    "nodes of the value": ({"v": torch.zeros(3, 4, 2)}, "value has 3 nodes"),
    "no heads": ({"v": torch.zeros(5, 2)}, "value must have shape [..., N, H, D]; got [5, 2]"),
    "widths": ({"k": torch.zeros(5, 4, 3)}, "query and key must be equally wide; got 2 and 3"),
    "heads": ({"k": torch.zeros(5, 3, 2)}, "4 heads cannot share 3 heads of key: 3 does not divide 4"),
    "heads of the value": ({"v": torch.zeros(5, 8, 2)}, "4 heads cannot share 8 heads of value"),
    "no key": ({"k": torch.zeros(5, 0, 2)}, "4 heads cannot share 0 heads of key: 0 does not divide 4"),
    "rows of a bias of nodes": (
        {"bias": ops.NodeBias(torch.zeros(4, 3))},
        "dst_bias has 4 nodes (shape [4, 3]), but Graph(3 x 5, 4 edges) has 3 destinations; dst_bias is read as "
        "[..., N, H]",
    ),
    "a vector for a bias of nodes": (
        {"bias": ops.NodeBias(src=torch.zeros(5))},
        "src_bias must have shape [..., N, H]; got [5]",
    ),
    "heads of a bias of nodes": (
        {"bias": ops.NodeBias(src=torch.zeros(5, 2))},
        "src_bias has 2 heads, and the score has 4",
    ),
    "batches": (
        {"q": torch.zeros(7, 3, 4, 2)},
        "query and value must have the same batch dimensions before the nodes; got [7, 3, 4, 2] and [5, 4, 6]",
    ),
    "a batch of one head, without its dimension": (
        {"q": torch.zeros(2, 3, 4, 2), "k": torch.zeros(2, 5, 4, 2), "v": torch.zeros(2, 5, 6)},
        "value has 2 nodes (shape [2, 5, 6]), but Graph(3 x 5, 4 edges) has 5 sources; value is read as [..., N, H, D]",
    ),
    "a scale of NaN": ({"scale": float("nan")}, "scale must be a finite number; got nan"),
    "an infinite scale": ({"scale": -float("inf")}, "scale must be a finite number; got -inf"),
    "no numbers anywhere": (
        {"graph": GRAPH.to("meta"), "q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")},
        "tensors on the device meta hold no numbers; move the graph and the features elsewhere",
    ),
    "device of the features": (
        {"q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")},
        "the graph is on cpu and the features on meta; call graph.to('meta')",
    ),
    "device of the query": ({"q": Q.to("meta")}, "query is on meta and value on cpu; move one"),
    "device of the bias": ({"bias": torch.zeros(4, 4, device="meta")}, "bias is on meta and value on cpu; move one"),
    "rows of the bias": ({"bias": torch.zeros(3, 4)}, "bias must have shape [4, 4], one row for each edge; got [3, 4]"),
    "heads of the bias": ({"bias": torch.zeros(4, 3)}, "bias must have shape [4, 4]"),
    "a vector for a bias": ({"bias": torch.zeros(4)}, "bias must have shape [4, 4]"),
    "batch of the bias": ({"bias": torch.zeros(2, 4, 4)}, "bias must have shape [4, 4]"),
    "a table too short": (
        {"bias": BiasTable(torch.zeros(4, 4), Offset(2))},
        "bias must have shape [5, 4], one row for each edge type; got [4, 4]",
    ),
    "a table without classes": (
        {"bias": BiasTable(torch.zeros(4, 4))},
        "a table by edge type needs a graph with edge types",
    ),
    "normalizer": (
        {"normalize": "hardmax"},
        "there is no normalizer 'hardmax'; there are softmax, softmax_dst, sigmoid, none",
    ),
    "dropout": ({"dropout": 1.0}, "dropout must lie in [0, 1); got 1.0"),
    "backend": ({"backend": "flash"}, "there is no backend 'flash'; there are auto, dense, "),
}
ATTEND_TYPES: dict[str, tuple[dict[str, object], str]] = {
    "a rule for a graph": (
        {"graph": graphs.causal()},
        "graph must be of a size, and causal() is a rule without one; bind it first: .bind(num_nodes)",
    ),
    "an edge_index for a graph": (
        {"graph": torch.zeros(2, 4).long()},
        "graph must be a Graph; got Tensor; an edge_index becomes one by graphs.from_edges(edge_index, num_nodes)",
    ),
    "features for a graph": ({"graph": Q}, "graph must be a Graph; got Tensor of floats; the graph comes first"),
    "integers": ({"q": Q.long()}, "query must be floating point; got torch.int64"),
    "an array": ({"q": Q.numpy()}, "query must be a tensor; got ndarray: torch.as_tensor makes one"),
    "eight bits": (
        {name: x.to(torch.float8_e4m3fn) for name, x in (("q", Q), ("k", K), ("v", V))},
        "value must have 16 bits or more; got torch.float8_e4m3fn: call .to(torch.bfloat16)",
    ),
    "sparse features": ({"v": V.to_sparse()}, "value must be a dense tensor; got torch.sparse_coo: call .to_dense()"),
    "a learned scale": (
        {"scale": torch.ones((), requires_grad=True)},
        "scale is a number, to which no gradient flows; multiply a learned one into the query",
    ),
    "a string for a scale": ({"scale": "2"}, "scale must be a number; got '2'"),
    "a mask for a bias": (
        {"bias": torch.ones(4, 4, dtype=torch.bool)},
        "bias must be floating point; got torch.bool: a bias is added to logits; "
        "to mask, choose the graph, or use -inf",
    ),
    "integers for a bias": (
        {"bias": torch.ones(4, 4).long()},
        "bias must be floating point; got torch.int64: call .to(torch.float32)",
    ),
    "a complex bias": ({"bias": torch.ones(4, 4) * 1j}, "bias must be floating point; got torch.complex64"),
    "a table of integers": (
        {"bias": BiasTable(torch.ones(5, 4).long(), Offset(2))},
        "bias must be floating point; got torch.int64",
    ),
    "a number for a bias": ({"bias": 0.5}, "bias must be a tensor; got float"),
    "types": (
        {"k": K.double()},
        "query, key and value must have one dtype; got torch.float32, torch.float64 and torch.float32",
    ),
}


@cases(ATTEND_VALUES, ATTEND_TYPES)
@pytest.mark.parametrize("backend", ["auto", "edge_list", "dense"])
@pytest.mark.covering
def test_attend(given: dict[str, object], sentence: str, kind: type[Exception], backend: str) -> None:
    with pytest.raises(kind, match=re.escape(sentence)):
        attend(**{"backend": backend, **given})


def test_a_table_of_too_few_classes_for_the_edges() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1], [1, 0]]), 2, edge_type=torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=r"must have shape \[8, 4\], one row for each edge type; got \[7, 4\]"):
        attend(graph, Q[:2], K[:2], V[:2], bias=BiasTable(torch.zeros(7, 4)))


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (
            Dot(Q, K, 1.0, torch.zeros(3, 4, 2)),
            "edge_key must have shape [4, 4, D], one row for each edge; got [3, 4, 2]",
        ),
        (AdditiveScore(torch.zeros(5, 4), torch.zeros(5, 4), LeakyReLU()), "dst has 5 nodes"),
        (AdditiveScore(torch.zeros(3, 4), torch.zeros(5, 1), LeakyReLU()), "src has 1 heads, and the score has 4"),
        (AdditiveScore(torch.zeros(3, 4), torch.zeros(5, 2), LeakyReLU()), "src has 2 heads, and the score has 4"),
        (
            AdditiveScore(torch.zeros(3, 4), torch.zeros(5, 4), LeakyReLU(), torch.zeros(3, 4)),
            "edge must have shape [4, 4]",
        ),
        (AdditiveV2Score(Q, Q, torch.zeros(4, 2), LeakyReLU()), "src has 3 nodes"),
        (AdditiveV2Score(Q, K, torch.zeros(4, 2), LeakyReLU(), torch.zeros(4, 4)), "edge must have shape [4, 4, D]"),
    ],
)
def test_scores(score: Dot | AdditiveScore | AdditiveV2Score, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        engine.run(Round(GRAPH, V, score))


def test_a_scale_that_an_attention_of_ones_own_learns() -> None:
    with pytest.raises(TypeError, match="multiply a learned one into the query"):
        engine.run(Round(GRAPH, V, Dot(Q, K, torch.nn.Parameter(torch.ones(())))))  # type: ignore[arg-type]


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), float("inf")])
def test_a_soft_cap_that_caps_nothing(softcap: float) -> None:
    engine.run(Round(GRAPH, V, Dot(Q, K, 1.0, softcap=2.0)))
    with pytest.raises(ValueError, match="softcap must be a positive finite number, or None; got"):
        engine.run(Round(GRAPH, V, Dot(Q, K, 1.0, softcap=softcap)))


def test_a_scale_is_checked_though_another_was_planned_for() -> None:
    engine.run(Round(GRAPH, V, Dot(Q, K, -1.0)))
    with pytest.raises(ValueError, match="scale must be a finite number; got nan"):
        engine.run(Round(GRAPH, V, Dot(Q, K, float("nan"))))


@pytest.mark.parametrize(
    ("ids", "fits"), [((0, 4), True), ((2, 6), True), ((0, 3), False), ((3, 6), False), ((-1, 6), False)]
)
def test_heads_of_a_process_are_some_of_all(ids: tuple[int, int], fits: bool) -> None:
    """(0, 4) are the four heads of this round, of four."""
    round = Round(GRAPH, V, Dot(Q, K, 1.0), dropout=0.5, head_ids=ids)
    with nullcontext() if fits else pytest.raises(ValueError, match="must be the first of 4 heads and the number of"):
        engine.run(round)


@pytest.mark.parametrize("seed", [torch.zeros(1, dtype=torch.int64), torch.zeros((), dtype=torch.int32), 5])
def test_a_seed_is_one_number_of_64_bits(seed: Any) -> None:
    engine.run(Round(GRAPH, V, Dot(Q, K, 1.0), dropout=0.5, seed=torch.tensor(5)))
    with pytest.raises(TypeError, match="seed must be an int64 scalar tensor, or None; got"):
        engine.run(Round(GRAPH, V, Dot(Q, K, 1.0), dropout=0.5, seed=seed))


def test_edge_values() -> None:
    with pytest.raises(ValueError, match=re.escape("edge_value must have shape [4, 4, D]")):
        engine.run(Round(GRAPH, V, Dot(Q, K, 1.0), edge_value=torch.zeros(5, 4, 6)))


X = torch.zeros(5, 2)
AGGREGATE_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": ({"x": X[:3]}, "x has 3 nodes (shape [3, 2]), but Graph(3 x 5, 4 edges) has 5 sources"),
    "a vector": ({"x": X[:, 0]}, "x must have shape [..., N, D]; got [5]"),
    "too few weights": (
        {"weight": torch.zeros(3)},
        "weight must have shape [4], one for each edge, or [4, 2], one for each edge and feature",
    ),
    "weights of other widths": ({"weight": torch.zeros(4, 3)}, "weight must have shape [4]"),
    "weights of a batch": ({"weight": torch.zeros(7, 4, 2)}, "after the dimensions [] of x; got [7, 4, 2]"),
    "a weight a feature and an aggregator that ranks": (
        {"weight": torch.zeros(4, 2), "reduce": "median"},
        "Median may compare the features of a message",
    ),
    "aggregator": ({"reduce": "average"}, "there is no aggregator 'average'; there are sum, mean, max"),
    "device of the features": ({"x": X.to("meta")}, "the graph is on cpu and the features on meta"),
}
AGGREGATE_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "integers": ({"x": X.long()}, "x must be floating point; got torch.int64"),
    "an array": ({"x": X.numpy()}, "x must be a tensor; got ndarray"),
    "a mask for weights": (
        {"weight": torch.ones(4, dtype=torch.bool)},
        "weight must be floating point; got torch.bool: call .to(torch.float32)",
    ),
    "a list of weights": ({"weight": [1.0] * 4}, "weight must be a tensor; got list"),
}


@cases(AGGREGATE_VALUES, AGGREGATE_TYPES)
def test_aggregate(given: dict[str, Any], sentence: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=re.escape(sentence)):
        ops.aggregate(GRAPH, **{"x": X, **given})


# ---------------------------------------------------------------------------------------- layers


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="5 heads do not divide a width of 64"):
        DotProduct(64, 5)
    with pytest.raises(ValueError, match="0 heads do not divide a width of 64"):
        DotProduct(64, 0)
    with pytest.raises(ValueError, match="3 key/value heads do not divide 8 heads"):
        DotProduct(64, 8, kv_heads=3)


CALLS_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "no graph": (
        lambda: MessagePassing(None)(torch.zeros(3, 2)),
        "this operator has no graph; pass one with the call: op(x, graph=...)",
    ),
    "another number of nodes": (
        lambda: MessagePassing(GRAPH)(torch.zeros(3, 2)),
        "the graph has 3 destinations and 5 sources, but the features have 3 and 3 (shapes [3, 2] and [3, 2])",
    ),
    "a vector": (lambda: MessagePassing(GRAPH)(torch.zeros(3)), "x must be a tensor [..., N, d]; got [3]"),
    "nothing": (lambda: MessagePassing(GRAPH)(None), "x must be a tensor [..., N, d]; got None"),
    "a graph elsewhere": (
        lambda: MessagePassing(graphs.causal().bind(3).to("meta"))(torch.zeros(3, 2)),
        "the graph is on meta and the features on cpu; call graph.to('cpu')",
    ),
    "an unknown aggregator": (
        lambda: MessagePassing(None, "maximum"),
        "there is no aggregator 'maximum' (did you mean max?); there are sum, mean, max, min, var, std, softmax, "
        "powermean, median, pna",
    ),
    "edge dropout": (lambda: MessagePassing(None, edge_dropout=1.0), "edge_dropout must lie in [0, 1); got 1.0"),
    "an unknown normalizer": (
        lambda: MessagePassing(graphs.causal(), "sum", None, DotProduct(2, 1, normalize="max"))(torch.zeros(3, 2)),
        "there is no normalizer 'max'",
    ),
    "no edge attributes": (
        lambda: MessagePassing(GRAPH, "sum", None, Additive(2, 2, edge_dim=3))(
            torch.zeros(3, 2), source=torch.zeros(5, 2)
        ),
        "this attention has edge_dim, so the graph or the call must provide edge_attr",
    ),
    "edge attributes of another width": (
        lambda: MessagePassing(GRAPH, "sum", None, DotProduct(2, 1, edge_dim=3))(
            torch.zeros(3, 2), source=torch.zeros(5, 2), edge_attr=torch.zeros(4, 2)
        ),
        "this attention has edge_dim=3; got edge_attr [4, 2]",
    ),
    "no heads": (lambda: Additive(2, 2, heads=0), "heads must be at least 1; got 0"),
    "no heads that look twice": (lambda: AdditiveV2(2, 2, heads=0), "heads must be at least 1; got 0"),
    "a message that would be added to every feature": (
        lambda: MessagePassing(graphs.causal(), "sum", Add(), Additive(2, 1))(torch.zeros(3, 2)),
        "Add adds the message to the features, so both need the same width; got 1 and 2",
    ),
    "messages of another width beside the features": (
        lambda: MessagePassing(graphs.causal(), "sum", Concat(2, 2), Additive(2, 3))(torch.zeros(3, 2)),
        "Concat expects features and messages with a total width of 4; got 2 and 3: pass message_dim=3",
    ),
    "two sources of edge vectors": (
        lambda: MessagePassing(
            graphs.causal(), "sum", None, DotProduct(4, 2, position=[position.Shaw(2, 1), position.Shaw(2, 2)])
        )(torch.zeros(3, 4)),
        "only one source of vectors can be added to each edge's key; two were given",
    ),
    "rotary of another width": (
        lambda: MessagePassing(graphs.causal(), "sum", None, DotProduct(8, 2, position=position.Rotary(8)))(
            torch.zeros(3, 8)
        ),
        "these rotary positions are for heads of width 8; got 4",
    ),
    "an odd width": (lambda: position.Rotary(3), "rotary positions need an even head width; got 3"),
    "no head": (lambda: position.ALiBi(0), "heads must be at least 1; got 0"),
    "a table of nothing": (lambda: position.Table(2), "pass relation, or relations, the number"),
    "classes that are not there": (
        lambda: MessagePassing(GRAPH, "sum", None, Typed(2, 2, 3))(torch.zeros(3, 2), source=torch.zeros(5, 2)),
        "Typed needs a graph with edge types, and Graph(3 x 5, 4 edges) has none: pass edge_type",
    ),
}
CALLS_TYPES: dict[str, tuple[Callable[[], object], str]] = {
    "integers": (lambda: MessagePassing(GRAPH)(torch.zeros(3, 2).long()), "x must be floating point; got torch.int64"),
    "integers as sources": (
        lambda: MessagePassing(GRAPH)(torch.zeros(3, 2), source=torch.zeros(5, 2).long()),
        "source must be floating point; got torch.int64",
    ),
    "a string for a graph": (lambda: MessagePassing("causal"), "graph must be a Topology, a Graph or None; got str"),
    "a string for an attention": (
        lambda: MessagePassing(None, "sum", None, "dot"),
        "attention must be an Attention or None; got str",
    ),
    "an attention for an aggregator": (
        lambda: MessagePassing(GRAPH, DotProduct(2, 1)),
        "aggregate is DotProduct; the order is MessagePassing(graph, aggregate, update, attention)",
    ),
    "an attention for an update": (
        lambda: MessagePassing(GRAPH, "sum", DotProduct(2, 1)),
        "update is DotProduct; the order is MessagePassing(graph, aggregate, update, attention)",
    ),
    "a class for an attention": (
        lambda: MessagePassing(GRAPH, "sum", None, DotProduct),
        "attention must be an Attention or None; got the class DotProduct, not an instance",
    ),
    "a class for an update": (
        lambda: MessagePassing(GRAPH, "sum", PreNorm),
        "an update is None, a function of (x, message) or an Update; got <class 'mpnn.update.PreNorm'>",
    ),
    "a class for a position": (
        lambda: DotProduct(2, 1, position=position.Rotary),
        "position must be one of mpnn.position, such as Rotary(head_dim), or several; got <class",
    ),
}


@cases(CALLS_VALUES, CALLS_TYPES)
def test_layers(given: Callable[[], object], sentence: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=re.escape(sentence)):
        given()


class Own(Attention):
    """A stranger's, which gives whatever it was made with."""

    def __init__(self, gives: Callable[[Tensor, Graph], object]) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return self.gives(src, graph)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("gives", "kind", "sentence"),
    [
        (lambda src, graph: src, TypeError, "forward of an attention must return a Round; Own returned Tensor"),
        (
            lambda src, graph: Round(graph, src),
            ValueError,
            "value must have shape [..., N, H, D]; got [3, 2]: for one head, value.unsqueeze(-2)",
        ),
        (
            lambda src, graph: Round(graph, src.unsqueeze(-2), bias=(torch.ones(graph.num_edges),)),
            ValueError,
            "one row for each edge; got [6]: for one head, bias[:, None]",
        ),
        (
            lambda src, graph: Round(graph, src.unsqueeze(-2), bias=torch.ones(graph.num_edges, 1)),
            TypeError,
            "bias is a tuple, bias=(numbers,); got Tensor",
        ),
        (
            lambda src, graph: Round(graph, src.unsqueeze(-2), src @ src.mT),
            TypeError,
            "score must be a dataclass with `roles` and `logits`, as mpnn.scores.Dot; got Tensor: pass logits",
        ),
    ],
)
def test_an_attention_of_ones_own_that_is_not_right_yet(gives, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=re.escape(sentence)):
        MessagePassing(graphs.causal(), "sum", None, Own(gives))(torch.zeros(3, 2))


def test_an_update_without_a_forward_says_what_to_write() -> None:
    class Half(Update):
        pass

    with pytest.raises(NotImplementedError, match=re.escape("Half does not implement forward(x, ")):
        MessagePassing(graphs.causal(), "sum", Half())(torch.zeros(3, 2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_unless_they_are_jagged() -> None:
    x = torch.nested.nested_tensor([torch.randn(5, 4), torch.randn(3, 4)])
    layer, graph = MessagePassing(graphs.causal(), "sum"), graphs.causal().bind(5)
    for call in (lambda: layer(x), lambda: ops.aggregate(graph, x), lambda: ops.attend(graph, x, x, x)):
        with pytest.raises(TypeError, match=r"must be a tensor of one shape; got a nested one"):
            call()


@pytest.mark.parametrize(
    ("module", "takes"),
    [
        (None, (None, None)),
        (nn.ReLU(), (None, None)),
        (nn.Sequential(), (None, None)),
        (nn.Linear(3, 5), (3, torch.float32)),
        (nn.Linear(3, 5).double(), (3, torch.float64)),
        (nn.Linear(3, 5).to(torch.float8_e5m2), (3, None)),
        (nn.LayerNorm((2, 3)), (3, None)),
        (nn.RMSNorm(3), (3, None)),
        (nn.GRUCell(4, 6), (4, torch.float32)),
        (nn.Sequential(nn.Sequential(nn.LayerNorm(7)), nn.Linear(7, 2)), (7, None)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_features_that_a_module_takes(module: nn.Module | None, takes: validation.Takes) -> None:
    assert validation.takes(module) == takes


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.float64, ", or .to(torch.float64) on the layer"), (torch.int64, "")], ids=str
)
def test_features_of_another_dtype_than_the_weights(dtype: torch.dtype, advice: str) -> None:
    x = torch.zeros(5, 3, dtype=dtype)
    sentence = f"x is {dtype} and the weights of the layer are torch.float32; call .to(torch.float32) on x{advice}"
    with pytest.raises(TypeError, match=rf"^{re.escape(sentence)}$"):
        validation.fits("the layer", "x", x, (3, torch.float32))
    validation.fits("the layer", "x", x, (3, None))
    validation.fits("the layer", "x", x, (None, dtype))
    with torch.autocast("cpu"):
        validation.fits("the layer", "x", x, (3, torch.float32))
    with pytest.raises(ValueError, match=re.escape("x is 3 wide (shape [5, 3]), but the layer was made for a width")):
        validation.fits("the layer", "x", x, (4, None))


class WithoutRoles(Dot):
    pass


def score_with(**roles: Role) -> Dot:
    score = WithoutRoles(Q, K, 1.0)
    score.__dict__["roles"] = roles
    return score


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (Dot, "got type: pass logits that are already computed as a bias for each edge"),
        (Round(GRAPH, V), "Round has no `logits`"),
        (ops.NodeBias(), "NodeBias has no `roles` and no `logits`"),
        (score_with(query=Role("parameter")), 'the role of query in WithoutRoles must be "dst", "src" or "edge"'),
        (score_with(query=Role("dst"), other=Role("edge")), "WithoutRoles has a role for 'other', and no field of"),
    ],
    ids=["class", "no logits", "neither", "role", "field"],
)
def test_what_is_no_score(score: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)):
        engine.run(Round(GRAPH, V, score))


CAUSAL = graphs.causal().bind(3)
RECURRENT = Round(CAUSAL, torch.zeros(3, 4, 6), Dot(Q, Q, 1.0), normalize="none", return_state=True)
GATES = {"log_gate": torch.zeros(3, 4, 2), "beta": torch.zeros(3, 4), "state": torch.zeros(4, 2, 6)}
ONLY = "log_gate, beta and states go with sums weighted by dot products alone"


def _require(given: Round, sentence: str | None) -> None:
    """The round is valid, or refused with this sentence."""
    if sentence is None:
        validation.round(given)
    else:
        with pytest.raises((ValueError, TypeError), match=rf"^{re.escape(sentence)}"):
            validation.round(given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        (GATES, None),
        ({"log_gate": torch.zeros(3, 4, 1)}, None),
        ({"log_gate": torch.zeros(3, 4)}, "log_gate must have shape [..., N, H, 1 or D]; got [3, 4]"),
        ({"log_gate": torch.zeros(3, 4, 3)}, "log_gate must have shape [3, 4, 1] or [3, 4, 2]; got [3, 4, 3]"),
        ({"beta": torch.zeros(3)}, "beta must have shape [..., N, H]; got [3]"),
        ({"beta": torch.zeros(3, 4, 1)}, "beta must have shape [3, 4]; got [3, 4, 1]"),
        ({"state": torch.zeros(2, 6)}, "state must have shape [..., H, D, D_v]; got [2, 6]"),
        ({"state": torch.zeros(4, 6, 2)}, "state must have shape [4, 2, 6]; got [4, 6, 2]"),
        ({"beta": torch.zeros(3, 4).long()}, "beta must be floating point; got torch.int64"),
        ({"state": torch.zeros(4, 2, 6, device="meta")}, "state is on meta and value on cpu; move one"),
        ({"return_weights": True}, "return_state cannot be combined with return_weights"),
        ({"return_weights": True, "return_state": False, **GATES}, None),
        ({"normalize": "softmax"}, ONLY),
        ({"reduce": Mean()}, ONLY),
        ({"bias": (torch.zeros(6, 4),)}, ONLY),
        ({"edge_value": torch.zeros(6, 4, 6)}, ONLY),
        ({"dropout": 0.5, "seed": torch.tensor(1)}, ONLY),
        ({"return_lse": True}, ONLY),
        ({"score": None}, ONLY),
        ({"score": Dot(Q, Q, 1.0, softcap=1.0)}, ONLY),
        ({"score": Dot(Q, Q, 1.0, torch.zeros(6, 4, 2))}, ONLY),
        ({"score": AdditiveScore(Q[..., 0], Q[..., 0], LeakyReLU())}, ONLY),
        ({"graph": graphs.complete().bind(3)}, "log_gate, beta and states need causal() or causal() & documents("),
        ({"graph": graphs.window(1).bind(3)}, "log_gate, beta and states need causal() or causal() & documents("),
        ({"graph": graphs.documents([2, 1]).bind(3)}, "log_gate, beta and states need causal()"),
        ({"graph": (graphs.causal() & graphs.documents([2, 1])).bind(3)}, None),
    ],
    ids=lambda x: x if isinstance(x, str) else ", ".join(x) if x else "",
)
def test_what_goes_with_recurrences(changes: dict[str, Any], sentence: str | None) -> None:
    given = RECURRENT.with_fields(**changes)
    _require(given, sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        ({"bias": (torch.zeros(4, 4),), "dropout": 0.5, "seed": torch.tensor(1)}, None),
        ({"score": None, "bias": (torch.zeros(4, 4),)}, None),
        ({"score": None}, "return_lse needs a sum weighted by a softmax, whose logits it adds up"),
        ({"normalize": "sigmoid"}, "return_lse needs a sum"),
        ({"normalize": "softmax_dst"}, "return_lse needs a sum"),
        ({"reduce": Mean()}, "return_lse needs a sum"),
        ({"mix_logits": torch.eye(4)}, "return_lse needs a sum"),
        ({"mix_weights": torch.eye(4)}, "return_lse needs a sum"),
        ({"return_weights": True}, "return_lse cannot be combined with return_weights"),
        ({"sinks": torch.zeros(4)}, "return_lse cannot be combined with sinks"),
    ],
    ids=lambda x: x if isinstance(x, str) else ", ".join(x) if x else "",
)
def test_what_goes_with_a_returned_lse(changes: dict[str, Any], sentence: str | None) -> None:
    given = Round(GRAPH, V, Dot(Q, K, 1.0), return_lse=True).with_fields(**changes)
    if sentence is None:
        validation.round(given)
    else:
        with pytest.raises(ValueError, match=rf"^{sentence}"):
            validation.round(given)


@pytest.mark.parametrize("name", ["mix_logits", "mix_weights"])
@pytest.mark.parametrize(
    ("changes", "mix", "fits"),
    [
        ({}, torch.eye(4), True),
        ({"score": None, "bias": (torch.zeros(4, 4),)}, torch.eye(4), True),
        ({"score": None}, torch.eye(4), False),
        ({}, torch.zeros(4, 3), False),
        ({}, torch.zeros(3, 4), False),
        ({}, torch.zeros(1, 4, 4), False),
    ],
)
def test_maps_of_heads(name: str, changes: dict[str, Any], mix: Tensor, fits: bool) -> None:
    given = Round(GRAPH, V, Dot(Q, K, 1.0)).with_fields(**changes, **{name: mix})
    with nullcontext() if fits else pytest.raises(ValueError, match=rf"{name} must be a map of the 4 heads of weighte"):
        validation.round(given)


@pytest.mark.parametrize(
    ("changes", "sinks", "sentence"),
    [
        ({}, torch.zeros(4), None),
        ({"score": None, "bias": (torch.zeros(4, 4),)}, torch.zeros(4), None),
        ({"score": None}, torch.zeros(4), "sinks are logits of a softmax"),
        ({"normalize": "softmax_dst"}, torch.zeros(4), "sinks are logits of a softmax"),
        ({}, torch.zeros(1), "sinks must have shape [4], a logit for each head; got [1]"),
        ({}, torch.zeros(4, 1), "sinks must have shape [4], a logit for each head; got [4, 1]"),
        ({}, torch.zeros(4).long(), "sinks must be floating point; got torch.int64"),
    ],
)
def test_sinks_of_heads(changes: dict[str, Any], sinks: Tensor, sentence: str | None) -> None:
    given = Round(GRAPH, V, Dot(Q, K, 1.0), sinks=sinks).with_fields(**changes)
    _require(given, sentence)


@pytest.mark.parametrize(
    ("p", "kind"),
    [(0, None), (0.0, None), (0.999, None), (1, ValueError), (-0.1, ValueError), (True, TypeError), ("0.1", TypeError)],
)
def test_rates(p: Any, kind: type[Exception] | None) -> None:
    if kind is None:
        assert validation.rate("rate", p) == p
    else:
        with pytest.raises(kind, match=r"^rate must "):
            validation.rate("rate", p)
    with pytest.raises(TypeError, match="rate must be a number"):
        validation.rate("rate", torch.tensor(0.1))
