"""Graphs drawn from graphs: visits of walks are what powers of the transition matrix say, and absent edges are
absent."""

from __future__ import annotations

import pytest
import torch

from mpnn import graphs
from mpnn.graphs import absent_edges, edges_into, from_edges, random_walk_neighbors


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------- random walks


def test_a_walk_without_choice_is_counted_exactly() -> None:
    """Round a ring of four, 10 walks of 3 steps visit each of the three others 10 times, and never come home."""
    ring = from_edges([[1, 2, 3, 0], [0, 1, 2, 3]])
    found = random_walk_neighbors(ring, k=3, walks=10, length=3)
    assert torch.equal(found.dense(), ~torch.eye(4, dtype=torch.bool))
    assert found.edge_attr.tolist() == [10.0] * 12


def test_walks_end_at_nodes_without_in_neighbors() -> None:
    found = random_walk_neighbors(from_edges([[1], [0]], 3), k=5, walks=4, length=6)
    assert found.edge_index.tolist() == [[1], [0]]
    assert found.edge_attr.tolist() == [4.0]


def test_visits_follow_powers_of_the_transition_matrix() -> None:
    """The expectation is walks * sum_t (P^t)_iv. A walk visits v between 0 and 3 times, so the mean of 4,000 stays
    within 0.15 of it but for odds of 2 exp(-2 * 4000 * 0.15^2 / 3^2) = 4e-9 (Hoeffding)."""
    edge_index = torch.randint(0, 6, (2, 14), generator=generator())
    graph = from_edges(edge_index, 6)
    count = torch.zeros(6, 6, dtype=torch.float64).index_put(
        (edge_index[1], edge_index[0]), torch.ones(14).double(), True
    )
    step = count / count.sum(1, keepdim=True).clamp(min=1)
    expected = step + step @ step + step @ step @ step
    found = random_walk_neighbors(graph, k=6, walks=4000, length=3, seed=3)
    visits = torch.zeros(6, 6, dtype=torch.float64)
    visits[found.edge_index[1], found.edge_index[0]] = found.edge_attr.double() / 4000
    off = ~torch.eye(6, dtype=torch.bool)
    assert ((visits - expected)[off].abs() < 0.15).all()
    assert (visits[off][expected[off] == 0] == 0).all()


def test_items_reach_items_through_the_users_they_share() -> None:
    """Items 0 and 1 share user 0; item 2 has user 1 to itself; item 3 has no user."""
    items_hear_users = from_edges([[0, 0, 1], [0, 1, 2]], num_src=2, num_dst=4)
    found = random_walk_neighbors(items_hear_users, k=2, walks=50, length=1)
    assert (found.num_dst, found.num_src) == (4, 4)
    assert sorted(zip(*found.edge_index.tolist(), strict=True)) == [(0, 1), (1, 0)]
    assert ((found.edge_attr > 5) & (found.edge_attr < 45)).all()  # half of 50 each; 1e-9 odds of being off by 20


def test_the_k_most_visited_nodes_become_neighbors_and_ties_go_to_the_lower_index() -> None:
    """From node 0: to 3 along two of four edges, to 1 and to 2 along one each."""
    star = from_edges([[3, 3, 2, 1], [0, 0, 0, 0]], 4)
    most = random_walk_neighbors(star, k=1, walks=400, length=1)
    assert most.edge_index.tolist() == [[3], [0]]
    path = from_edges([[2, 1], [0, 2]], 3)
    assert random_walk_neighbors(path, k=1, walks=5, length=2).edge_index.tolist() == [[1, 1], [0, 2]]


def test_the_seed_decides() -> None:
    graph = from_edges(torch.randint(0, 30, (2, 90), generator=generator()), 30)
    one, same, other = (random_walk_neighbors(graph, 4, walks=20, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.edge_index, same.edge_index)
    assert torch.equal(one.edge_attr, same.edge_attr)
    assert not torch.equal(one.edge_attr, other.edge_attr)


# ---------------------------------------------------------------------------------------------------- absent edges


def test_absent_edges_are_no_edges_and_no_loops() -> None:
    graph = from_edges(torch.randint(0, 8, (2, 40), generator=generator()), 8)
    src, dst = absent_edges(graph, 200, generator())
    assert len(src) == 200
    assert not graph.dense()[dst, src].any()
    assert (src != dst).all()
    there = torch.zeros(8, 8, dtype=torch.bool)
    there[dst, src] = True
    missing = ~graph.dense() & ~torch.eye(8, dtype=torch.bool)
    assert torch.equal(there, missing)  # 200 draws of 20 or so pairs find them all
    assert torch.equal(absent_edges(graph, 9, generator(4)), absent_edges(graph, 9, generator(4)))


def test_between_two_sets_every_pair_counts() -> None:
    graph = from_edges([[0, 1], [0, 1]], num_src=2, num_dst=2)
    alone = from_edges([[0, 0], [0, 1]], num_src=1, num_dst=3)
    assert absent_edges(alone, 3, generator()).tolist() == [[0, 0, 0], [2, 2, 2]]
    assert set(zip(*absent_edges(graph, 20, generator()).tolist(), strict=True)) == {(0, 1), (1, 0)}
    assert absent_edges(graph, 0).shape == (2, 0)


def test_the_few_absent_pairs_of_a_nearly_full_graph_are_not_searched_among_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, draw, draws = 3000, torch.randint, []
    missing = torch.tensor([[7, 0, 2999, 5], [2000, 1, 0, 5]])  # the last a node and itself
    graph = graphs.complete().bind(n) - from_edges(missing, n)
    monkeypatch.setattr(torch, "randint", lambda *args, **given: (draws.append(args[-1]), draw(*args, **given))[1])
    drawn = absent_edges(graph, 300, generator())
    assert draws == [(300,)]
    pairs, count = torch.unique(drawn, dim=1, return_counts=True)
    assert {*zip(*pairs.tolist(), strict=True)} == {(7, 2000), (0, 1), (2999, 0)}
    assert count.min() > 60  # a hundred are expected, with a deviation of 8
    wide = graphs.complete().bind(4, n) - from_edges([[9], [3]], num_src=n, num_dst=4)
    assert absent_edges(wide, 2, generator()).tolist() == [[9, 9], [3, 3]]


def test_where_every_pair_is_an_edge_there_is_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match=r"every pair of .* is an edge already"):
        absent_edges(graphs.complete().bind(3), 1)
    with pytest.raises(ValueError, match=r"every pair of .* is an edge already"):
        absent_edges(graphs.complete().bind(3) - graphs.identity().bind(3), 1)


def test_arguments_are_checked() -> None:
    graph = from_edges([[0], [1]], 2)
    with pytest.raises(ValueError, match="walks must be at least 1; got 0"):
        random_walk_neighbors(graph, 1, walks=0)
    with pytest.raises(TypeError, match="seed must be an integer; got None"):
        random_walk_neighbors(graph, 1, seed=None)
    with pytest.raises(ValueError, match="count must be at least 0; got -1"):
        absent_edges(graph, -1)


# ---------------------------------------------------------------------------------------------------- edges as nodes


def test_nodes_receive_from_their_edges() -> None:
    graph = from_edges([[0, 0, 1], [1, 2, 2]])
    assert edges_into(graph).edge_index.tolist() == [[0, 1, 2], [1, 2, 2]]
