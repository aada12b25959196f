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
