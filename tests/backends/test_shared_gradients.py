"""What many edges share gets the sum of their gradients: in float32 at least, and in the same order every time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from threads import same_bits
from torch import Tensor

from mpnn import engine, graphs, ops
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset, Relation
from mpnn.position import T5
from mpnn.round import Round
from mpnn.scores import Dot


class Parity(Relation):
    """Classes that no offset tells."""

    count = 2

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (dst + src) % 2


def request(graph: Graph, dtype: torch.dtype, *tables: BiasTable) -> Round:
    """Scores of zero, so that all weights of a row are alike before biases."""
    nodes = torch.zeros(graph.num_src, 1, 8, dtype=dtype)
    value = torch.randn(graph.num_src, 1, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Round(graph, value, Dot(nodes, nodes, 1.0), bias=tables)


def gradients(given: Round, backend: str) -> list[Tensor]:
    out, _ = engine.run(given, backend)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return list(torch.autograd.grad(out, [b.table for b in given.bias], cotangent))


def by_data(graph: Graph) -> Graph:
    """The same edges as a list, each with the type that `Parity` gives it."""
    src, dst = graph.edge_index
    return graphs.from_edges(torch.stack([src, dst]), graph.num_dst, edge_type=(src + dst) % 2)


KINDS: dict[str, tuple[Relation | None, Callable[[Graph], Graph]]] = {
    "by offset": (Offset(1), lambda graph: graph),
    "by another rule": (Parity(), lambda graph: graph),
    "by offset, placed": (Offset(1), lambda graph: graph.with_positions(*graph.node_positions())),
    "by another rule, placed": (Parity(), lambda graph: graph.with_positions(*graph.node_positions())),
    "by data": (None, by_data),
}


@pytest.mark.parametrize("backend", ["edge_list", "tiles", "dense"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering
def test_a_table_in_16_bits_gets_the_sum_that_float64_gives(kind: str, backend: str) -> None:
    relation, change = KINDS[kind]
    if backend == "tiles" and kind == "by data":
        pytest.skip("tiles are for structured graphs")
    graph, count = change(graphs.causal().bind(500)), 2 if relation is None else relation.count
    tables = [torch.zeros(count, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    narrow = request(graph, torch.bfloat16, *(BiasTable(t, relation) for t in tables))
    wide = [t.detach().double().requires_grad_() for t in tables]
    exact = request(graph, torch.bfloat16, *(BiasTable(t, relation) for t in wide))
    exact = replace(exact, value=exact.value.double(), score=Dot(*[exact.score.query.double()] * 2, 1.0))
    for found, wanted in zip(gradients(narrow, backend), gradients(exact, "edge_list"), strict=True):
        # the sum is rounded once; float32 sums of 125,250 edges, weighed 1 / degree, are off by far less
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2**-8 * float(wanted.abs().max()))


def test_a_bucket_of_t5_in_16_bits_gets_the_sum_of_all_offsets_in_it() -> None:
    position, graph = T5(1).bfloat16(), graphs.complete().bind(2048)
    table = position.bias(graph).table
    (found,) = torch.autograd.grad(table, position.table, torch.ones_like(table))
    buckets = position.bucket(torch.arange(len(table)) - 2047)
    assert found[:, 0].equal(buckets.bincount(minlength=32).bfloat16())


def softmax(graph: Graph) -> Callable[[], list[Tensor]]:
    bias = torch.zeros(3, 8, requires_grad=True)
    value = torch.randn(graph.num_src, 8, 4, generator=torch.Generator().manual_seed(1))
    given = Round(graph, value, bias=(BiasTable(bias, Offset(1)),))
    return lambda: list(torch.autograd.grad(engine.run(given, "edge_list")[0].square().sum(), bias))


def variance(graph: Graph) -> Callable[[], list[Tensor]]:
    x = torch.randn(graph.num_src, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return lambda: list(torch.autograd.grad(ops.aggregate(graph, x, "var", backend="edge_list").exp().sum(), x))


def dense_by_rule(graph: Graph) -> Callable[[], list[Tensor]]:
    given = request(graph, torch.float32, BiasTable(torch.zeros(2, 1, requires_grad=True), Parity()))
    return lambda: gradients(given, "dense")


def dense_by_data(graph: Graph) -> Callable[[], list[Tensor]]:
    given = request(by_data(graph), torch.float32, BiasTable(torch.zeros(2, 1, requires_grad=True)))
    return lambda: gradients(given, "dense")


@pytest.mark.parametrize("make", [softmax, variance, dense_by_rule, dense_by_data])
def test_gradients_have_the_same_bits_on_any_number_of_threads(make: Callable[[Graph], Callable[[], Any]]) -> None:
    """Torch's gradient of `x[index]` has not: threads add to a row as they come."""
    graph = graphs.causal().bind(300)
    assert same_bits(make(graph.with_positions(*graph.node_positions())), 1, *[2] * 5)
