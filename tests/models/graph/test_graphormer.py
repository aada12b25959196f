"""Graphormer: the paper's equations, written out pair by pair for each molecule alone."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from error_bound import error_bound
from parity import equals_formula, moved
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, graphs
from mpnn.models.graph.graphormer import Graphormer

SYSTEM = "Graphormer"
IN, EDGE, DIM, HEADS, STEPS, FAR = 5, 3, 12, 3, 2, 3
BOUND = error_bound(2, 2 * DIM)


def molecule(bonds: list[tuple[int, int]], atoms: int) -> Graph:
    """Bonds go both ways with the same features."""
    one_way = torch.tensor(bonds, dtype=torch.int64).reshape(-1, 2).T
    features = torch.randn(len(bonds), EDGE)
    return graphs.from_edges(torch.cat([one_way, one_way.flip(0)], 1), atoms, edge_attr=torch.cat([features, features]))


@pytest.fixture
def molecules() -> list[Graph]:
    """A tree with paths longer than STEPS and FAR, two pieces that do not hang together, and a lonely atom."""
    return [molecule([(0, 1), (1, 2), (2, 3), (3, 4), (1, 5)], 6), molecule([(0, 1), (2, 3)], 4), molecule([], 1)]


@pytest.fixture
def model() -> Graphormer:
    sizes = {"layers": 2, "most_degree": 2, "max_distance": FAR, "steps": STEPS}
    return moved(Graphormer(IN, 2, EDGE, DIM, HEADS, **sizes, dropout=0.3))


def path(graph: Graph, i: int, j: int) -> list[int] | None:
    """The edges from i on, one after the other, until j; breadth first. Trees have one path only."""
    found: dict[int, list[int]] = {i: []}
    queue = deque([i])
    while queue:
        at = queue.popleft()
        for e, (src, dst) in enumerate(graph.edge_index.T.tolist()):
            if dst == at and src not in found:
                found[src] = [*found[at], e]
                queue.append(src)
    return found.get(j)


def alone(net: Graphormer, x: Tensor, graph: Graph) -> Tensor:
    """Equations 5 to 9 for one molecule in its features' dtype, [outputs]."""
    n = graph.num_dst
    spatial, along = net.layers[0].attention.positions
    w = along.to_bias.weight.view(HEADS, STEPS, EDGE)
    bias = torch.zeros(HEADS, n + 1, n + 1, dtype=x.dtype)
    for i in range(n + 1):
        for j in range(n + 1):
            if 0 in (i, j):
                bias[:, i, j] = spatial.table[FAR + 2]
                continue
            edges = path(graph, i - 1, j - 1)
            bias[:, i, j] = spatial.table[FAR + 1 if edges is None else min(len(edges), FAR)]
            near = (edges or [])[:STEPS]
            for step, e in enumerate(near):
                bias[:, i, j] = bias[:, i, j] + w[:, step] @ graph.edge_attr[e].to(x.dtype) / len(near)
    degrees = [min(sum(d == i for d in graph.edge_index[1].tolist()), 2) for i in range(n)]
    nodes = net.embed(x) + net.of_indegree.weight[degrees] + net.of_outdegree.weight[degrees]
    h = torch.cat([net.virtual, nodes])
    for layer in net.layers:
        attention, update = layer.attention, layer.update
        inner = F.layer_norm(h, (DIM,), update.norm.weight, update.norm.bias)
        query, key, value = (
            F.linear(inner, to.weight, to.bias).view(n + 1, HEADS, -1).transpose(0, 1)
            for to in (attention.to_query, attention.to_key, attention.to_value)
        )
        weights = (query @ key.transpose(1, 2) / (DIM // HEADS) ** 0.5 + bias).softmax(-1)
        heads = (weights @ value).transpose(0, 1).reshape(n + 1, DIM)
        h = h + F.linear(heads, attention.to_out.weight, attention.to_out.bias)
        inner = F.layer_norm(h, (DIM,), update.ffn_norm.weight, update.ffn_norm.bias)
        first, last = update.ffn[0], update.ffn[3]
        h = h + F.linear(F.gelu(F.linear(inner, first.weight, first.bias)), last.weight, last.bias)
    return net.head(F.layer_norm(h[0], (DIM,), net.norm.weight, net.norm.bias))


def test_equals_the_formula_on_a_batch(model: Graphormer, molecules: list[Graph], measured) -> None:
    sizes = [m.num_dst for m in molecules]
    x = torch.randn(sum(sizes), IN)

    def run(dtype: torch.dtype) -> Tensor:
        parts = [graphs.from_edges(m.edge_index, m.num_dst, edge_attr=m.edge_attr.to(dtype)) for m in molecules]
        return model(x.to(dtype), parts)

    def formula() -> Tensor:
        parts = zip(x.double().split(sizes), molecules, strict=True)
        return torch.stack([alone(model, part, molecule) for part, molecule in parts])

    equals_formula(model, run, formula, lambda error: measured(SYSTEM, "formula", error, BOUND))


def test_molecules_without_edge_features_or_with_one_number_each(molecules: list[Graph]) -> None:
    net = Graphormer(IN, 1, dim=DIM, heads=HEADS, layers=1)
    assert net(torch.randn(11, IN), molecules).shape == (3, 1)
    one_number = graphs.from_edges([[0, 1], [1, 0]], edge_attr=torch.ones(2))
    assert Graphormer(IN, 1, 1, DIM, HEADS, layers=1)(torch.randn(2, IN), [one_number]).shape == (1, 1)


def test_refusals_name_what_does_not_fit(model: Graphormer, molecules: list[Graph]) -> None:
    with pytest.raises(ValueError, match="the 3 molecules have 11 nodes, but x has 10 rows"):
        model(torch.randn(10, IN), molecules)
    bare = graphs.from_edges([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"edge_attr must have shape \[2, 3\], as edge_dim says; got none"):
        model(torch.randn(2, IN), [bare])
    with pytest.raises(ValueError, match=r"as edge_dim says; got \[2\]"):
        model(torch.randn(2, IN), [graphs.from_edges([[0, 1], [1, 0]], edge_attr=torch.ones(2))])
