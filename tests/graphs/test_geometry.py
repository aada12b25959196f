"""Builders of points in space, against all pairs and against loops over images."""

import itertools

import pytest
import torch
from steps import at_most
from torch import Tensor

from mpnn import Graph, graphs

D = torch.float64


def edges_of(graph: Graph) -> list[tuple[int, ...]]:
    shifts = torch.zeros(graph.num_edges, 0) if graph.edge_attr is None else graph.edge_attr
    return [(*pair, *shift) for pair, shift in zip(graph.edge_index.T.tolist(), shifts.long().tolist(), strict=True)]


@pytest.mark.parametrize("labeled", [False, True])
@pytest.mark.parametrize("n", [0, 1, 37])
def test_radius_is_all_pairs_within_it(n: int, labeled: bool) -> None:
    at, label = torch.rand(n, 3, dtype=D), torch.randint(3, (n,))
    near = (torch.cdist(at, at) <= 0.4) & ~torch.eye(n, dtype=torch.bool)
    if labeled:
        near &= label == label[:, None]
    assert torch.equal(graphs.radius(at, 0.4, labels=label if labeled else None).edge_index, near.nonzero().T.flip(0))


CELL = torch.tensor([[1.1, 0, 0], [0.3, 0.9, 0], [-0.2, 0.4, 1.3]], dtype=D)


@pytest.mark.parametrize("r", [0.5, 1.7], ids=["below the cell", "beyond the cell"])
def test_radius_sees_images_in_a_skewed_cell(r: float) -> None:
    """Points lie outside of the cell, too. Each image is an edge, and so are those of the point itself."""
    at = 4 * torch.rand(5, 3, dtype=D) - 1.5
    expected = []
    shifts = torch.tensor(list(itertools.product(range(-9, 10), repeat=3)))
    for i, j in itertools.product(range(5), range(5)):
        near = (at[j] + shifts.double() @ CELL - at[i]).norm(dim=1) <= r
        expected += [(j, i, *shift) for shift in shifts[near].tolist() if i != j or any(shift)]
    graph = graphs.radius(at, r, cell=CELL)
    assert sorted(edges_of(graph)) == sorted(expected)
    assert graph.edge_attr is not None
    assert torch.equal(graph.edge_index[1], graph.edge_index[1].sort().values)
    length = graphs.edge_vectors(graph, at, CELL).norm(dim=1)
    assert length.min() > 0
    assert length.max() <= r


def test_vectors_of_edges_have_gradients_by_positions_and_cell() -> None:
    at, cell = torch.rand(4, 3, dtype=D, requires_grad=True), CELL.clone().requires_grad_()
    graph = graphs.radius(at, 0.9, cell=cell)
    assert graph.num_edges > 4

    def length(at: Tensor, cell: Tensor) -> Tensor:
        return graphs.edge_vectors(graph, at, cell).norm(dim=1)

    assert torch.autograd.gradcheck(length, (at, cell))
    open_graph = graphs.radius(at, 0.9)
    src, dst = open_graph.edge_index
    torch.testing.assert_close(graphs.edge_vectors(open_graph, at), at[src] - at[dst])
    with pytest.raises(ValueError, match="the graph has no shifts"):
        graphs.edge_vectors(open_graph, at, cell)


def test_a_hundred_thousand_points_take_few_steps() -> None:
    at = torch.rand(100_000, 3)
    with at_most(calls=2_000, megabytes=400):
        graph = graphs.radius(at, 0.03)
        near = graphs.knn(at, 8)
    assert graph.num_edges > 800_000
    assert near.num_edges == 800_000


@pytest.mark.parametrize("whole", [False, True], ids=["random", "on a lattice, with ties"])
def test_knn_by_a_tree_is_that_of_all_pairs(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    at = torch.randint(4, (90, 2)).double() if whole else torch.rand(90, 2, dtype=D)
    expected = graphs.knn(at, 5)
    monkeypatch.setattr("mpnn.graphs.content._FEW_POINTS", 10)
    assert torch.equal(graphs.knn(at, 5).edge_index, expected.edge_index)


def test_knn_stays_within_labels() -> None:
    at, label = torch.rand(60, 3), torch.arange(60) % 3
    graph = graphs.knn(at, 4, labels=label)
    for k in range(3):
        own = (label == k).nonzero()[:, 0]
        alone = graphs.knn(at[own], 4)
        of_label = graph.edge_index[:, label[graph.edge_index[1]] == k]
        assert torch.equal(of_label, own[alone.edge_index])
    with pytest.raises(ValueError, match="less than the number of nodes of each label, at least 20; got 20"):
        graphs.knn(at, 20, labels=label)


@pytest.mark.parametrize("backtrack", [True, False])
def test_line_graph_joins_edges_that_follow_one_another(backtrack: bool) -> None:
    graph = graphs.from_edges(torch.randint(0, 6, (2, 25)), 6)
    edges = graph.edge_index.T.tolist()
    expected = [
        (a, b) for b, (j, k) in enumerate(edges) for a, (i, at) in enumerate(edges) if at == j and (backtrack or i != k)
    ]
    assert sorted(edges_of(graphs.line_graph(graph, backtrack))) == sorted(expected)
    with pytest.raises(ValueError, match="one set of nodes"):
        graphs.line_graph(graphs.from_edges([[0], [0]], num_src=2, num_dst=1))


def test_farthest_points_are_far_apart() -> None:
    at = torch.tensor([[0.0], [1.0], [10.0], [4.0], [10.0]])
    assert graphs.farthest(at, 4).tolist() == [0, 2, 3, 1]
    assert graphs.farthest(torch.zeros(3, 2), 3).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="at most the number of points, 5; got 6"):
        graphs.farthest(at, 6)


@pytest.mark.parametrize("n", [1, 2, 31])
def test_an_expander_is_symmetric_and_reaches_everything(n: int) -> None:
    graph = graphs.expander(4, seed=1).bind(n)
    assert torch.equal(graph.dense(), graph.dense().T)
    assert graph.degree().max() <= 4
    assert not graph.dense().diagonal().any()
    assert graph.power(5).dense().all() or n < 3
    assert graphs.expander(4, seed=1).bind(n).edge_index.equal(graph.edge_index)
    with pytest.raises(ValueError, match="degree must be even"):
        graphs.expander(3)


MISTAKES = {
    "no positions": (lambda: graphs.radius(torch.zeros(3), 1.0), "needs floating-point positions"),
    "no coordinates": (lambda: graphs.radius(torch.zeros(3, 0), 1.0), r"positions \[N, d\]; got \[3, 0\]"),
    "NaN": (lambda: graphs.radius(torch.tensor([[0.0], [float("nan")]]), 1.0), "those of point 1 are not all finite"),
    "a radius of 0": (lambda: graphs.radius(torch.zeros(3, 2), 0), "r must be a positive number; got 0"),
    "a flat cell": (lambda: graphs.radius(torch.zeros(3, 2), 1.0, cell=torch.ones(2, 2)), "cell must be an invertible"),
    "labels": (lambda: graphs.radius(torch.zeros(3, 2), 1.0, labels=torch.zeros(2)), r"labels must be integers \[3\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        call()
