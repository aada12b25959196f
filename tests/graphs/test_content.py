"""Graphs built from features: hashing buckets against Reformer's formula, neighbors against brute force."""

from typing import Any

import pytest
import torch

from mpnn import graphs


@pytest.mark.parametrize("rounds", [1, 3])
def test_lsh_unites_rounds_of_argmax_over_both_signs(rounds: int) -> None:
    x = torch.randn(53, 8)
    generator = torch.Generator().manual_seed(4)
    expected = torch.zeros(53, 53, dtype=torch.bool)
    for _ in range(rounds):
        projected = x @ torch.randn(8, 3, generator=generator)
        bucket = torch.cat([projected, -projected], dim=1).argmax(dim=1)  # Kitaev et al. 2020, section 2
        expected |= bucket[:, None] == bucket
    graph = graphs.lsh(x, buckets=6, rounds=rounds, seed=4)
    assert torch.equal(graph.dense(), expected)
    assert (graph.labels is not None) == (rounds == 1)


def test_lsh_depends_on_its_seed_alone() -> None:
    x = torch.randn(40, 4)
    torch.manual_seed(1)
    first = graphs.lsh(x, 8, seed=0).dense()
    torch.manual_seed(2)
    assert torch.equal(graphs.lsh(x, 8, seed=0).dense(), first)
    assert not torch.equal(graphs.lsh(x, 8, seed=1).dense(), first)


@pytest.mark.parametrize(("n", "k"), [(53, 5), (7, 6), (7, 0), (1, 0), (0, 0)])
def test_knn_is_brute_force(n: int, k: int) -> None:
    x = torch.randn(n, 3, dtype=torch.float64)
    graph = graphs.knn(x, k)
    src, dst = graph.edge_index.view(2, n, k)
    for i in range(n):
        others = sorted((float(((x[i] - x[j]) ** 2).sum()), j) for j in range(n) if j != i)
        assert src[i].tolist() == [j for _, j in others[:k]]
        assert dst[i].tolist() == [i] * k


def test_knn_gives_ties_to_the_lower_index() -> None:
    x = torch.tensor([[0.0], [1.0], [-1.0], [1.0], [5.0]])
    src, dst = graphs.knn(x, 2).edge_index
    assert src[dst == 0].tolist() == [1, 2]
    assert src[dst == 1].tolist() == [3, 0]
    assert src[dst == 4].tolist() == [1, 3]
    many = torch.randint(0, 3, (100, 2), generator=torch.Generator().manual_seed(0)).float()  # nine places, all taken
    distance = torch.cdist(many, many).fill_diagonal_(9.0)
    assert torch.equal(graphs.knn(many, 4).edge_index[0].view(100, 4), distance.sort(dim=1, stable=True).indices[:, :4])


def test_copies_of_a_point_are_its_neighbors_and_it_is_not() -> None:
    graph = graphs.knn(torch.zeros(4, 2), 3)
    assert torch.equal(graph.dense(), ~torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_floating_point_will_do(dtype: torch.dtype) -> None:
    x = torch.arange(6.0)[:, None].to(dtype)
    assert graphs.knn(x, 1).edge_index[0].tolist() == [1, 0, 1, 2, 3, 4]
    assert torch.equal(graphs.lsh(x - 2.5, 2).dense(), graphs.documents([3, 3]).bind(6).dense())


def test_an_infinitely_far_node_is_nobodys_neighbor_while_there_are_others() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0], [float("inf")], [float("-inf")]])
    graph = graphs.knn(x, 4)
    assert torch.equal(graph.dense(), ~torch.eye(5, dtype=torch.bool))
    assert graphs.knn(x, 1).edge_index[0, :3].tolist() == [1, 0, 1]


@pytest.mark.parametrize("build", [lambda x: graphs.lsh(x, 4), lambda x: graphs.knn(x, 2)], ids=["lsh", "knn"])
def test_graphs_are_not_part_of_the_gradient(build: Any) -> None:
    x = torch.randn(9, 4, requires_grad=True)
    assert not build(x).edge_index.requires_grad


BAD = {
    "lsh(torch.zeros(3, 2), 3)": "buckets must be even, half of them for each sign of the projection; got 3",
    "lsh(torch.zeros(3, 2), 0)": "buckets must be at least 2; got 0",
    "lsh(torch.zeros(3, 2), 4, rounds=0)": "rounds must be at least 1; got 0",
    "lsh(torch.zeros(3), 4)": r"lsh needs floating-point features \[N, d\]; got torch.float32 of shape \[3\]",
    "lsh([[1.0]], 4)": r"lsh needs a tensor of features \[N, d\]; got list",
    "knn(torch.zeros(3, 2, dtype=torch.int64), 1)": r"knn needs floating-point features \[N, d\]; got torch.int64",
    "lsh(torch.zeros(3, 2), 4, seed=None)": "seed must be an integer; got None",
    "chunks(torch.zeros(1, 6).long(), 2, 6, before=-1)": "before must be at least 0; got -1",
    "chunks(torch.zeros(1, 6).long(), 2, 6.0)": "num_nodes must be an integer; got 6.0",
    "chunks(torch.zeros(1, 6).long(), 2, 6, edge_type=torch.zeros(2).long())": (
        r"edge_type must be \[1\], a type for each list; got torch.int64 of shape \[2\]"
    ),
    "knn(torch.tensor([[0.0], [float('nan')]]), 1)": "knn needs features without NaN; those of node 1 hold NaN",
    "lsh(torch.tensor([[0.0], [float('nan')]]), 2)": "lsh needs finite features; those of node 1 are not",
    "lsh(torch.tensor([[float('inf'), 1.0]]), 2)": "lsh needs finite features; those of node 0 are not",
    "knn(torch.zeros(3, 2), 3)": "k must be less than the number of nodes, 3; got 3",
    "knn(torch.zeros(3, 2), -1)": "k must be at least 0; got -1",
}


@pytest.mark.parametrize("expression", BAD)
def test_a_bad_argument_is_named(expression: str) -> None:
    with pytest.raises((ValueError, TypeError), match=BAD[expression]):
        eval(expression, {**vars(graphs), "torch": torch})


def test_chunks_attend_to_themselves_and_their_neighbors():
    graph = graphs.chunks(torch.tensor([[0, 2, 1, 3, -1, 4]]), 2, 5, before=0, after=1)
    assert graph.dense().int().tolist() == [
        [1, 1, 1, 1, 0],
        [0, 1, 0, 1, 1],
        [1, 1, 1, 1, 0],
        [0, 1, 0, 1, 1],
        [1, 0, 1, 0, 1],
    ]
    twice = graphs.chunks(torch.tensor([[0, 1], [1, 0]]), 2, 2, before=0, edge_type=torch.tensor([0, 1]))
    assert (twice.num_edges, twice.edge_type.tolist()) == (8, [0] * 4 + [1] * 4)
    with pytest.raises(ValueError, match=r"a multiple of 4; got \[1, 6\]"):
        graphs.chunks(torch.zeros(1, 6).long(), 4, 5)
