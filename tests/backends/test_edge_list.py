"""The specification by hand. `tests/fuzz` compares it with a computation that shares no code with this library: every
score, bias, normalizer, aggregator and dtype, over every kind of graph, with gradients."""

import math

import pytest
import torch

from mpnn import engine, graphs
from mpnn.aggregate import Max
from mpnn.backends import edge_list
from mpnn.round import Round
from mpnn.scores import Dot

# Node 0 receives from 1 and 2, node 1 from 0, node 2 from nobody.
GRAPH = graphs.from_edges([[1, 2, 0], [0, 0, 1]], 3)
QUERY = torch.tensor([1.0, 1.0, 1.0]).view(3, 1, 1)
KEY = torch.tensor([5.0, 0.0, math.log(3)]).view(3, 1, 1)
VALUE = torch.tensor([7.0, 4.0, 8.0]).view(3, 1, 1)


def test_a_softmax_weighs_the_values_of_the_in_neighbors() -> None:
    out, weights = engine.run(Round(GRAPH, VALUE, Dot(QUERY, KEY, 1.0), return_weights=True), "edge_list")
    torch.testing.assert_close(weights.flatten(), torch.tensor([1 / 4, 3 / 4, 1.0]))  # e^0 and e^(log 3), of 4
    torch.testing.assert_close(out.flatten(), torch.tensor([4 / 4 + 3 * 8 / 4, 7.0, 0.0]))
    alone, none = engine.run(Round(GRAPH, VALUE, Dot(QUERY, KEY, 1.0)), "edge_list")
    assert none is None
    assert alone.equal(out), "asking for the weights changed the output"


def test_biases_are_added_to_logits_and_are_the_weights_where_nothing_else_is() -> None:
    bias = torch.tensor([math.log(3), 0.0, 2.0])[:, None]
    out, _ = engine.run(Round(GRAPH, VALUE, Dot(QUERY, KEY, 1.0), bias=(bias,)), "edge_list")
    torch.testing.assert_close(out.flatten(), torch.tensor([4 / 2 + 8 / 2, 7.0, 0.0]))  # e^(log 3) twice
    out, _ = engine.run(
        Round(GRAPH, VALUE, bias=(torch.tensor([0.5, 2.0, 3.0])[:, None],), normalize="none"), "edge_list"
    )
    assert out.flatten().tolist() == [0.5 * 4 + 2 * 8, 3 * 7, 0.0]


def test_messages_are_weighted_before_they_are_reduced() -> None:
    out, _ = engine.run(Round(GRAPH, VALUE, Dot(QUERY, KEY, 1.0), reduce=Max()), "edge_list")
    torch.testing.assert_close(out.flatten(), torch.tensor([8 * 3 / 4, 7.0, 0.0]))
    bias = torch.tensor([2.0, 0.25, 1.0])[:, None]
    out, _ = engine.run(Round(GRAPH, VALUE, bias=(bias,), normalize="none", reduce=Max()), "edge_list")
    assert out.flatten().tolist() == [2.0 * 4, 7.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_memory_from_the_system_is_counted_from_16_mib_on(dtype: torch.dtype) -> None:
    wide = 8 if dtype == torch.float64 else 4  # bytes of a number of an edge
    for nodes, edges in (((2**11, 2**13 // wide), 0), ((2**11, 2**13 // wide + 1), 2**11 * (2**13 // wide + 1))):
        value = torch.zeros(1, dtype=dtype).expand(nodes[1], 1, 1)
        counts = edge_list.counts(Round(graphs.complete().bind(*nodes), value, normalize="none"))
        assert counts.get("fresh number", 0) == edges * wide / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scored", [False, True], ids=["sums", "attention"])
def test_16_bit_features_are_computed_in_float32_and_rounded_once(dtype: torch.dtype, scored: bool) -> None:
    graph = graphs.window(3).bind(20)
    query, key, value = (torch.randn(20, 2, 8).to(dtype) for _ in range(3))
    results = []
    for wide in (dtype, torch.float32):
        q, k, v = (x.to(wide) for x in (query, key, value))
        round = Round(graph, v, Dot(q, k, 0.3)) if scored else Round(graph, v, normalize="none")
        results.append(edge_list.run(round).out)
    assert results[0].dtype == dtype
    assert results[0].equal(results[1].to(dtype))


@pytest.mark.parametrize("heads", [1, 2])
def test_returned_weights_are_not_the_memory_of_the_bias(heads: int) -> None:
    bias = torch.randn(3, heads)
    for graph in (GRAPH, graphs.from_edges([[0, 1, 2], [0, 0, 1]], 3)):
        round = Round(graph, torch.randn(3, 2, 4), bias=(bias,), normalize="none", return_weights=True)
        weights = edge_list.run(round).weights
        assert weights is not None
        assert weights.equal(bias.expand(3, 2))
        weights.zero_()
        assert bias.any()


def recurrence(
    batch: tuple[int, ...], gate: int, with_beta: bool, heads: tuple[int, int] = (2, 2), **options: bool
) -> Round:
    graph = (graphs.causal() & graphs.documents([4, 1, 3])).bind(8)
    query, key = torch.randn(*batch, 8, 2, 3).double(), torch.randn(*batch, 8, heads[0], 3).double()
    fields = {
        "log_gate": -torch.rand(*batch, 8, 2, gate).double() if gate else None,
        "beta": torch.rand(*batch, 8, 2).double() if with_beta else None,
        "state": torch.randn(*batch, 2, 3, 5).double(),
    }
    value = torch.randn(*batch, 8, heads[1], 5).double()
    return Round(graph, value, Dot(query, key, 0.4), normalize="none", **fields, **options)  # type: ignore[arg-type]


def node_by_node(round: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [..., N, H, D_v], and the state after the last node, step by step."""
    score = round.score
    assert isinstance(score, Dot)
    assert round.state is not None
    key, value = (x.repeat_interleave(2 // x.shape[-2], -2) for x in (score.key, round.value))
    state = round.state
    out = []
    for i in range(8):
        if i in (4, 5):  # a document begins
            state = torch.zeros_like(state)
        if round.log_gate is not None:
            state = round.log_gate[..., i, :, :, None].exp() * state
        k, v = key[..., i, :, :], value[..., i, :, :]
        if round.beta is not None:
            v = round.beta[..., i, :, None] * (v - (k[..., None] * state).sum(-2))
        state = state + k[..., None] * v[..., None, :]
        out.append(score.scale * (score.query[..., i, :, :, None] * state).sum(-2))
    return torch.stack(out, -3), state


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("gate", [0, 1, 3])
@pytest.mark.parametrize("with_beta", [False, True], ids=["", "delta rule"])
def test_recurrences_node_by_node(batch: tuple[int, ...], gate: int, with_beta: bool) -> None:
    heads = (2, 2) if with_beta or gate == 3 else (2, 1)
    round = recurrence(batch, gate, with_beta, heads, return_state=True)
    found = edge_list.run(round)
    out, state = node_by_node(round)
    torch.testing.assert_close(found.out, out)
    torch.testing.assert_close(found.state, state)
    if gate:
        weights = edge_list.run(recurrence(batch, gate, with_beta, heads, return_weights=True)).weights
        assert weights is not None
        assert weights.shape == (*batch, round.graph.num_edges, 2)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("with_beta", [False, True], ids=["", "delta rule"])
def test_weights_of_recurrences_weigh_the_values(batch: tuple[int, ...], with_beta: bool) -> None:
    round = recurrence(batch, 1, with_beta, return_weights=True)
    round.state = None
    found = edge_list.run(round)
    assert found.weights is not None
    src, dst = round.graph.ends
    messages = found.weights[..., None] * round.value.index_select(-3, src)
    torch.testing.assert_close(found.out, torch.zeros_like(found.out).index_add(-3, dst, messages))


def test_counts_of_a_recurrence() -> None:
    counts = edge_list.counts(recurrence((3,), 1, False))
    assert counts["recurrence call"] == 1
    assert counts["state number"] == 3 * 2 * 3 * 5
