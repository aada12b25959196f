"""The references of kernels: results and derivatives to the second order are those of the specification, also where
heads share keys, with features narrower and wider than there are heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import graphs
from mpnn.aggregate import Max, Mean, Sum, Var
from mpnn.backends import edge_list, reference
from mpnn.graph import Graph
from mpnn.graph.edge_tables import EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import AdditiveScore, Dot, LeakyReLU

NODES, SOURCES = 3, 4
LISTED = graphs.from_edges([[0, 2, 2, 1, 3, 0], [1, 1, 0, 1, 0, 1]], num_dst=NODES, num_src=SOURCES)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def request(graph: Graph, batch: tuple[int, ...], heads: int, key_heads: int, width: int, **fields: Any) -> Round:
    query = leaf(*batch, graph.num_dst, heads, width)
    key, value = leaf(*batch, graph.num_src, key_heads, width), leaf(*batch, graph.num_src, key_heads, width + 1)
    return Round(graph, value, Dot(query, key, 0.7)).with_fields(**fields)


def assert_same(given: Round) -> None:
    leaves = [x for x in given.tensors if x.requires_grad]
    found = []
    for run in (reference.run, edge_list.run):
        out = run(given).out
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum(x.cos().sum() for x in first), leaves, materialize_grads=True)
        found.append([out, *first, *second])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("batch", [(), (5,), (1, 2)], ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("width", [1, 3, 4, 8])
def test_heads_and_widths(batch: tuple[int, ...], heads: int, key_heads: int, width: int) -> None:
    assert_same(request(LISTED, batch, heads, key_heads, width))


@pytest.mark.parametrize("reduce", [Sum(), Var(), Mean(), Max()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("graph", [LISTED, graphs.window(1).bind(4), graphs.from_edges([[], []], 3)], ids=str)
def test_aggregators_and_graphs(reduce: Any, graph: Graph) -> None:
    given = request(graph, (2,), 4, 2, 3, reduce=reduce)
    assert_same(given)
    assert_same(given.with_fields(score=None, normalize="none"))
    assert_same(given.with_fields(score=None, normalize="none", bias=(leaf(graph.num_edges, 2),)))


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_scores_and_terms(batch: tuple[int, ...]) -> None:
    given = request(LISTED, batch, 4, 2, 3)
    score: Any = given.score
    edges = LISTED.num_edges
    of_heads = AdditiveScore(leaf(*batch, NODES, 4), leaf(*batch, SOURCES, 4), LeakyReLU())
    for other in (
        Dot(score.query, score.key, 0.7, softcap=0.5),
        Dot(score.query, score.key, 0.7, EmbeddingTable(leaf(3, 4, 3), Offset(1))),
        Dot(score.query, score.key, 0.7, leaf(edges, 1, 3)),
        of_heads,
    ):
        assert_same(given.with_fields(score=other))
    for fields in (
        {"normalize": "sigmoid"},
        {"normalize": "none"},
        {"bias": (leaf(edges, 1), leaf(*batch, edges, 4))},
        {"dst_bias": leaf(*batch, NODES, 4), "src_bias": leaf(*batch, SOURCES, 1)},
        {"edge_value": leaf(edges, 1, 4)},
        {"sinks": leaf(4)},
    ):
        assert_same(given.with_fields(**fields))


def test_forms_hold_no_tensor_but_the_seed() -> None:
    given = request(LISTED, (), 4, 2, 3, bias=(leaf(6, 4),), dropout=0.5, seed=torch.tensor(1), sinks=leaf(4))
    score: Any = given.score
    form: Any = reference.form(given)
    held = [x for x in (*vars(form).values(), *vars(form.score).values()) if isinstance(x, (Tensor, tuple))]
    assert held == [given.seed]
    assert form.graph is LISTED
    assert form.score.scale == 0.7
    fields = {"value": given.value, "bias": given.bias, "sinks": given.sinks}
    again = reference.filled(form, {"query": score.query, "key": score.key}, **fields)
    torch.testing.assert_close(reference.run(again).out, reference.run(given).out)
    assert reference.filled(form, {}, bias=(None, given.bias[0])).bias == given.bias
    plain = Round(LISTED, given.value, normalize="none")
    assert reference.filled(reference.form(plain), {}, value=given.value).score is None
