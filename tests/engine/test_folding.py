"""Rounds over graphs that differ by item and head: each backend against a formula over matrices, in float64."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, engine, explain, graphs, ops
from mpnn.aggregate import Mean
from mpnn.attention import Additive, AdditiveV2, DotProduct
from mpnn.decoding.cache import KVCache
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.graph.stacked import StackedGraph
from mpnn.ops import NodeBias
from mpnn.position import ALiBi
from mpnn.round import Round
from mpnn.scores import Dot, Role

B, N, H, D = 3, 10, 4, 8
BACKENDS = ["auto", "edge_list", "dense", "csr", "tiles"]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def formula(
    pairs: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Softmax attention over pairs, bool [B or 1, heads, N, M], written out; and its lse."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    pairs = pairs.repeat_interleave(query.shape[2] // pairs.shape[1], 1)
    logits = torch.einsum("bihd,bjhd->bhij", query, key) / query.shape[-1] ** 0.5 + bias
    logits = logits.masked_fill(~pairs, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, value), lse.mT


def graph_of(items: int, heads: int) -> StackedGraph:
    graph = graphs.chosen(torch.randint(-1, N, (items, heads, N, 4)), N) & graphs.causal()
    assert isinstance(graph, StackedGraph)
    return graph


def assert_same(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    weight = torch.randn_like(expected)
    pairs = [torch.autograd.grad(x, inputs, weight) for x in (found, expected)]
    for one, two in ((found, expected), *zip(*pairs, strict=True)):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("items", "heads", "key_heads"), [(3, 1, 2), (3, 2, 2), (3, 4, 2), (3, 2, 4), (1, 4, 4), (1, 4, 1)]
)
@pytest.mark.covering(times=2)
def test_items_and_groups_of_heads_attend_over_their_own_graphs(
    backend: str, items: int, heads: int, key_heads: int
) -> None:
    graph = graph_of(items, heads)
    query, key, value = leaf(B, N, H, D), leaf(B, N, key_heads, D), leaf(B, N, key_heads, D)
    expected = formula(graph.dense(), query, key, value)
    assert_same(ops.attend(graph, query, key, value, backend=backend), expected[0], (query, key, value))
    if backend != "dense":
        out, lse = ops.attend(graph, query, key, value, backend=backend, return_lse=True)
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(lse, expected[1])


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("backend", ["auto", "edge_list", "csr"])
def test_sinks_softcap_and_tables_by_offset(backend: str, heads: int) -> None:
    graph = graph_of(B, heads) & graphs.causal().bind(N)
    inputs = query, key, value, sinks, numbers = (
        leaf(B, N, H, D),
        leaf(B, N, H, D),
        leaf(B, N, H, D),
        leaf(H),
        leaf(5, H),
    )
    rule = Offset(2)
    table = BiasTable(numbers, rule)
    found = ops.attend(graph, query, key, value, sinks=sinks, bias=table, backend=backend)
    i = torch.arange(N)
    bias = numbers[rule.ids(i[:, None], i)].movedim(-1, 0)
    out, lse = formula(graph.dense(), query, key, value, bias)
    share = (lse - sinks).sigmoid()[..., None]
    assert_same(found, out * share, inputs)
    capped = ops.attend(graph, query, key, value, softcap=1.5, backend=backend)
    assert not torch.allclose(capped, formula(graph.dense(), query, key, value)[0])
    torch.testing.assert_close(capped, ops.attend(graph, query, key, value, softcap=1.5, backend="edge_list"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("items", "heads"), [(B, 2), (1, H), (B, 1)])
def test_biases_of_nodes(backend: str, items: int, heads: int) -> None:
    """Of each head, and of all heads."""
    graph = graph_of(items, heads)
    inputs = query, key, value = leaf(B, N, H, D), leaf(B, N, 2, D), leaf(B, N, 2, D)
    inputs = query, key, value = (query, leaf(B, N, H, D), leaf(B, N, H, D)) if heads == H else inputs
    for dst, src in ((leaf(B, N, H), leaf(B, N, H)), (leaf(B, N, 1), None), (None, leaf(B, N, 1))):
        bias, given = torch.zeros(B, H, N, N, dtype=torch.float64), [x for x in (dst, src) if x is not None]
        for x, at in ((dst, -1), (src, -2)):
            bias = bias if x is None else bias + x.expand(B, N, H).mT.unsqueeze(at)
        found = ops.attend(graph, query, key, value, bias=NodeBias(dst, src), backend=backend)
        expected = formula(graph.dense(), query, key, value, bias)[0]
        assert_same(found, expected, (*inputs, *given))


def test_shared_keys_do_not_take_biases_of_sources_for_each_head() -> None:
    query, key = leaf(B, N, H, D), leaf(B, N, 1, D)
    with pytest.raises(ValueError, match=r"keys, values and biases have \[1, 4\] heads"):
        ops.attend(graph_of(B, H), query, key, key, bias=NodeBias(src=leaf(B, N, H)))


def test_tables_know_the_positions_of_nodes() -> None:
    at = torch.arange(N) * 3
    graph = graph_of(B, 2) & graphs.causal().bind(N).with_positions(at, at)
    query, key, value, numbers = leaf(B, N, H, D), leaf(B, N, H, D), leaf(B, N, H, D), leaf(13, 1)
    found = ops.attend(graph, query, key, value, bias=BiasTable(numbers, Offset(6)))
    bias = numbers[Offset(6).ids(at[:, None], at)].movedim(-1, 0)
    assert_same(found, formula(graph.dense(), query, key, value, bias)[0], (query, key, value, numbers))


def test_vectors_of_edges_by_rule() -> None:
    graph, rule = graph_of(1, H), Offset(2)
    query, key, value, vectors = leaf(B, N, H, D), leaf(B, N, H, D), leaf(B, N, H, D), leaf(5, H, D)
    round = Round(graph, value, Dot(query, key, 0.5, EmbeddingTable(vectors, rule)))
    for head in range(H):
        cut = {"query": query[:, :, [head]], "key": key[:, :, [head]]}
        one = Dot(**cut, scale=0.5, edge_key=EmbeddingTable(vectors[:, [head]], rule))
        alone = engine.run(Round(graph.entry(0, head), value[:, :, [head]], one))[0]
        torch.testing.assert_close(engine.run(round)[0][:, :, [head]], alone)


@pytest.mark.parametrize("backend", ["dense", "csr", "tiles"])
def test_dropout_drops_the_same_edges_on_every_backend(backend: str) -> None:
    graph = graph_of(B, H)
    query, key, value = leaf(B, N, H, D), leaf(B, N, H, D), leaf(B, N, H, D)
    round = Round(graph, value, Dot(query, key, 0.3), dropout=0.4, seed=torch.tensor(5))
    expected = engine.run(round, "edge_list")[0]
    assert_same(engine.run(round, backend)[0], expected, (query, key, value))
    assert not torch.allclose(engine.run(replace(round, seed=torch.tensor(6)), backend)[0], expected)


@pytest.mark.parametrize("attention", [Additive(8, 8, 4), DotProduct(8, 4, kv_heads=2, position=ALiBi(4))])
def test_layers_take_a_graph_for_each_item_and_head(attention: Any) -> None:
    layer, x, graph = MessagePassing(None, "sum", None, attention), torch.randn(B, N, 8), graph_of(B, 1)
    expected = torch.stack([layer(x[b], graph.entry(b)) for b in range(B)])
    torch.testing.assert_close(layer(x, graph), expected)
    by_head = graph_of(1, 4)
    outs = [MessagePassing(by_head.entry(0, h), "sum", None, attention).rounds(x)[0] for h in range(4)]
    found = engine.run(layer.rounds(x, by_head)[0])[0]
    torch.testing.assert_close(found, torch.stack([engine.run(outs[h])[0][:, :, h] for h in range(4)], 2))


def test_aggregation_takes_a_graph_for_each_item() -> None:
    graph, x = graph_of(B, 1), leaf(B, N, D)
    pairs = graph.dense()[:, 0].double()
    assert_same(ops.aggregate(graph, x), pairs @ x, (x,))
    assert_same(ops.aggregate(graph, x, Mean()), pairs @ x / pairs.sum(-1, keepdim=True).clamp(min=1), (x,))


@pytest.mark.slow
def test_a_compiled_layer_takes_another_choice_in_each_call() -> None:
    layer = MessagePassing(None, "sum", None, DotProduct(8, 4))
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), torch.randn(B, N, 8)
    for _ in range(2):
        graph = graph_of(B, 4)
        torch.testing.assert_close(compiled(x, graph), layer(x, graph))


def test_explain_shows_the_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    explain(MessagePassing(None, "sum", None, DotProduct(8, 4)), torch.randn(B, N, 8), graph_of(B, 4))
    assert "StackedGraph(3 x 4 graphs of 10 x 10, " in capsys.readouterr().out


@dataclass
class Weighed:
    """A score of edges alone, which no need describes."""

    weight: Tensor
    roles: ClassVar = {"weight": Role("edge", vectors=False)}

    def logits(self, weight: Tensor) -> Tensor:
        return weight


def refused(graph: StackedGraph, **options: Any) -> Any:
    x = torch.randn(B, N, H, D)
    return ops.attend(graph, x, x, x, **options)


def test_what_does_not_fold_is_refused_with_a_sentence() -> None:
    graph, x = graph_of(B, H), torch.randn(B, N, 8)
    for options in ({"bias": torch.zeros(graph.num_edges, H)}, {"return_weights": True}):
        with pytest.raises(ValueError, match="no common list of edges"):
            refused(graph, **options)
    with pytest.raises(ValueError, match="no common list of edges"):
        engine.run(Round(graph, leaf(B, N, H, D), Weighed(torch.zeros(graph.num_edges, H).double())))
    with pytest.raises(ValueError, match="can run this: it does not compute recurrences"):
        refused(graph, normalize="none", beta=torch.ones(B, N, H))
    with pytest.raises(ValueError, match=r"features of a batch of 2; got \[3, 10, 4, 8\]"):
        refused(graph_of(2, H))
    with pytest.raises(ValueError, match="graphs for 3 heads, which do not divide 4"):
        refused(graph_of(B, 3))
    with pytest.raises(ValueError, match="vector belongs to all heads"):
        MessagePassing(graph, "sum", None, AdditiveV2(8, 8, 4))(x)
    with pytest.raises(AttributeError, match="not known of graphs that differ"):
        MessagePassing(graph, "sum", None, DotProduct(8, 4))(x, cache=KVCache(N))
