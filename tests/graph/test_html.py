"""What notebooks show: pictures with their numbers, quickly for any size, and nothing that a name could inject."""

from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from steps import at_most

from mpnn import MessagePassing, explain, graphs
from mpnn.attention import DotProduct
from mpnn.graph import html

SHOWN = {
    "topology": graphs.causal() & graphs.window(4),
    "another size": graphs.grid(5, 7),
    "graph": graphs.longformer(8, globals=1).bind(300),
    "rectangle": graphs.complete().bind(3, 9),
    "edges": graphs.from_edges([[0, 1, 2], [1, 2, 2]], 5),
    "nothing": graphs.complete().bind(0),
    "no edges": graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 4),
}


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_it_is_well_formed_and_says_the_numbers(shown):
    text = shown._repr_html_()
    ElementTree.fromstring(text)
    if hasattr(shown, "num_edges"):
        assert f"{shown.num_edges:,} edges" in text
        assert "aria-label" in text


def test_topologies_are_shown_over_24_nodes_or_say_why_not():
    assert "over 24 nodes" in graphs.causal()._repr_html_()
    assert "not a graph of 24 nodes" in graphs.grid(5, 7)._repr_html_()


@pytest.mark.parametrize("n", [1, 7, 40])
def test_small_graphs_are_drawn_edge_by_edge(n):
    edges = torch.randint(n, (2, 3 * n))
    for graph in (graphs.bigbird(block=2, window=1, random=1, globals=1).bind(n), graphs.from_edges(edges, n)):
        drawn = html._shares(graph) > 0
        assert np.array_equal(drawn, graph.dense().numpy())


@pytest.mark.parametrize("topology", [graphs.causal(), graphs.window(30), graphs.documents([50, 150, 20, 20])], ids=str)
def test_cells_of_large_graphs_are_shares_of_their_pairs(topology):
    graph = topology.bind(240)
    exact = graph.dense().double().unflatten(0, (40, 6)).unflatten(2, (40, 6)).mean((1, 3))
    assert np.abs(html._shares(graph) - exact.numpy()).max() < 0.2  # four of six rows are read
    explicit = graphs.from_edges(graph.edge_index, 240)
    assert np.allclose(html._shares(explicit), exact.numpy())


def test_a_million_nodes_take_a_moment():
    graph = (graphs.causal() & graphs.window(4096)).bind(1_000_000)
    with at_most(calls=100_000, megabytes=10):
        text = graph._repr_html_()
    assert "1,000,000 nodes" in text
    assert len(text) < 50_000
    shares = html._shares(graph)
    assert (shares > 0).sum(1).max() <= 2
    assert (shares.diagonal() > 0).all()


def test_operators_and_plans():
    layer = MessagePassing(graphs.window(2), "mean", None, DotProduct(8, 2))
    text = layer._repr_html_()
    ElementTree.fromstring(text)
    for word in ("Mean", "DotProduct", "window(2)", "288"):
        assert word in text
    plan = explain(layer, torch.randn(50, 8))
    text = plan._repr_html_()
    ElementTree.fromstring(text)
    assert f"plan: {plan.backend}" in text
    explicit = MessagePassing(graphs.from_edges([[0], [1]], 50), "mean", None, DotProduct(8, 2))
    assert "no: " in explain(explicit, torch.randn(50, 8))._repr_html_()


def test_names_are_text_and_not_markup():
    graph = graphs.from_edges([[0], [1]], 2)
    graph.name = "<script>alert('x')</script>\"&"
    text = graph._repr_html_()
    assert "<script" not in text
    ElementTree.fromstring(text)


def test_a_diameter_that_takes_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    path = graphs.window(1).bind(30)
    assert "29 layers connect all pairs" in path._repr_html_()
    monkeypatch.setattr("mpnn.graph.html._SECONDS", -1.0)
    text = path._repr_html_()
    assert "88 edges" in text
    assert "layers connect" not in text
