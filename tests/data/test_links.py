"""Links held out for link prediction."""

from __future__ import annotations

import pytest
import torch

from mpnn import Graph, graphs
from mpnn.data import LinkSplit, split_links, split_relation
from mpnn.train.link_predictor import auc


def pairs(edges: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(edge) for edge in edges.T.tolist()}


def ring(size: int) -> torch.Tensor:
    i = torch.arange(size)
    return torch.stack([i, (i + 1) % size])


def test_no_held_out_link_is_in_the_training_graph_in_either_direction() -> None:
    edges = torch.cat([ring(40), ring(40).flip(0), torch.tensor([[3], [3]])], 1)  # and a self-loop
    split = split_links(graphs.from_edges(edges, edge_attr=torch.arange(81.0)), 0.1, 0.2)
    assert [part.shape[1] for part in (split.train, split.val, split.test)] == [28, 4, 8]
    every = pairs(split.train) | pairs(split.val) | pairs(split.test)
    assert every == {tuple(sorted(edge)) for edge in ring(40).T.tolist()}
    known = pairs(split.graph.edge_index)
    both = pairs(split.train) | pairs(split.train.flip(0)) | {(3, 3)}
    assert known == both
    for edge, attribute in zip(split.graph.edge_index.T.tolist(), split.graph.edge_attr.tolist(), strict=True):
        assert edges[:, int(attribute)].tolist() == edge
    absent = pairs(split.val_absent) | pairs(split.test_absent)
    assert not absent & pairs(edges)


def test_a_directed_graph_holds_out_a_link_and_its_reverse_together() -> None:
    edges = torch.cat([ring(20), ring(20).flip(0), torch.tensor([[3], [7]])], 1)  # 3 -> 7 has no reverse
    split = split_links(graphs.from_edges(edges), 0.1, 0.2, directed=True)
    parts = [pairs(part) for part in (split.train, split.val, split.test)]
    assert set.union(*parts) == pairs(edges)
    assert sum(map(len, parts)) == 41
    assert pairs(split.graph.edge_index) == parts[0]
    for part in parts:
        assert {(j, i) for i, j in part} & pairs(edges) <= part


def random_graph(size: int, count: int, seed: int) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    return graphs.from_edges(torch.randint(size, (2, count), generator=generator), size)


def splits() -> dict[str, LinkSplit]:
    """A split of each kind, of graphs in which every pair of nodes is as likely to be linked."""
    one_way = random_graph(300, 9000, 0)
    ends = torch.stack([torch.randint(300, (9000,)), torch.randint(200, (9000,))])
    bipartite = graphs.from_edges(ends, num_src=300, num_dst=200)
    symmetric = one_way.undirected()
    both = graphs.HeteroGraph({("user", "buys", "item"): bipartite, ("item", "bought by", "user"): bipartite.reverse()})
    time = torch.randint(50, (one_way.num_edges,))
    typed = graphs.from_edges(one_way.edge_index, 300, edge_type=torch.randint(7, (9000,)))
    return {
        "undirected": split_links(symmetric, 0.2, 0.2),
        "directed": split_links(one_way, 0.2, 0.2, directed=True),
        "symmetric, as directed": split_links(symmetric, 0.2, 0.2, directed=True),
        "in time": split_links(one_way, 0.2, 0.2, times=time),
        "directed, in time": split_links(one_way, 0.2, 0.2, times=time, directed=True),
        "users and items": split_links(bipartite, 0.2, 0.2),
        "of types": split_links(typed, 0.2, 0.2, directed=True),
        "a relation": split_relation(both, ("user", "buys", "item"), 0.2, 0.2)[1],
    }


# What a model could tell a link from an absent pair by, if the split leaked it.
LEAKS = {
    "orientation": lambda graph, pair: (pair[0] < pair[1]).double(),
    "numbers": lambda graph, pair: pair[0].double() - pair[1],
    "parity": lambda graph, pair: ((pair[0] + pair[1]) % 2).double(),
    "position": lambda graph, pair: torch.arange(pair.shape[1]).double(),
    "degree": lambda graph, pair: graph.reverse().degree()[pair[0]] + graph.degree()[pair[1]].double(),
    "reverse": lambda graph, pair: torch.from_numpy(graph.reverse().runs.contains(*pair.flip(0).numpy())).double(),
    "itself": lambda graph, pair: torch.from_numpy(graph.runs.contains(*pair.flip(0).numpy())).double(),
}


def test_nothing_but_the_links_tells_them_from_absent_pairs() -> None:
    for kind, split in splits().items():
        square = split.graph.num_dst == split.graph.num_src
        for name, leak in LEAKS.items():
            if name == "reverse" and not square:
                continue
            for held, absent in ((split.val, split.val_absent), (split.test, split.test_absent)):
                assert held.shape == absent.shape
                error = (1 / (6 * held.shape[1])) ** 0.5  # of the AUC, if it is chance
                found = auc(leak(split.graph, held), leak(split.graph, absent))
                assert abs(found - 0.5) < 4 * error, f"{kind}: {name} scores {found:.3f}"


def test_absent_pairs_are_distinct_and_linked_in_no_part() -> None:
    for kind, split in splits().items():
        if split.train_type is not None:
            continue  # two nodes have links of several types
        parts = [pairs(x) for x in (split.train, split.val, split.test, split.val_absent, split.test_absent)]
        sizes = [x.shape[1] for x in (split.train, split.val, split.test, split.val_absent, split.test_absent)]
        assert len(set.union(*parts)) == sum(sizes), kind
    path = graphs.from_edges([[0, 1, 2], [1, 2, 3]]).undirected()
    for seed in range(20):  # two of three absent pairs
        split = split_links(path, 0.34, 0.34, seed=seed)
        assert pairs(split.val_absent) != pairs(split.test_absent)


def test_a_split_in_time_trains_on_the_past() -> None:
    edges, time = torch.tensor([[0, 1, 2, 3, 0, 4, 5], [1, 2, 3, 4, 1, 5, 6]]), torch.tensor([1, 1, 2, 3, 9, 4, 4])
    split = split_links(graphs.from_edges(edges), 0.17, 0.17, times=time)
    assert pairs(split.train) == {(0, 1), (1, 2), (2, 3)}
    assert pairs(split.val) == {(3, 4)}
    assert pairs(split.test) == {(4, 5), (5, 6)}  # both are of time 4
    assert split.graph.edge_index.T.tolist() == [[0, 1], [1, 2], [2, 3]]  # without the repetition at time 9


def test_a_relation_and_its_reverse_lose_the_same_links() -> None:
    buys = graphs.from_edges(torch.randint(30, (2, 200)), num_src=30, num_dst=40)
    likes = graphs.from_edges(torch.randint(30, (2, 50)), num_src=30, num_dst=40)
    whole = graphs.HeteroGraph(
        {("u", "buys", "i"): buys, ("i", "bought by", "u"): buys.reverse(), ("u", "likes", "i"): likes}
    )
    known, split = split_relation(whole, ("u", "buys", "i"), 0.1, 0.1)
    assert pairs(known["u", "buys", "i"].edge_index) == pairs(split.train)
    assert pairs(known["i", "bought by", "u"].edge_index) == pairs(split.train.flip(0))
    held_out = pairs(torch.cat([split.val, split.test, split.val_absent, split.test_absent], 1))
    assert pairs(known["u", "likes", "i"].edge_index) == pairs(likes.edge_index) - held_out
    with pytest.raises(KeyError, match="there is no relation"):
        split_relation(whole, ("u", "sells", "i"))


def test_links_of_typed_edges_are_triples() -> None:
    edges = random_graph(30, 600, 1).edge_index
    types = torch.randint(4, (600,), generator=torch.Generator().manual_seed(2))
    whole = graphs.from_edges(edges, 30, edge_type=types)
    split = split_links(whole, 0.2, 0.2, directed=True)
    triples = {(int(i), int(t), int(j)) for (i, j), t in zip(edges.T, types, strict=True) if i != j}
    parts = [
        {(int(i), int(t), int(j)) for (i, j), t in zip(ends.T, of_type, strict=True)}
        for ends, of_type in (
            (split.train, split.train_type),
            (split.val, split.val_type),
            (split.test, split.test_type),
        )
    ]
    assert set.union(*parts) == triples
    assert sum(map(len, parts)) == len(triples)
    between = [{frozenset((i, j)) for i, _, j in part} for part in parts]
    assert not between[0] & between[1] | between[0] & between[2] | between[1] & between[2]
    assert not (pairs(split.val_absent) | pairs(split.test_absent)) & pairs(edges)
    known = zip(split.graph.edge_index.T, split.graph.edge_type, strict=True)
    assert {(int(i), int(t), int(j)) for (i, j), t in known if i != j} == parts[0]
    in_time = split_links(whole, 0.2, 0.2, directed=True, times=torch.arange(600))
    assert len(in_time.train_type) + len(in_time.val_type) + len(in_time.test_type) == len(triples)


def test_triples_of_two_sets_of_nodes_keep_their_types() -> None:
    whole = graphs.from_edges([[0, 0, 1, 2, 3], [0, 0, 1, 1, 0]], num_src=4, num_dst=3, edge_type=[0, 5, 5, 0, 5])
    split = split_links(whole, 0.25, 0.25)
    found = torch.cat([split.train_type, split.val_type, split.test_type])
    assert sorted(found.tolist()) == [0, 0, 5, 5, 5]
    assert split_links(whole, 0.25, 0.25).val_absent.shape == split.val.shape


@pytest.mark.parametrize("lacks", [0, 1, 100])
def test_no_other_relation_keeps_a_held_out_pair(lacks: int) -> None:
    buys = random_graph(40, 300, 3)
    other = graphs.from_edges(buys.edge_index.flip(0)[:, lacks:], 40)
    views = graphs.from_edges(torch.cat([buys.edge_index[:, ::2], random_graph(40, 300, 4).edge_index], 1), 40)
    kinds = {("u", "buys", "u"): buys, ("u", "bought by", "u"): other, ("u", "views", "u"): views}
    far = graphs.from_edges(views.edge_index, num_src=40, num_dst=50)
    whole = graphs.HeteroGraph({**kinds, ("u", "has", "i"): far}, times={"i": torch.arange(50)})
    known, split = split_relation(whole, ("u", "buys", "u"), 0.2, 0.2)
    held_out = pairs(torch.cat([split.val, split.test, split.val_absent, split.test_absent], 1))
    either = held_out | {(j, i) for i, j in held_out}
    for relation in (("u", "bought by", "u"), ("u", "views", "u")):
        kept = pairs(known[relation].edge_index)
        assert kept == pairs(whole[relation].edge_index) - either
        assert split.stayed[relation] == known[relation].num_edges / whole[relation].num_edges
    assert known["u", "has", "i"].num_edges == far.num_edges
    assert {*split.stayed} == {("u", "bought by", "u"), ("u", "views", "u")}
    assert {*known.times} == {"i"}


def test_two_sets_of_one_size_are_not_one_set() -> None:
    """User 3 and item 3 are two nodes: their link counts, is no reverse of another, and may be drawn as absent."""
    pairs = torch.cartesian_prod(torch.arange(12), torch.arange(12)).T
    kept = pairs[:, torch.rand(144, generator=torch.Generator().manual_seed(0)) < 0.4]
    same = kept[0] == kept[1]
    graph = graphs.from_edges(kept, 12)
    split = split_links(graph, 0.2, 0.2, one_set=False)
    found = torch.cat([split.train, split.val, split.test], 1)
    assert {*map(tuple, found.T.tolist())} == {*map(tuple, kept.T.tolist())}
    assert not split.one_set
    absent = torch.cat([split.val_absent, split.test_absent, split.draw_absent(500)], 1)
    assert (absent[0] == absent[1]).any()
    as_one = split_links(graph, 0.2, 0.2, directed=True)
    assert sum(part.shape[1] for part in (as_one.train, as_one.val, as_one.test)) == (~same).sum()
    with pytest.raises(ValueError, match="one_set=True needs one set of nodes; the graph is 12 x 9"):
        split_links(graphs.from_edges(kept[:, kept[0] < 9], num_src=9, num_dst=12), one_set=True)
    kinds = graphs.HeteroGraph({("user", "buys", "item"): graph})
    of_kinds = split_relation(kinds, ("user", "buys", "item"), 0.2, 0.2)[1]
    assert of_kinds.train.shape[1] + of_kinds.val.shape[1] + of_kinds.test.shape[1] == kept.shape[1]


def test_training_pairs_have_the_orientation_of_the_links() -> None:
    split = split_links(random_graph(40, 200, 0).undirected(), 0.1, 0.1)
    src, dst = split.draw_absent(100)
    assert (src < dst).all()
    src, dst = split_links(random_graph(40, 200, 0), 0.1, 0.1, directed=True).draw_absent(200)
    assert 50 < (src < dst).sum() < 150


def test_a_split_without_links_in_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"val=0.05 and test=0.1 leave a part of the 5 links empty"):
        split_links(graphs.from_edges(ring(5)))
    full = graphs.from_edges(graphs.complete().bind(6).edge_index)
    with pytest.raises(ValueError, match=r"every pair of .* is an edge already"):
        split_links(full, 0.2, 0.2)
    with pytest.raises(ValueError, match=r"times must be 5 numbers"):
        split_links(graphs.from_edges(ring(5)), 0.3, 0.3, times=torch.arange(3))
