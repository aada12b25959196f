"""What many edges share gets the sum of their gradients: in float32 at least, and in the same order every time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpnn import graphs, ops
from mpnn.edge_tables import BiasTable
from mpnn.engine import dispatch
from mpnn.graph import Graph
from mpnn.graph.relations import Offset, Relation
from mpnn.position import T5
from mpnn.round import Round
from mpnn.scores import Dot

BIASED = ["edge_list", "tiles"]


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
    out, _ = dispatch.run(given, backend)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return list(torch.autograd.grad(out, [b.table for b in given.bias], cotangent))


@pytest.mark.parametrize("backend", BIASED)
@pytest.mark.parametrize("relation", [Offset(1), Parity()], ids=["by offset", "by another rule"])
@pytest.mark.parametrize("placed", [False, True], ids=["", "placed"])
def test_a_table_in_16_bits_gets_the_sum_that_float64_gives(relation: Relation, placed: bool, backend: str) -> None:
    graph = graphs.causal().bind(500)
    if placed:
        graph = graph.with_positions(*graph.node_positions())
    tables = [torch.zeros(relation.count, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
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


def softmax(graph: Graph) -> Callable[[], Tensor]:
    bias = torch.zeros(3, 8, requires_grad=True)
    value = torch.randn(graph.num_src, 8, 4, generator=torch.Generator().manual_seed(1))
    given = Round(graph, value, bias=(BiasTable(bias, Offset(1)),))
    return lambda: torch.autograd.grad(dispatch.run(given, "edge_list")[0].square().sum(), bias)[0]


def variance(graph: Graph) -> Callable[[], Tensor]:
    x = torch.randn(graph.num_src, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return lambda: torch.autograd.grad(ops.aggregate(graph, x, "var", backend="edge_list").exp().sum(), x)[0]


@pytest.mark.parametrize("gradient", [softmax, variance])
def test_the_specification_gives_the_same_bits_on_any_number_of_threads(
    gradient: Callable[[Graph], Callable[[], Tensor]],
) -> None:
    """Torch's gradient of `x[index]` does not: threads add to a row as they come."""
    graph, threads = graphs.causal().bind(300), torch.get_num_threads()
    again = gradient(graph.with_positions(*graph.node_positions()))
    torch.set_num_threads(1)
    try:
        first = again()
        torch.set_num_threads(2)
        assert all(again().equal(first) for _ in range(5))
    finally:
        torch.set_num_threads(threads)
