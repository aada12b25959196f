"""The dense backend where torch's kernels, or its indexing, would give something else if left to themselves."""

import pytest
import torch

from mpnn import graphs
from mpnn.backends import dense
from mpnn.edge_tables import BiasTable
from mpnn.engine import dispatch
from mpnn.engine.plan import refusal as why_not
from mpnn.graph import Graph
from mpnn.graph.relations import Relation
from mpnn.round import Round
from mpnn.scores import Dot


class Parity(Relation):
    """Classes that no offset tells."""

    count = 2

    def ids(self, dst, src):
        return (dst + src) % 2


def run(request, backend):
    return dispatch.run(request, backend)[0]


@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal(), graphs.window(1)], ids=str)
@pytest.mark.parametrize(
    "heads", [(6, 2), (2, 6), (1, 6), (3, 2)], ids=lambda heads: "keys {}, values {}".format(*heads)
)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_keys_and_values_may_be_shared_by_different_numbers_of_heads(topology, heads, biased):
    graph, shapes = topology.bind(5), [(5, h, 4) for h in (6, *heads)]
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bias = (torch.randn(graph.num_edges, 6, dtype=torch.float64),) if biased else ()
    request = Round(graph, given[2], Dot(given[0], given[1], 0.5), bias=bias)
    found, expected = (run(request, backend) for backend in ("dense", "edge_list"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), given) for x in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def by_rule() -> tuple[Graph, Relation | None]:
    return graphs.causal().bind(300), Parity()


def by_type() -> tuple[Graph, Relation | None]:
    src, dst = graphs.causal().bind(300).edge_index
    return graphs.from_edges(torch.stack([src, dst]), 300, edge_type=(src + dst) % 2), None


def gradient(graph, relation, dtype, backend):
    """Of a table in this type. Scores are zero; values and cotangents are 1 for even nodes and -1 for odd ones, so
    that every edge of a class adds to its gradient, all with one sign and a product that no type rounds."""
    nodes, table = torch.zeros(300, 1, 8, dtype=dtype), torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    signs = (1 - 2 * (torch.arange(300) % 2)).to(dtype)[:, None, None].expand(300, 1, 8).contiguous()
    request = Round(graph, signs, Dot(nodes, nodes, 1.0), bias=(BiasTable(table, relation),))
    return torch.autograd.grad(run(request, backend), table, signs)[0]


@pytest.mark.parametrize("biased", [by_rule, by_type])
def test_a_table_in_16_bits_gets_the_sum_that_float64_gives(biased):
    graph, relation = biased()
    found = gradient(graph, relation, torch.bfloat16, "dense").double()
    wanted = gradient(graph, relation, torch.float64, "edge_list")
    # rounded once, by 2^-9; float32 sums of 45,150 summands of one sign are off by less than as much again
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("biased", [by_rule, by_type])
def test_a_table_gets_the_same_bits_on_any_number_of_threads(biased):
    """Torch's gradient of `table[index]` does not give them: threads add to a row as they come."""
    (graph, relation), threads = biased(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = gradient(graph, relation, torch.float32, "dense")
        torch.set_num_threads(2)
        assert all(gradient(graph, relation, torch.float32, "dense").equal(first) for _ in range(5))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_turn_scores_round_hold_under_a_mask_too(scale):
    for topology in (graphs.causal(), graphs.window(1), graphs.documents([2, 3])):
        graph = topology.bind(5)
        query, key, value = (torch.randn(2, 5, 2, 4, dtype=torch.float64) for _ in range(3))
        request = Round(graph, value, Dot(query, key, scale))
        assert why_not(dense, request) is None
        torch.testing.assert_close(run(request, "dense"), run(request, "edge_list"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "nodes", "sources"), [((), 0, 3), ((0,), 2, 3), ((), 2, 0)])
def test_a_bias_gets_its_gradient_where_there_is_no_pair(batch, nodes, sources):
    graph = graphs.complete().bind(nodes, sources)
    bias = torch.zeros(graph.num_edges, 1, requires_grad=True)
    source = torch.ones(*batch, sources, 1, 2)
    out = run(Round(graph, source, Dot(torch.ones(*batch, nodes, 1, 2), source, 1.0), (bias,)), "dense")
    out.sum().backward()
    assert bias.grad is not None
    assert not bias.grad.any()
