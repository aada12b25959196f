"""Encodings: equal to PyTorch Geometric's transforms and to their formulas, and the same at each call."""

from __future__ import annotations

from inspect import signature
from itertools import product

import pytest
import torch
from error_bound import error_bound
from scipy.sparse.linalg import eigsh
from torch import Tensor
from torch.testing import assert_close

from mpnn import Graph, graphs
from mpnn.graphs import encodings

SYSTEM = "Graph-BERT, encodings"
N = 20
BOUND = error_bound(1, 16)


@pytest.fixture
def graph() -> Graph:
    """Connected and undirected, with no symmetry: a ring with some chords."""
    ring = torch.stack([torch.arange(N), (torch.arange(N) + 1) % N])
    chords = torch.tensor([[0, 1, 2, 2, 5, 7, 11], [4, 9, 6, 15, 13, 17, 18]])
    return graphs.from_edges(torch.cat([ring, chords], 1), N).undirected()


@pytest.fixture
def directed() -> Graph:
    """0 -> 1 -> 2 -> 0, a way out of it 2 -> 3 from which there is none back, a loop at 3, and nothing at 4."""
    return graphs.from_edges([[0, 1, 2, 2, 3], [1, 2, 0, 3, 3]], 5)


def renumbered(graph: Graph, new: Tensor) -> Graph:
    """Node i of the graph is node new[i]."""
    return graphs.from_edges(new[graph.edge_index], graph.num_dst)


def laplacian_matrix(graph: Graph) -> Tensor:
    a = graph.dense().double()
    scale = a.sum(1).rsqrt()
    return torch.eye(len(a), dtype=torch.float64) - scale[:, None] * a * scale


# -------------------------------------------------------------------------------------------------- Laplacian


def test_laplacian_equals_pyg_up_to_the_sign(graph: Graph, measured) -> None:
    pyg = pytest.importorskip("torch_geometric")
    data = pyg.data.Data(edge_index=graph.edge_index, num_nodes=N)
    theirs = pyg.transforms.AddLaplacianEigenvectorPE(5, is_undirected=True)(data).laplacian_eigenvector_pe
    ours = encodings.laplacian(graph, 5)
    sign = (ours * theirs).sum(0).sign()
    measured(SYSTEM, "PyTorch Geometric AddLaplacianEigenvectorPE", (ours - sign * theirs).abs().max(), BOUND)


def test_laplacian_vectors_are_eigenvectors_with_their_largest_entry_positive(graph: Graph) -> None:
    vectors = encodings.laplacian(graph, 6).double()
    matrix = laplacian_matrix(graph)
    values = torch.linalg.eigvalsh(matrix)[1:7]
    assert_close(matrix @ vectors, vectors * values, atol=1e-6, rtol=0)
    assert_close(vectors.T @ vectors, torch.eye(6, dtype=torch.float64), atol=1e-6, rtol=0)
    assert (vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all()


def test_laplacian_follows_the_nodes_when_they_are_renumbered(graph: Graph) -> None:
    new = torch.randperm(N)
    ours, theirs = encodings.laplacian(graph, 5), encodings.laplacian(renumbered(graph, new), 5)
    assert_close(theirs[new], ours)


@pytest.mark.parametrize("n", [7, 12, 601])
def test_laplacian_repeats_bit_by_bit_where_eigenvalues_coincide(n: int) -> None:
    """A ring has each eigenvalue twice, but for the ends; 601 nodes are for the sparse solver."""
    ring = graphs.from_edges(torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])).undirected()
    first = encodings.laplacian(ring, 4)
    assert torch.equal(encodings.laplacian(ring, 4), first)
    twice = torch.cos(2 * torch.pi * torch.arange(n, dtype=torch.float64) / n) * (2 / n) ** 0.5
    assert_close(first[:, 0].double(), twice, atol=1e-6, rtol=0)  # node 0 lies closest, and tells the basis


@pytest.mark.skipif("rng" not in signature(eigsh).parameters, reason="scipy before 1.17 begins again at random")
def test_laplacian_of_a_large_star_repeats_bit_by_bit() -> None:
    """All its leaves are alike: one eigenvalue has 698 eigenvectors, of which the solver finds a few."""
    star = graphs.from_edges(torch.stack([torch.zeros(699, dtype=torch.int64), torch.arange(1, 700)])).undirected()
    assert torch.equal(encodings.laplacian(star, 4), encodings.laplacian(star, 4))


def test_each_graph_of_a_batch_has_the_laplacian_that_it_has_alone(graph: Graph) -> None:
    triangle, lonely = graphs.complete().bind(3), graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 2)
    alone = [encodings.laplacian(g, 4) for g in (graph, triangle, lonely)]
    assert_close(encodings.laplacian(graphs.batch([graph, triangle, lonely]), 4), torch.cat(alone))
    assert not alone[1][:, 2:].any(), "a triangle has two eigenvectors beside the first"
    assert not alone[2].any(), "nodes without edges have none"


@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 2), (2, 5), (3, 0)])
def test_laplacian_of_tiny_graphs(n: int, k: int) -> None:
    assert encodings.laplacian(graphs.complete().bind(n), k).shape == (n, k)


def test_laplacian_refuses_edges_that_go_one_way(directed: Graph) -> None:
    with pytest.raises(ValueError, match=r"2 -> 0 does not; call graph.undirected\(\)"):
        encodings.laplacian(directed, 2)


# ------------------------------------------------------------------------------------------------ random walks


def test_random_walks_equal_pyg(graph: Graph, directed: Graph, measured) -> None:
    pyg = pytest.importorskip("torch_geometric")
    for g in (graph, directed):
        data = pyg.data.Data(edge_index=g.edge_index, num_nodes=g.num_dst)
        theirs = pyg.transforms.AddRandomWalkPE(9)(data).random_walk_pe
        error = (encodings.random_walk(g, 9) - theirs).abs().max()
        measured(SYSTEM, "PyTorch Geometric AddRandomWalkPE", error, BOUND)


def test_random_walk_without_edges_or_nodes() -> None:
    assert not encodings.random_walk(graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 3), 4).any()
    assert encodings.random_walk(graphs.complete().bind(0), 4).shape == (0, 4)
    assert encodings.random_walk(graphs.complete().bind(3), 0).shape == (3, 0)


# ------------------------------------------------------------------------------------------- Weisfeiler-Lehman


@pytest.mark.parametrize("rounds", [0, 1, 2, 4])
def test_roles_part_the_nodes_as_pyg_does(graph: Graph, rounds: int, measured) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    both = graphs.batch([graph, graphs.from_edges(graphs.grid(4, 5).bind(20).edge_index)])
    theirs = labels = torch.arange(2 * N) % 2
    for _ in range(rounds):
        theirs = pyg.WLConv()(theirs, both.edge_index)
    ours = encodings.weisfeiler_lehman(both, rounds, labels)
    pairs_apart = ((ours[:, None] == ours) != (theirs[:, None] == theirs)).sum().item()
    measured(SYSTEM, "PyTorch Geometric WLConv", pairs_apart, bound=0)
    assert set(ours.tolist()) == set(range(int(ours.max()) + 1))


def test_roles_of_a_path_by_hand() -> None:
    """Ends are told from the middle in the first round, and those next to an end in the second."""
    path = graphs.from_edges([[0, 1, 2, 3], [1, 2, 3, 4]]).undirected()
    assert encodings.weisfeiler_lehman(path, 1).tolist() == [0, 1, 1, 1, 0]
    assert encodings.weisfeiler_lehman(path, 2).tolist() == [0, 1, 2, 1, 0]
    assert encodings.weisfeiler_lehman(path, 9).tolist() == [0, 1, 2, 1, 0]


def test_roles_belong_to_surroundings_and_not_to_numbers(graph: Graph) -> None:
    new = torch.randperm(N)
    roles = encodings.weisfeiler_lehman(graph, 3)
    assert torch.equal(encodings.weisfeiler_lehman(renumbered(graph, new), 3)[new], roles)
    twice = encodings.weisfeiler_lehman(graphs.batch([graph, renumbered(graph, new)]), 3)
    assert torch.equal(twice[:N], twice[N:][new]), "a copy in the batch has the same roles"


def test_roles_refuse_labels_that_are_none(graph: Graph) -> None:
    with pytest.raises(TypeError, match=r"labels must be integers; got torch\.float32"):
        encodings.weisfeiler_lehman(graph, 1, torch.zeros(N))
    with pytest.raises(ValueError, match=r"one integer for each of 20 nodes; got shape \[3\]"):
        encodings.weisfeiler_lehman(graph, 1, torch.zeros(3, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------- shortest paths


def test_shortest_paths_by_hand(directed: Graph) -> None:
    away = 4  # max_distance + 1: no path
    expected = [
        [0, 2, 1, away, away],  # node 0 attends to 1 by way of 2, and to 2
        [1, 0, 2, away, away],
        [2, 1, 0, away, away],
        [3, 2, 1, 0, away],
        [away, away, away, away, 0],
    ]
    assert encodings.shortest_paths(directed, 3).tolist() == expected
    clipped = [[min(d, 2) if d < away else 3 for d in row] for row in expected]
    assert encodings.shortest_paths(directed, 2).tolist() == clipped


def test_path_edges_walk_back_from_the_destination(graph: Graph, directed: Graph) -> None:
    for g in (graph, directed):
        src, dst = g.edge_index.tolist()
        hops, paths = encodings.shortest_paths(g, 99), encodings.path_edges(g, 4)
        for i, j in product(range(g.num_dst), repeat=2):
            length, at = int(hops[i, j]), i
            edges = [e for e in paths[i, j].tolist() if e >= 0]
            assert len(edges) == (0 if length == 100 else min(length, 4))
            for e in edges:
                assert dst[e] == at
                at = src[e]
            assert length > 4 or at == (j if length else i)


def test_of_several_shortest_paths_the_first_edges_count() -> None:
    """From 0 to 3 over 1 or over 2; edge 1 comes before edge 3."""
    square = graphs.from_edges([[0, 1, 0, 2], [2, 3, 1, 3]])
    assert encodings.path_edges(square, 3)[3, 0].tolist() == [1, 2, -1]


# ------------------------------------------------------------------------------------------------ all the others


@pytest.mark.parametrize("alpha", [0.15, 0.5, 1.0])
def test_pagerank_equals_the_formula(graph: Graph, alpha: float, measured) -> None:
    a = graph.dense().double()
    expected = alpha * torch.linalg.inv(torch.eye(N, dtype=torch.float64) - (1 - alpha) * a / a.sum(0))
    found = encodings.pagerank(graph, alpha)
    measured(SYSTEM, "formula", (found.double() - expected).abs().max(), BOUND)
    assert_close(found.sum(0), torch.ones(N))  # every walk stops somewhere


def test_degrees_by_hand(directed: Graph) -> None:
    assert encodings.degrees(directed).tolist() == [[1, 1], [1, 1], [1, 2], [2, 1], [0, 0]]
    assert encodings.degrees(directed, most=1).max() == 1


def test_random_features_follow_their_seed_alone() -> None:
    state = torch.get_rng_state()
    first = encodings.random_features(5, 3, seed=1)
    assert torch.equal(encodings.random_features(5, 3, seed=1), first)
    assert not torch.equal(encodings.random_features(5, 3, seed=2), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("encode", "what"),
    [
        (lambda g: encodings.laplacian(g, 2), "the Laplacian"),
        (lambda g: encodings.random_walk(g, 2), "a random walk"),
        (lambda g: encodings.weisfeiler_lehman(g, 2), "roles"),
        (lambda g: encodings.shortest_paths(g, 2), "a shortest path"),
        (encodings.pagerank, "PageRank"),
        (encodings.degrees, "degrees"),
    ],
)
def test_two_sets_of_nodes_are_refused(encode, what: str) -> None:
    with pytest.raises(ValueError, match=f"{what} needs? one set of nodes; the graph is 2 x 3"):
        encode(graphs.complete().bind(2, 3))


@pytest.mark.parametrize(
    "encode",
    [
        encodings.laplacian,
        encodings.random_walk,
        encodings.weisfeiler_lehman,
        encodings.shortest_paths,
        encodings.path_edges,
        encodings.degrees,
        lambda graph, size: encodings.random_features(3, size, 0),
        lambda graph, size: encodings.random_features(size, 2, 0),
    ],
)
def test_sizes_are_integers_and_not_negative(encode, graph: Graph) -> None:
    with pytest.raises(ValueError, match="must be at least 0; got -1"):
        encode(graph, -1)
    with pytest.raises(TypeError, match=r"must be an integer; got 1\.5"):
        encode(graph, 1.5)


def test_structured_graphs_are_encoded_too() -> None:
    path = graphs.from_edges([[0, 1, 2], [1, 2, 3]]).undirected()
    same = graphs.window(1) - graphs.identity()
    assert_close(encodings.laplacian(same.bind(4), 2), encodings.laplacian(path, 2))
    assert torch.equal(encodings.shortest_paths(same.bind(4), 9), encodings.shortest_paths(path, 9))
