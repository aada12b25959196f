"""The specification itself, against loops over single edges, heads and components in plain Python."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from mpnn import graphs, rng
from mpnn.aggregate import Max, Mean
from mpnn.backends import edge_list
from mpnn.edge_tables import BiasTable, EmbeddingTable, PerEdge
from mpnn.graph import Graph
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Score

HEADS, WIDTH, CLASSES = 4, 3, 5
BATCHES = [(), (2,), (2, 3)]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def explicit(num_dst: int = 4, num_src: int = 6) -> Graph:
    """Edges in no order, one of them twice, destination 2 without any."""
    edges = [(5, 3), (0, 0), (2, 1), (5, 0), (1, 3), (0, 0), (3, 1), (4, 3), (2, 0)]
    return graphs.from_edges(
        torch.tensor(edges).T,
        num_dst=num_dst,
        num_src=num_src,
        edge_type=torch.tensor([0, 4, 2, 1, 1, 3, 0, 2, 4]),
    )


GRAPHS = {
    "explicit, rectangular, repeated edges, an empty row": explicit(),
    "causal": graphs.causal().bind(5),
    "memory": graphs.memory(2).bind(3),
    "window, more sources": graphs.window(1).bind(5).rows(0, 3),
    "no edge": graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 4),
    "no node": graphs.complete().bind(0),
}


# ---------------------------------------------------------------------------------------- the loops


def by_hand(request: Round) -> tuple[Tensor, Tensor]:
    """The formula at the head of `mpnn/round.py`, written out."""
    graph = request.graph
    dst = graph.edge_index[1].tolist()
    out = torch.zeros(*request.batch, graph.num_dst, request.heads, request.value.shape[-1], dtype=torch.float64)
    weights = torch.zeros(*request.batch, graph.num_edges, request.heads, dtype=torch.float64)
    for stream, (*b, h) in enumerate(product(*map(range, request.batch), range(request.heads))):
        for i in range(graph.num_dst):
            edges = [e for e in range(graph.num_edges) if dst[e] == i]
            scores = [score(request, b, h, e) for e in edges]
            for e, weight in zip(edges, NORMALIZED[request.normalize](scores), strict=True):
                weights[(*b, e, h)] = weight
            messages = [message(request, b, h, e, weights[(*b, e, h)], stream) for e in edges]
            if messages:
                out[(*b, i, h)] = REDUCED[type(request.reduce).__name__](torch.stack(messages))
    return out, weights


def score(request: Round, b: list[int], h: int, e: int) -> float:
    j, i = request.graph.edge_index[:, e].tolist()
    total = sum(float(on_edge(bias, request, b, e)[shared(h, bias)]) for bias in request.bias)
    match request.score:
        case Dot(query, key, scale, edge_key, softcap):
            heads_of_key = key.shape[-2]
            k = key[(*b, j, h * heads_of_key // request.heads)]
            if edge_key is not None:
                k = k + on_edge(edge_key, request, b, e)[h]
            product_ = scale * float(query[(*b, i, h)] @ k)
            return total + (product_ if softcap is None else softcap * math.tanh(product_ / softcap))
        case AdditiveScore(dst, src, activation, edge):
            inner = dst[(*b, i, h)] + src[(*b, j, h)]
            inner = inner if edge is None else inner + on_edge(edge, request, b, e)[h]
            return total + float(activation(inner))
        case AdditiveV2Score(dst, src, vector, activation, edge):
            inner = dst[(*b, i, h)] + src[(*b, j, h)]
            inner = inner if edge is None else inner + on_edge(edge, request, b, e)[h]
            return total + float(vector[h] @ activation(inner))
    return total if request.bias else 1.0


def message(request: Round, b: list[int], h: int, e: int, weight: Tensor, stream: int) -> Tensor:
    j, i = request.graph.edge_index[:, e]
    value = request.value[(*b, j, h * request.value.shape[-2] // request.heads)]
    if request.edge_value is not None:
        value = value + on_edge(request.edge_value, request, b, e)[h]
    if request.dropout:
        kept = rng.keep(request.seed, torch.tensor(stream), i, j, request.dropout)
        weight = weight / (1 - request.dropout) if kept else torch.zeros_like(weight)
    return weight * value


def on_edge(data: PerEdge, request: Round, b: list[int], e: int) -> Tensor:
    """What a bias or an edge vector says of edge e: [H] or [H, D]."""
    graph = request.graph
    if isinstance(data, EmbeddingTable):
        if data.relation is None:
            return data.table[graph.edge_type[e]]
        j, i = graph.edge_index[:, e].tolist()
        clip = data.relation.clip
        return data.table[max(-clip, min(clip, j - (i + graph.shift))) + clip]
    return data[tuple(b)][e] if data.dim() > 2 and data.shape[: len(b)] == request.batch else data[e]


def shared(h: int, bias: PerEdge) -> int:
    width = bias.table.shape[-1] if isinstance(bias, EmbeddingTable) else bias.shape[-1]
    return 0 if width == 1 else h


def softmax(scores: list[float]) -> list[float]:
    exponentials = [math.exp(s - max(scores)) for s in scores]
    return [x / sum(exponentials) for x in exponentials]


NORMALIZED: dict[str, Callable[[list[float]], list[float]]] = {
    "softmax": softmax,
    "sigmoid": lambda scores: [1 / (1 + math.exp(-s)) for s in scores],
    "none": lambda scores: scores,
}
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "Sum": lambda rows: sum(rows[1:], rows[0]),
    "Mean": lambda rows: sum(rows[1:], rows[0]) / len(rows),
    "Max": lambda rows: torch.stack([max(column) for column in rows.T]),
}


def check(request: Round) -> None:
    out, weights = edge_list.run(replace(request, return_weights=True))
    expected_out, expected_weights = by_hand(request)
    assert out.shape == expected_out.shape
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(weights, expected_weights)
    alone, none = edge_list.run(request)
    assert none is None
    assert alone.equal(out), "asking for the weights changed the output"


# ---------------------------------------------------------------------------------------- what goes in


def dot(graph: Graph, batch: tuple[int, ...], kv_heads: int = HEADS, **more: object) -> Dot:
    query, key = rand(*batch, graph.num_dst, HEADS, WIDTH), rand(*batch, graph.num_src, kv_heads, WIDTH)
    return Dot(query, key, WIDTH**-0.5, **more)


def additive(graph: Graph, batch: tuple[int, ...], edge: Tensor | None = None) -> AdditiveScore:
    return AdditiveScore(rand(*batch, graph.num_dst, HEADS), rand(*batch, graph.num_src, HEADS), LeakyReLU(), edge)


def additive_v2(graph: Graph, batch: tuple[int, ...], edge: Tensor | None = None) -> AdditiveV2Score:
    dst, src = rand(*batch, graph.num_dst, HEADS, WIDTH), rand(*batch, graph.num_src, HEADS, WIDTH)
    return AdditiveV2Score(dst, src, rand(HEADS, WIDTH), torch.tanh, edge)


def value(graph: Graph, batch: tuple[int, ...] = (), heads: int = HEADS) -> Tensor:
    return rand(*batch, graph.num_src, heads, WIDTH)


SCORES: dict[str, Callable[..., Score]] = {"dot": dot, "additive": additive, "additive v2": additive_v2}


# ---------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_graph_and_batch(graph: Graph, batch: tuple[int, ...]) -> None:
    check(Round(graph, value(graph, batch), dot(graph, batch)))


@pytest.mark.parametrize("normalize", NORMALIZED)
@pytest.mark.parametrize("make", SCORES.values(), ids=SCORES)
def test_every_score_under_every_normalizer(make: Callable[..., Score], normalize: str) -> None:
    graph = explicit()
    check(Round(graph, value(graph, (2,)), make(graph, (2,)), normalize=normalize))


BIASES: dict[str, Callable[[Graph], tuple[PerEdge, ...]]] = {
    "per edge and head": lambda g: (rand(g.num_edges, HEADS),),
    "per edge": lambda g: (rand(g.num_edges, 1),),
    "per batch, edge and head": lambda g: (rand(2, g.num_edges, HEADS),),
    "by rule": lambda g: (BiasTable(rand(5, HEADS), Offset(2)),),
    "by rule, one for all heads": lambda g: (BiasTable(rand(5, 1), Offset(2)),),
    "several": lambda g: (rand(g.num_edges, 1), BiasTable(rand(3, HEADS), Offset(1))),
}


@pytest.mark.parametrize("scored", [True, False], ids=["scored", "bias alone"])
@pytest.mark.parametrize("normalize", NORMALIZED)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("graph", [explicit(), graphs.memory(2).bind(3)], ids=["explicit", "memory"])
def test_every_bias(graph: Graph, bias: Callable[[Graph], tuple[PerEdge, ...]], normalize: str, scored: bool) -> None:
    score = dot(graph, (2,)) if scored else None
    check(Round(graph, value(graph, (2,)), score, bias(graph), normalize=normalize))


def test_bias_by_edge_type() -> None:
    graph = explicit()
    check(Round(graph, value(graph), dot(graph, ()), (BiasTable(rand(CLASSES, HEADS)),)))


def test_bias_by_edge_type_of_a_relation() -> None:
    graph = graphs.causal().with_relation(Offset(1)).bind(4)
    check(Round(graph, value(graph), dot(graph, ()), (BiasTable(rand(3, HEADS)),)))


def test_bias_with_a_table_but_no_classes_says_what_to_do() -> None:
    graph = graphs.causal().bind(4)
    with pytest.raises(ValueError, match=r"needs a graph with edge types.*edge_type"):
        edge_list.run(Round(graph, value(graph), dot(graph, ()), (BiasTable(rand(3, HEADS)),)))


@pytest.mark.parametrize("by", ["edge", "rule", "edge_type"])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_vectors_on_edges(where: str, by: str) -> None:
    graph = explicit()
    vectors: PerEdge = {
        "edge": rand(graph.num_edges, HEADS, WIDTH),
        "rule": EmbeddingTable(rand(5, HEADS, WIDTH), Offset(2)),
        "edge_type": EmbeddingTable(rand(CLASSES, HEADS, WIDTH)),
    }[by]
    score = dot(graph, (2,), edge_key=None if where == "value" else vectors)
    check(Round(graph, value(graph, (2,)), score, edge_value=None if where == "key" else vectors))


@pytest.mark.parametrize(("make", "shape"), [(additive, (9, HEADS)), (additive_v2, (9, HEADS, WIDTH))])
def test_edge_features_in_additive_scores(make: Callable[..., Score], shape: tuple[int, ...]) -> None:
    graph = explicit()
    check(Round(graph, value(graph, (2,)), make(graph, (2,), edge=rand(*shape))))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_share_keys_and_values(kv_heads: int) -> None:
    graph = explicit()
    check(Round(graph, value(graph, (2,), kv_heads), dot(graph, (2,), kv_heads)))


def test_softcap() -> None:
    graph = explicit()
    check(Round(graph, value(graph), dot(graph, (), softcap=0.5)))


def test_without_score_every_weight_is_one() -> None:
    graph = explicit()
    check(Round(graph, value(graph, (2,)), normalize="none"))


@pytest.mark.parametrize("reduce", [Mean(), Max()], ids=["mean", "max"])
def test_weighted_messages_are_reduced(reduce: Mean | Max) -> None:
    graph = explicit()
    check(Round(graph, value(graph, (2,)), dot(graph, (2,)), reduce=reduce))


@pytest.mark.parametrize("scored", [True, False], ids=["scored", "bias alone"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_dropout_follows_the_hash(batch: tuple[int, ...], scored: bool) -> None:
    graph = explicit()
    score = dot(graph, batch) if scored else None
    bias = () if scored else (rand(graph.num_edges, 1),)
    seed = torch.tensor(2**61 + 12345)
    check(Round(graph, value(graph, batch), score, bias, dropout=0.4, seed=seed))


def test_a_row_whose_biases_are_all_minus_infinity_weighs_nothing() -> None:
    graph = graphs.complete().bind(3)
    bias = torch.zeros(9, HEADS, dtype=torch.float64)
    bias[3:6] = -torch.inf
    query = rand(3, HEADS, WIDTH).requires_grad_()
    out, _ = edge_list.run(Round(graph, value(graph), Dot(query, rand(3, HEADS, WIDTH), 1.0), (bias,)))
    assert out[1].eq(0).all()
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert grad[1].eq(0).all()
    assert grad.isfinite().all()
