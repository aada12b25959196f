"""Calls of the dense backend like one that was made before: they go straight to torch's kernel, and give what the
specification gives."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from mpnn import graphs, ops
from mpnn.backends import dense
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import Dot


def features(*shape, nodes=(5, 5), heads=(4, 4), grad=False):
    sizes = (nodes[0], heads[0]), (nodes[1], heads[1]), (nodes[1], heads[1])
    return [torch.randn(*shape, n, h, 8, dtype=torch.float64, requires_grad=grad) for n, h in sizes]


def attend_twice(graph, *given, **options):
    ops.attend(graph, *given, backend="dense", **options)
    return ops.attend(graph, *given, backend="dense", **options)


@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal(), graphs.window(1)], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0, 0.0, -0.5])
@pytest.mark.covering
def test_the_second_call_gives_what_the_specification_gives(topology, shape, heads, scale):
    graph, given = topology.bind(5), features(*shape, heads=heads, grad=True)
    found = attend_twice(graph, *given, scale=scale)
    expected = ops.attend(graph, *given, scale=scale, backend="edge_list")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(expected)
    for got, wanted in zip(*(torch.autograd.grad(x, given, cotangent) for x in (found, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_only_plain_attention_goes_straight():
    """The direct way saves the backend's own work, so that only what it reads may differ from a plain round."""
    complete, window, (query, key, value) = graphs.complete().bind(5), graphs.window(1).bind(5), features()
    bias = torch.zeros(25, 4, dtype=torch.float64)
    for scale in (0.5, 2.0):
        assert dense.bind(Round(complete, value, Dot(query, key, scale))) is not dense.run
    for graph, options in (
        (window, {}),
        (complete, {"bias": (bias,)}),
        (complete, {"dropout": 0.1}),
        (complete, {"normalize": "sigmoid"}),
        (complete, {"return_weights": True}),
    ):
        assert dense.bind(Round(graph, value, Dot(query, key, 1.0), **options)) is dense.run


@pytest.mark.parametrize("nodes", [(5, 5), (7, 4)], ids=str)
@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal()], ids=str)
def test_listed_edges_go_straight_if_they_are_those_of_a_topology(topology, nodes):
    edges = topology.bind(*nodes).edge_index
    query, key, value = features(nodes=nodes)
    for number, straight in ((len(edges[0]), True), (len(edges[0]) - 1, False)):
        graph = graphs.from_edges(edges[:, :number], num_dst=nodes[0], num_src=nodes[1])
        assert (dense.bind(Round(graph, value, Dot(query, key, 1.0))) is not dense.run) == straight


def test_calls_of_another_form_are_checked_anew():
    graph, (query, key, value) = graphs.complete().bind(5), features()
    attend_twice(graph, query, key, value)
    with pytest.raises(ValueError, match="value has 4 nodes"):
        ops.attend(graph, query, key, value[:4], backend="dense")
    with pytest.raises(TypeError, match="must have one dtype"):
        ops.attend(graph, query.float(), key, value, backend="dense")
    with pytest.raises(ValueError, match="no backend 'sparse'"):
        ops.attend(graph, query, key, value, backend="sparse")


def test_autocast_ends_here_too():
    graph, given = graphs.complete().bind(5), [x.float() for x in features()]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.scaled_dot_product_attention(*(x[None] for x in given)).dtype == torch.bfloat16
        inside = attend_twice(graph, *given)
    assert torch.equal(inside, attend_twice(graph, *given))


@pytest.mark.parametrize(("batch", "nodes", "sources"), [((), 0, 3), ((0,), 2, 3), ((), 2, 0)])
def test_a_bias_gets_its_gradient_where_there_is_no_pair(batch, nodes, sources):
    graph = graphs.complete().bind(nodes, sources)
    bias = torch.zeros(graph.num_edges, 1, requires_grad=True)
    source = torch.ones(*batch, sources, 1, 2)
    ops.attend(graph, torch.ones(*batch, nodes, 1, 2), source, source, bias=bias, backend="dense").sum().backward()
    assert bias.grad is not None
    assert not bias.grad.any()


def test_pairs_are_written_out_in_transforms_only(monkeypatch):
    """Under vmap torch's kernel would run entry by entry."""
    kernel = Mock(side_effect=dense.F.scaled_dot_product_attention)
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", kernel)
    query, key, value = (torch.randn(3, 2, 4, 5, 8) for _ in range(3))
    found = [dense.sdpa(q, k, v, 0.5, None, False) for q, k, v in zip(query, key, value, strict=True)]
    assert kernel.call_count == 3
    together = torch.func.vmap(lambda q, k, v: dense.sdpa(q, k, v, 0.5, None, False))(query, key, value)
    assert kernel.call_count == 3
    torch.testing.assert_close(together, torch.stack(found))


@pytest.mark.parametrize("nodes", [1, 32, 33, 191, 192, 767, 768, 1025])
def test_blocks_of_torchs_kernel(nodes: int) -> None:
    rows = 32 if nodes < 192 else 64 if nodes < 768 else 256
    for sources in (1, 512, 513):
        graph = graphs.complete().bind(nodes, sources)
        assert dense._blocks(graph, None) == math.ceil(nodes / rows) * math.ceil(sources / 512)
    parts = graphs.documents([nodes, 3, nodes]).bind(2 * nodes + 3).parts
    each = math.ceil(nodes / rows) * math.ceil(nodes / 512)
    assert dense._blocks(graphs.complete().bind(1), parts) == 2 * each + 1


@pytest.mark.parametrize(("sources", "fresh"), [(2**12 - 1, False), (2**12, True)])
def test_logits_of_32_mib_are_allocated_by_the_system(sources, fresh):
    query, key = torch.zeros(1).expand(2**11, 1, 8), torch.zeros(1).expand(sources, 1, 8)
    counts = dense.counts(Round(graphs.complete().bind(2**11, sources), key, Dot(query, key, 1.0, softcap=2.0)))
    assert counts["written pair"] == 2**11 * sources
    assert counts.get("fresh pair", 0) == fresh * 2**11 * sources


def assert_as_specified(graph, *given, **options):
    found = ops.attend(graph, *given, backend="dense", **options)
    expected = ops.attend(graph, *given, backend="edge_list", **options)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


TOPOLOGIES = [graphs.complete(), graphs.causal(), graphs.window(1), graphs.documents([3, 3, 4, 1])]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("heads", [(2, 1), (1, 2), (4, 1), (1, 4), (2, 4)], ids=str)
def test_keys_and_values_have_heads_of_their_own(topology, batch, heads):
    query, key = torch.randn(*batch, 11, 4, 8).double(), torch.randn(*batch, 11, heads[0], 8).double()
    assert_as_specified(topology.bind(11), query, key, torch.randn(*batch, 11, heads[1], 8).double())


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.5, 0.3])
def test_scales_of_any_sign(topology, scale):
    """Also where a mask or a bias has -inf, which must not become inf or NaN."""
    graph, given = topology.bind(11), features(nodes=(11, 11))
    assert_as_specified(graph, *given, scale=scale)
    bias = torch.randn(graph.num_edges, 4).double()
    bias[:, 0] = -torch.inf
    assert_as_specified(graph, *given, scale=scale, bias=bias)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("batch", [(), (1,), (2,), (1, 2), (3, 1, 2)], ids=str)
def test_biases_of_blocks_in_batches(topology, batch):
    graph, given = topology.bind(11), features(*batch, nodes=(11, 11))
    assert_as_specified(graph, *given, bias=BiasTable(torch.randn(9, 4).double(), Offset(4)))
    for shape in {(4,), (1,)}:
        assert_as_specified(graph, *given, bias=torch.randn(graph.num_edges, *shape).double())
        assert_as_specified(graph, *given, bias=torch.randn(*batch, graph.num_edges, *shape).double())


def test_a_row_whose_sink_and_logits_are_all_minus_infinity_has_zeros():
    graph, given = graphs.window(1).bind(5), features()
    bias = torch.zeros(graph.num_edges, 4).double()
    bias[graph.ends[1] == 2] = -torch.inf
    sinks = torch.tensor([0.0, 1.0, -torch.inf, -torch.inf]).double()
    assert_as_specified(graph, *given, bias=bias, sinks=sinks)


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "sizes", "taken"),
    [
        (torch.float32, False, (2, 3, 4), True),
        (torch.bfloat16, False, (2, 3, 4), False),
        (torch.bfloat16, True, (2, 3, 4), True),
        (torch.float32, True, (1, 1, 1), True),
        (torch.float32, True, (0, 3, 4), False),
        (torch.float32, True, (2, 0, 4), False),
        (torch.float32, False, (2, 3, 0), False),
    ],
    ids=str,
)
def test_which_biases_torchs_kernels_take(dtype, on_cpu, sizes, taken):
    """Of rounds of which only these attributes are read."""
    num_dst, num_src, entries = sizes
    value = SimpleNamespace(dtype=dtype, is_cpu=on_cpu)
    graph, batch = SimpleNamespace(num_dst=num_dst, num_src=num_src), torch.Size([entries])
    round = SimpleNamespace(value=value, accumulate_dtype=torch.float32, graph=graph, batch=batch)
    assert dense._takes_bias(round) == taken


def test_which_rounds_run_part_by_part():
    parts, one, explicit = (t.bind(7) for t in (graphs.documents([3, 4]), graphs.documents([7]), graphs.complete()))
    explicit = graphs.from_edges(parts.edge_index, 7)
    query, key, value = features(nodes=(7, 7))
    score = Dot(query, key, 1.0)
    of_edges, table = torch.zeros(parts.num_edges, 4), BiasTable(torch.zeros(9, 4), Offset(4))
    assert dense.runs_by_parts(Round(parts, value, score))
    assert dense.runs_by_parts(Round(parts, value, score, bias=(table,)))
    assert not dense.runs_by_parts(Round(parts, value, score, bias=(table, of_edges)))
    assert not dense.runs_by_parts(Round(parts, value, score, return_weights=True))
    assert not dense.runs_by_parts(Round(one, value, score))
    assert not dense.runs_by_parts(Round(explicit, value, score))


def test_limits_are_the_largest_sizes_that_run(monkeypatch):
    graph = graphs.from_edges([[0, 6, 2], [0, 1, 4]], num_dst=5, num_src=7)
    query, key, value = features(nodes=(5, 7))
    plain = Round(graph, value, Dot(query, key, 1.0))
    capped = Round(graph, value, Dot(query, key, 1.0, softcap=2.0))
    with_keys = Round(graph, value, Dot(query, key, 1.0, EmbeddingTable(torch.zeros(9, 4, 8), Offset(4))))
    limits = {
        (34, 180): (True, True, True),
        (35, 180): (False, False, False),
        (35, 179): (False, False, True),
        (35, 140): (False, False, True),
        (35, 139): (False, True, True),
    }
    for (pairs, scores), refused in limits.items():
        monkeypatch.setattr(dense, "_MAX_PAIRS", pairs)
        monkeypatch.setattr(dense, "_MAX_SCORES", scores)
        assert tuple(dense.refusal(round) is not None for round in (plain, capped, with_keys)) == refused


def test_many_pairs_run_in_torchs_kernel_under_vmap(monkeypatch):
    kernel = Mock(side_effect=lambda q, k, v, **options: q @ k.mT @ v)
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", kernel)
    query, key, value = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 4, 7, 8), torch.randn(3, 2, 4, 7, 8)
    for few, calls in ((35, 0), (34, 1)):
        monkeypatch.setattr(dense, "_FEW_PAIRS", few)
        torch.func.vmap(lambda q, k, v: dense.sdpa(q, k, v, 0.5, None, False))(query, key, value)
        assert bool(kernel.call_count) == calls


@pytest.mark.parametrize("topology", [*TOPOLOGIES[:3], graphs.causal() - graphs.identity()], ids=str)
def test_tables_by_offset_of_a_whole_graph_are_shifted(topology, monkeypatch):
    """Which is faster than to look up each pair."""
    monkeypatch.setattr(dense.pair_tables, "select_by_type", None)
    query, key, value = features()
    table = EmbeddingTable(torch.randn(9, 4, 8).double(), Offset(4))
    round = Round(topology.bind(5), value, Dot(query, key, 1.0, table))
    assert dense.run(round).out.shape == value.shape


@pytest.mark.parametrize(("nodes", "share"), [(64, 1.0), (512, 1.0), (1024, 0.75)])
def test_pairs_of_a_causal_graph(nodes, share):
    """Blocks of 256 sources on the diagonal are computed in full."""
    x = torch.zeros(1).expand(nodes, 2, 8)
    causal, complete = (
        dense.counts(Round(topology.bind(nodes), x, Dot(x, x, 1.0)))
        for topology in (graphs.causal(), graphs.complete())
    )
    assert complete["pair"] == 2 * nodes**2
    assert causal == complete | {"pair": share * complete["pair"], "number": share * complete["number"]}
    bias = BiasTable(torch.zeros(9, 2), Offset(4))
    biased = dense.counts(Round(graphs.causal().bind(nodes), x, Dot(x, x, 1.0), bias=(bias,)))
    assert biased["pair"] == 2 * nodes**2
