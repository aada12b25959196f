"""Readouts of whole graphs with the weights of PyTorch Geometric: Set2Set and top-k pooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from error_bound import error_bound

from mpnn import Graph, graphs
from mpnn.models import GCN, GGNN, GIN, PNA, GraphPredictor, SchNet
from mpnn.models.layers.readout import Set2Set, TopKPooling

SYSTEM = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
SIZES, DIM = (5, 1, 4), 6
OF_NODE = torch.arange(3).repeat_interleave(torch.tensor(SIZES))


def pool() -> Graph:
    return graphs.from_edges(torch.stack([torch.arange(10), OF_NODE]), num_src=10, num_dst=3)


def test_set2set_is_pygs(measured: Callable[..., None]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    for dtype in (torch.float64, torch.float32):
        ours, theirs = Set2Set(DIM, 4).to(dtype), pyg.Set2Set(DIM, 4).to(dtype)
        theirs.lstm.load_state_dict(ours.lstm.state_dict())
        h = torch.randn(10, DIM, dtype=dtype, requires_grad=True)
        found, expected = ours(h, pool()), theirs(h, OF_NODE)
        if dtype == torch.float64:
            grads = [torch.autograd.grad(y.square().sum(), h)[0] for y in (found, expected)]
            torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
        error = (found - expected).abs().max().item()
        measured(SYSTEM, "PyTorch Geometric Set2Set", error, error_bound(8, 4 * DIM, dtype))


READERS = {
    "GIN": lambda x, graph, pool: GIN(3, 2)(x, graph, pool),
    "PNA": lambda x, graph, pool: PNA(3, 2, 8)(x, graph, pool=pool),
    "GraphPredictor": lambda x, graph, pool: GraphPredictor(GCN(3, 4), 4, 1, "max")(x, graph, pool),
    "GGNN": lambda x, graph, pool: GGNN(3, 2)(x, graph, pool),
    "Set2Set": lambda x, graph, pool: Set2Set(3)(x, pool),
    "SchNet": lambda x, graph, pool: SchNet(8, 8, 1, 6)(torch.ones(9).long(), x, graph, pool),
    "SchNet in cells": lambda x, graph, pool: SchNet(8, 8, 1, 6)(
        torch.ones(9).long(), x, graphs.radius(x, 1.0, cell=9 * torch.eye(3)), pool, 9 * torch.eye(3)[None]
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pool_that_leaves_out_nodes_is_refused(name: str) -> None:
    x, graph = torch.randn(9, 3), graphs.from_edges([[0], [1]], 9)
    whole = graphs.from_edges([[*range(9)], [0] * 9], num_src=9, num_dst=1)
    assert READERS[name](x, graph, whole).isfinite().all()
    few = graphs.from_edges([[0, 1], [0, 0]], num_src=9, num_dst=1)
    with pytest.raises(
        ValueError, match="pool must name the graph of each node: 7 of 9 nodes are in none of its 1 gra"
    ):
        READERS[name](x, graph, few)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_top_k_pooling_is_pygs(ratio: float, measured: Callable[..., None]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    ours, theirs = TopKPooling(DIM, ratio).double(), pyg.TopKPooling(DIM, ratio).double()
    with torch.no_grad():
        theirs.select.weight.copy_(ours.weight[None])
    edges = torch.cat([first + torch.randint(n, (2, 3 * n)) for n, first in zip(SIZES, (0, 5, 6), strict=True)], 1)
    attr = torch.randn(edges.shape[1], 2, dtype=torch.float64)
    h = torch.randn(10, DIM, dtype=torch.float64, requires_grad=True)
    x, graph, left = ours(h, graphs.from_edges(edges, 10, edge_attr=attr), pool())
    expected, ends, their_attr, of_node, perm, _ = theirs(h, edges, attr, OF_NODE)
    order = perm.argsort()  # PyTorch Geometric numbers nodes by their scores
    measured(SYSTEM, "PyTorch Geometric TopKPooling", (x - expected[order]).abs().max().item(), 1e-12)
    assert torch.equal(left.edge_index[1], of_node[order])
    new = order.argsort()
    assert torch.equal(graph.edge_index, new[ends])
    assert torch.equal(graph.edge_attr, their_attr)
    grads = [
        torch.autograd.grad(y.square().sum(), [h, w]) for y, w in ((x, ours.weight), (expected, theirs.select.weight))
    ]
    torch.testing.assert_close(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1][0])


def test_equal_scores_keep_the_lower_number_and_ratios_are_shares() -> None:
    fifty = graphs.from_edges([[*range(50)], [0] * 50], num_src=50, num_dst=1)
    few, *_ = TopKPooling(DIM, 0.3)(torch.randn(50, DIM), graphs.identity().bind(50), fifty)
    assert len(few) == 15, "0.3 * 50 is more than 15 in float32"
    layer, complete = TopKPooling(DIM, 0.5), graphs.from_edges(torch.cartesian_prod(*[torch.arange(10)] * 2).T, 10)
    _, graph, left = layer(torch.ones(10, DIM), complete, pool())
    assert left.edge_index[1].tolist() == [0, 0, 0, 1, 2, 2]
    assert graph.num_dst == 6
    for ratio in (0, 1.5):
        with pytest.raises(ValueError, match=f"ratio must be above 0 and at most 1; got {ratio}"):
            TopKPooling(DIM, ratio)


def test_a_node_belongs_to_one_graph() -> None:
    h, edges = torch.randn(3, DIM), graphs.from_edges([[0, 1], [1, 0]], 3)
    for nodes, of in (([0, 0, 1, 2], [0, 1, 1, 1]), ([0, 2], [0, 1])):
        with pytest.raises(ValueError, match="pool must have one edge for each node"):
            TopKPooling(DIM)(h, edges, graphs.from_edges([nodes, of], num_src=3, num_dst=2))


@pytest.mark.parametrize("ratio", ["0.07", "0.14", "0.28", "0.3", "0.55", "0.56", "0.9"])
def test_top_k_pooling_keeps_the_share_as_it_is_written(ratio: str) -> None:
    for n in (20, 25, 50, 100, 200):
        pooling, no_edges = TopKPooling(2, float(ratio)), graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), n)
        one_graph = graphs.from_edges(torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)]), num_dst=1)
        assert len(pooling(torch.randn(n, 2), no_edges, one_graph)[0]) == math.ceil(Fraction(ratio) * n)
