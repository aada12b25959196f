"""Pictures show the edges that there are: small graphs cell by cell, large ones as the share of each tile."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpnn import graphs, ops
from mpnn.graph import Graph
from mpnn.graph.blocks import density
from mpnn.view import plot


@pytest.fixture
def ax() -> Axes:
    return Figure().add_subplot()


def share_by_counting(graph: Graph, rows: int, columns: int) -> np.ndarray:
    """Pair by pair: i lies in tile row i * rows // N."""
    edges, pairs = np.zeros((rows, columns)), np.zeros((rows, columns))
    for i, row in enumerate(graph.dense().tolist()):
        for j, is_edge in enumerate(row):
            tile = i * rows // graph.num_dst, j * columns // graph.num_src
            edges[tile] += is_edge
            pairs[tile] += 1
    return edges / pairs


@pytest.mark.parametrize(("num_dst", "num_src"), [(13, 13), (16, 7), (1, 5), (31, 97)])
@pytest.mark.parametrize("tiles", [1, 3, 5])
def test_density_is_the_share_of_pairs_in_each_tile(num_dst: int, num_src: int, tiles: int) -> None:
    graph = ((graphs.causal() & graphs.window(4)) | graphs.random(2)).bind(max(num_dst, num_src), num_src)
    graph = graph.rows(0, num_dst)
    rows, columns = min(tiles, num_dst), min(tiles, num_src)
    np.testing.assert_allclose(density(graph.runs, rows, columns), share_by_counting(graph, rows, columns), atol=1e-12)


def test_density_of_a_long_graph_needs_no_matrix_of_its_pairs() -> None:
    n = 1_000_000  # a million by a million pairs would not fit anywhere
    share = density((graphs.causal() & graphs.window(999)).bind(n).runs, 100, 100)
    assert share[50, 49] > 0
    assert share[50, 51] == 0
    np.testing.assert_allclose(share.sum() * (n / 100) ** 2, n * 1000 - 999 * 1000 / 2)


def test_a_small_graph_is_drawn_edge_by_edge(ax: Axes) -> None:
    graph = (graphs.causal() & graphs.window(1)).bind(4)
    assert graph.plot(ax) is ax
    drawn = ax.images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(drawn), ~graph.dense().numpy())
    assert ax.get_title(loc="left") == graph.name
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("destination (receives)", "source (sends)")
    assert "7 edges" in ax.texts[0].get_text()


def test_destinations_run_down_and_sources_across(ax: Axes) -> None:
    graphs.complete().bind(3, 8).plot(ax, title="cross-attention")
    assert ax.get_xlim() == (-0.5, 7.5)
    assert ax.get_ylim() == (2.5, -0.5)
    assert ax.get_title(loc="left") == "cross-attention"


def test_a_large_graph_is_drawn_in_tiles_with_a_scale(ax: Axes) -> None:
    graphs.bigbird(block=16).bind(1000).plot(ax, tiles=50)
    assert ax.images[0].get_array().shape == (50, 50)
    assert len(ax.figure.axes) == 2


def test_without_axes_a_figure_is_made() -> None:
    from matplotlib import pyplot

    ax = graphs.causal().bind(5).plot()
    assert isinstance(ax, Axes)
    pyplot.close(ax.figure)


@pytest.mark.parametrize("n", [0, 1])
def test_graphs_of_hardly_any_nodes_are_drawn_too(ax: Axes, n: int) -> None:
    graphs.causal().bind(n).plot(ax)
    ax.figure.canvas.draw()


def test_attention_shows_each_edge_s_weight(ax: Axes) -> None:
    graph = (graphs.causal() & graphs.window(1)).bind(3)
    plot.attention(graph, torch.tensor([1.0, 0.25, 0.75, 0.5, 0.5]), ax, labels="abc")
    drawn = ax.images[0].get_array()
    np.testing.assert_array_equal(drawn.filled(-1), [[1, -1, -1], [0.25, 0.75, -1], [-1, 0.5, 0.5]])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]


def test_attention_takes_weights_as_the_operator_gives_them(ax: Axes) -> None:
    edges = torch.tensor([[2, 0, 1], [0, 1, 1]])  # in an order of its caller's own
    graph = graphs.from_edges(edges, 3)
    query, key, value = torch.randn(3, 3, 2, 4).unbind()
    _, weights = ops.attend(graph, query, key, value, return_weights=True)
    plot.attention(graph, weights, ax)
    drawn = ax.images[0].get_array()
    np.testing.assert_allclose([drawn[0, 2], drawn[1, 0], drawn[1, 1]], weights.mean(1), rtol=1e-6)
    assert drawn.count() == 3


def test_attention_without_edges_is_drawn(ax: Axes) -> None:
    plot.attention(graphs.causal().bind(3, 0), torch.zeros(0, 2), ax=ax)
    assert ax.images[0].get_array().count() == 0


def test_attention_refuses_weights_of_other_edges(ax: Axes) -> None:
    graph = graphs.causal().bind(3)
    with pytest.raises(ValueError, match=r"E = 6; got \[5\]"):
        plot.attention(graph, torch.ones(5), ax)
    with pytest.raises(ValueError, match="one for each of the 3 nodes; got 2"):
        plot.attention(graph, torch.ones(6), ax, labels=["a", "b"])


def test_names_stand_in_the_order_in_which_lines_end(ax: Axes) -> None:
    ends = {"middle": 1.78, "low": 0.5, "high": 3.0}
    lines = {name: ([0, 10], [4.0, end]) for name, end in ends.items()}
    plot.curves({**lines, "nothing": ([], []), "": ([0], [1.0])}, ax)
    names = ax.get_legend().get_texts()
    assert [text.get_text() for text in names] == ["high", "middle", "low"]
    assert [text.get_color() for text in names] == [plot.SERIES[k] for k in (2, 0, 1)]


LONG = "causal() & (window(64) | global_nodes(4) | random(3, seed=17)) - identity() of a few thousand nodes"


@pytest.mark.parametrize("width", [3.5, 6.4])
@pytest.mark.sample(2)
def test_a_long_title_goes_over_several_lines_within_the_picture(width: float) -> None:
    graph = graphs.causal().bind(9)
    for draw in (
        lambda ax: plot.adjacency(graph, ax, title=LONG),
        lambda ax: plot.attention(graph, torch.ones(45), ax, title=LONG),
        lambda ax: plot.curves({"one": ([1, 2], [3.0, 1.0])}, ax, title=LONG),
        lambda ax: plot.network(graph, ax, title=LONG),
    ):
        figure = Figure(figsize=(width, 4.0), layout="constrained")
        ax = draw(figure.add_subplot())
        figure.draw_without_rendering()
        title = next(text for text in ax.get_children() if getattr(text, "get_text", str)() == ax.get_title(loc="left"))
        assert title.get_text().replace("\n", " ") == LONG
        assert title.get_window_extent().x1 <= figure.bbox.x1


def test_long_names_leave_room_for_their_curves() -> None:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    ax = plot.curves({LONG: ([1, 2], [3.0, 1.0]), "two": ([1, 2], [3.0, 1.0])}, figure.add_subplot())
    figure.draw_without_rendering()
    assert ax.get_position().width > 0.5
    assert max(text.get_text().count("\n") for text in ax.get_legend().get_texts()) > 2


def test_steps_are_whole_numbers(ax: Axes) -> None:
    plot.curves({"one": ([0, 1, 2], [3.0, 1.0, 0.5])}, ax)
    assert all(float(tick).is_integer() for tick in ax.get_xticks())
    hours = plot.curves({"one": ([0.0, 0.5, 1.0], [3.0, 1.0, 0.5])}, Figure().add_subplot())
    assert not all(float(tick).is_integer() for tick in hours.get_xticks())


def test_network_draws_an_arrow_for_each_edge_of_a_directed_graph(ax: Axes) -> None:
    graph = (graphs.causal() & graphs.window(1)).bind(5)  # four links, and five loops that are not drawn
    plot.network(graph, ax)
    assert sum(text.arrow_patch is not None for text in ax.texts) == 4


def test_network_names_each_class_at_its_middle(ax: Axes) -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), 4)
    positions = [[0, 0], [0, 2], [9, 0], [9, 2]]
    plot.network(graph, ax, positions=positions, classes=torch.tensor([7, 7, 1, 1]))
    assert {text.get_text(): text.xy for text in ax.texts} == {"7": (0.0, 1.0), "1": (9.0, 1.0)}


def test_network_refuses_what_does_not_match_the_nodes(ax: Axes) -> None:
    graph = graphs.causal().bind(3)
    with pytest.raises(ValueError, match=r"positions must be \[3, 2\]"):
        plot.network(graph, ax, positions=[[0, 0]])
    with pytest.raises(ValueError, match=r"classes must be \[3\]"):
        plot.network(graph, ax, classes=torch.zeros(2))
    with pytest.raises(ValueError, match="2 x 3"):
        plot.network(graphs.complete().bind(2, 3), ax)


def test_springs_pull_linked_nodes_together() -> None:
    two_triangles = graphs.from_edges(torch.tensor([[0, 2, 4, 1, 3, 5], [2, 4, 0, 3, 5, 1]]), 6)
    at = plot.springs(two_triangles, start=torch.randn(6, 2))
    apart = np.linalg.norm(at[:, None] - at, axis=2)
    one, other = [0, 2, 4], [1, 3, 5]
    assert apart[np.ix_(one, one)].max() < apart[np.ix_(one, other)].min()


def test_springs_part_nodes_that_stand_in_one_place() -> None:
    at = plot.springs(graphs.from_edges(torch.tensor([[0], [1]]), 2), start=[[0.0, 0.0], [0.0, 0.0]])
    assert np.linalg.norm(at[0] - at[1]) > 0.1


def test_drawing_changes_no_setting_of_matplotlib(ax: Axes) -> None:
    before = dict(rcParams)
    graphs.causal().bind(8).plot(ax)
    plot.curves({"one": ([1], [1.0])}, ax)
    assert dict(rcParams) == before


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        graphs.causal().bind(3).plot()
