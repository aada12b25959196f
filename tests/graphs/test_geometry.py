"""Builders of points in space, against all pairs and against loops over images."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from steps import at_most
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.data import neighbor_batches
from mpnn.graph.graph import keep_edges

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


def nearest_by_sorting(at: Tensor, k: int, label: Tensor) -> Tensor:
    distance = torch.from_numpy(np.sqrt(np.square((at[:, None] - at).numpy()).sum(-1))).fill_diagonal_(torch.inf)
    return distance.masked_fill(label != label[:, None], torch.inf).sort(dim=1, stable=True).indices[:, :k]


POINTS = {
    "random": lambda n, d: torch.rand(n, d, dtype=D),
    "on a lattice": lambda n, d: torch.randint(4, (n, d)).double(),
    "two places": lambda n, d: torch.randint(2, (n, 1)).double().expand(n, d).contiguous(),
    "one place": lambda n, d: torch.zeros(n, d, dtype=D),
    "far from the origin": lambda n, d: 1e4 + torch.randint(3, (n, d)) * torch.tensor(1e-3, dtype=D),
}


@pytest.mark.parametrize("small", [0, 256], ids=["tree", "all pairs"])
@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize(("n", "d", "k"), [(90, 2, 5), (60, 12, 4), (41, 1, 9)])
def test_knn_is_that_of_all_pairs(
    points: str, n: int, d: int, k: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties go to the lower index, whatever finds the neighbors; other labels change nothing."""
    monkeypatch.setattr("mpnn.graphs.geometry._SMALL_CLOUD", small)
    at, label = POINTS[points](n, d), torch.randperm(n) % 3
    for labels in (None, label):
        expected = nearest_by_sorting(at, k, torch.zeros_like(label) if labels is None else labels)
        assert torch.equal(graphs.knn(at, k, labels=labels).edge_index[0].view(n, k), expected)


@pytest.mark.parametrize("size", [20, 60])
def test_radius_far_from_the_origin(size: int) -> None:
    """Where points lie must not matter, as long as their numbers tell them apart."""
    points = (3 * torch.rand(4 * size, 3, dtype=torch.float64) + 1e8).unflatten(0, (4, size))
    near = (points[:, :, None] - points[:, None]).square().sum(-1).sqrt() <= 1.0
    found = graphs.radius(points.flatten(0, 1), 1.0, labels=torch.arange(4).repeat_interleave(size))
    assert found.dense().equal(torch.block_diag(*near).bool() & ~torch.eye(4 * size, dtype=torch.bool))


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
    all_others = graphs.knn(at, 19, labels=label).edge_index
    assert (label[all_others[0]] == label[all_others[1]]).all()
    assert torch.equal(
        all_others.T.unique(dim=0),
        torch.cartesian_prod(*[torch.arange(60)] * 2)[
            ((label[:, None] == label) & ~torch.eye(60, dtype=torch.bool)).flatten()
        ],
    )


@pytest.mark.parametrize("order", ["batched", "of unequal sizes", "names in any order", "shuffled"])
def test_radius_of_labels_is_all_pairs_within_it(order: str) -> None:
    """Whole numbers, so that distances are exactly the radius, too. Batches of equal clouds go another way."""
    for dims in (1, 3, 9):
        sizes = [5] * 6 if order == "batched" else [1, 7, 3, 9, 2]
        label = torch.repeat_interleave(torch.tensor([-3, 0, 7, 2, 5, 40][: len(sizes)]), torch.tensor(sizes))
        label = label.sort().values if order in ("batched", "of unequal sizes") else label
        label = label[torch.randperm(len(label))] if order == "shuffled" else label
        at = torch.randint(3, (len(label), dims)).to(D)
        near = (at[:, None] - at).square().sum(-1).sqrt() <= 2**0.5
        near &= (label == label[:, None]) & ~torch.eye(len(at), dtype=torch.bool)
        assert torch.equal(graphs.radius(at, 2**0.5, labels=label).edge_index, near.nonzero().T.flip(0))


def test_a_cell_may_repeat_along_some_vectors_only() -> None:
    at = torch.tensor([[0.1, 0.1, 0.0], [0.9, 0.9, 5.0], [0.9, 0.1, -7.0]], dtype=D)
    whole = graphs.radius(at, 1.05, cell=torch.eye(3), periodic=(True, False, False))
    assert whole.edge_attr is not None
    assert (whole.edge_attr[:, 1:] == 0).all()
    assert sorted(edges_of(whole)) == [(i, i, shift, 0, 0) for i in range(3) for shift in (-1, 1)]
    flat = at * torch.tensor([1.0, 1.0, 0.0])
    row = graphs.radius(flat, 0.5, cell=torch.eye(3), periodic=(True, False, False))
    assert sorted(edges_of(row)) == [(0, 2, 1, 0, 0), (2, 0, -1, 0, 0)]
    with pytest.raises(ValueError, match="periodic must hold 3 booleans"):
        graphs.radius(at, 1.0, cell=torch.eye(3), periodic=(True,))


def test_a_periodic_graph_knows_its_cell() -> None:
    """Also as another graph that keeps its shifts, of which those of reversed edges change their sign."""
    at, cell = torch.tensor([[0.1, 0, 0], [1.9, 0, 0], [1, 1, 1]], dtype=D), 2 * torch.eye(3, dtype=D)
    graph = graphs.radius(at, 0.5, cell=cell)
    assert graphs.edge_vectors(graph, at, cell)[:, 0].tolist() == pytest.approx([-0.2, 0.2])
    half = graph.subgraph(torch.tensor([True, True, False]))
    one_way = keep_edges(graph, torch.tensor([True, False]))
    batch = next(iter(neighbor_batches(graph, torch.arange(3), [4], batch_size=3)))
    kinds = graphs.HeteroGraph({("a", "near", "a"): graph})
    sample = graphs.sample(kinds, ("a", torch.arange(3)), [4])
    others = {
        "subgraph": (half, at[:2]),
        "pickled": (pickle.loads(pickle.dumps(graph)), at),
        "reverse": (graph.reverse(), at),
        "one way": (one_way, at),
        "undirected": (one_way.undirected(), at),
        "batch": (graphs.batch([graph, graph]), torch.cat([at, at])),
        "moved": (graph.to("cpu").alias(), at),
        "neighbors": (batch.graphs[0], at[batch.sources]),
        "kinds": (sample.graph["a", "near", "a"], at[sample.nodes["a"]]),
    }
    for name, (other, positions) in others.items():
        with pytest.raises(ValueError, match=r"was built in a cell, .* edge_vectors\(graph, positions, cell\)"):
            graphs.edge_vectors(other, positions)
        length = graphs.edge_vectors(other, positions, cell).norm(dim=1)
        assert length.tolist() == pytest.approx([0.2] * other.num_edges), name
    assert graph.reverse().edge_index.tolist() == graph.edge_index.flip(0).tolist()
    open_graph = graphs.radius(at, 0.5)
    assert not open_graph.periodic
    assert graphs.edge_vectors(open_graph, at).shape == (0, 3)


def test_crystals_of_a_batch_have_cells_of_their_own() -> None:
    positions = [2 * torch.rand(3, 3, dtype=D), 3 * torch.rand(4, 3, dtype=D)]
    cells = torch.stack([2 * torch.eye(3, dtype=D), 3 * CELL])
    alone = [graphs.radius(p, 1.8, cell=cell) for p, cell in zip(positions, cells, strict=True)]
    expected = torch.cat([graphs.edge_vectors(*one) for one in zip(alone, positions, cells, strict=True)])
    together, at, label = graphs.batch(alone), torch.cat(positions), torch.tensor([0] * 3 + [1] * 4)
    assert together.batch_sizes == (3, 4)
    torch.testing.assert_close(graphs.edge_vectors(together, at, cells), expected)
    at_once = graphs.radius(at, 1.8, cell=cells, labels=label)
    assert sorted(edges_of(at_once)) == sorted(edges_of(together))
    torch.testing.assert_close(graphs.edge_vectors(at_once, at, cells, labels=label), expected)
    with pytest.raises(ValueError, match="cell has 2 cells, and the graph is one graph: pass labels"):
        graphs.edge_vectors(at_once, at, cells)
    with pytest.raises(ValueError, match="pass labels from 0 to 1"):
        graphs.radius(at, 1.8, cell=cells)


@pytest.mark.parametrize("basis", [[[0.0, 0, 0]], [[0.0, 0, 0], [0.5, 0.5, 0.5]]], ids=["cubic", "CsCl"])
def test_only_the_exact_reverse_is_the_way_back_in_a_periodic_line_graph(basis: list[list[float]]) -> None:
    """As in a supercell, in which every image is an atom of its own."""
    atoms, r = torch.tensor(basis), 1.1 if len(basis) == 1 else 0.9
    one = graphs.radius(atoms, r, cell=torch.eye(3))
    corners = torch.cartesian_prod(*[torch.arange(4.0)] * 3)
    many = graphs.radius((corners[:, None] + atoms).flatten(0, 1), r, cell=4 * torch.eye(3))
    assert many.num_edges == 64 * one.num_edges
    pairs, of_supercell = (graphs.line_graph(graph, backtrack=False).num_edges for graph in (one, many))
    assert of_supercell == 64 * pairs


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
    many, label = torch.rand(50, 3), torch.randint(3, (50,))
    apart = graphs.farthest(many, 7, labels=label).view(3, 7)
    for k, chosen in enumerate(apart):
        own = (label == k).nonzero().squeeze(1)
        assert torch.equal(chosen, own[graphs.farthest(many[own], 7)])
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
