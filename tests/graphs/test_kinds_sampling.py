"""Samples of graphs of several kinds with times, against a loop over all in-neighbors."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pytest
import torch

from mpnn import graphs
from mpnn.data import hetero_batches
from mpnn.graphs import HeteroGraph, HeteroSample, sample

SIZES = {"user": 12, "post": 30, "tag": 5}
WROTE, BY, LIKES, TAGGED = (
    ("post", "by", "user"),
    ("user", "wrote", "post"),
    ("post", "liked", "user"),
    ("tag", "of", "post"),
)


def whole() -> HeteroGraph:
    def relation(kinds: tuple[str, str, str], count: int) -> graphs.Graph:
        num_src, num_dst = SIZES[kinds[0]], SIZES[kinds[2]]
        edges = torch.stack([torch.randint(num_src, (count,)), torch.randint(num_dst, (count,))])
        return graphs.from_edges(edges, num_src=num_src, num_dst=num_dst, edge_attr=torch.arange(float(count)))

    relations = {kinds: relation(kinds, count) for kinds, count in ((WROTE, 60), (BY, 60), (LIKES, 80), (TAGGED, 40))}
    return HeteroGraph(relations, times={"post": torch.randint(20, (30,)), "user": torch.randint(9, (12,))})


def by_loop(graph: HeteroGraph, user: int, time: int | None, steps: int) -> set[tuple]:
    """All edges (relation, number of the edge) within `steps` of a user that exist before a time."""
    frontier, seen, edges = {("user", user)}, {("user", user)}, set()
    for _ in range(steps):
        reached = set()
        for kind, node in frontier:
            for relation, one in graph.items():
                if relation[2] != kind:
                    continue
                for e, (src, dst) in enumerate(one.edge_index.T.tolist()):
                    exists = time is None or relation[0] not in graph.times or graph.times[relation[0]][src] < time
                    if dst == node and exists:
                        edges.add((relation, e))
                        reached.add((relation[0], src))
        frontier = reached - seen
        seen |= reached
    return edges


def edges_of(found: HeteroSample) -> set[tuple]:
    return {(relation, e) for relation, ids in found.edge_ids.items() for e in ids.tolist()}


@pytest.mark.parametrize("time", [None, 7, 15])
def test_all_in_neighbors_are_those_of_a_loop(time: int | None) -> None:
    graph = whole()
    for user in range(12):
        at = None if time is None else torch.tensor([time])
        found = sample(graph, ("user", torch.tensor([user])), [-1, -1], time=at)
        assert edges_of(found) == by_loop(graph, user, time, 2)
        assert found.nodes["user"][0] == user


def test_a_sample_is_a_subgraph_with_its_data() -> None:
    graph = whole()
    found = sample(graph, ("user", torch.tensor([3, 8, 3])), [4, 2], time=torch.tensor([9, 15, 16]))
    assert found.nodes["user"][:3].tolist() == [3, 8, 3]
    assert found.times["user"][:3].tolist() == [9, 15, 16]
    for relation, one in found.graph.items():
        src, dst = one.edge_index
        source, destination = graph[relation].edge_index[:, found.edge_ids[relation]]
        assert torch.equal(found.nodes[relation[0]][src], source)
        assert torch.equal(found.nodes[relation[2]][dst], destination)
        assert torch.equal(one.edge_attr, found.edge_ids[relation].float())
        assert torch.equal(found.times[relation[0]][src], found.times[relation[2]][dst])  # that of the seed
        if relation[0] in graph.times:
            assert (graph.times[relation[0]][source] < found.times[relation[0]][src]).all()
        assert one.degree().max() <= 4


def test_other_seeds_change_nothing() -> None:
    """f(A + B) = f(A) + f(B), for any fan-outs."""
    graph, users, time = whole(), torch.tensor([3, 8, 5]), torch.tensor([9, 15, 15])
    for fanouts in ([3, 2], [{WROTE: 2, TAGGED: 1}, {TAGGED: -1, BY: 1}]):
        for latest in (False, True):
            options = {"latest": latest, "seed": 4}
            together = sample(graph, ("user", users), fanouts, time=time, **options)
            alone = [sample(graph, ("user", users[[k]]), fanouts, time=time[[k]], **options) for k in range(3)]
            assert edges_of(together) == set.union(*map(edges_of, alone))


def test_the_latest_are_the_last_in_time() -> None:
    graph = whole()
    found = sample(graph, ("user", torch.arange(12)), [{WROTE: 2}], time=torch.full((12,), 15), latest=True)
    src, dst = graph[WROTE].edge_index
    for user in range(12):
        times = [graph.times["post"][j].item() for j, i in zip(src.tolist(), dst.tolist(), strict=True) if i == user]
        expected = sorted(t for t in times if t < 15)[-2:]
        taken = found.edge_ids[WROTE][found.nodes["user"][found.graph[WROTE].edge_index[1]] == user]
        assert sorted(graph.times["post"][src[taken]].tolist()) == expected


def test_nodes_without_times_are_drawn_at_random_also_beside_the_latest() -> None:
    graph = whole()
    posts = torch.tensor([post for post in range(30) if graph[TAGGED].degree()[post] > 1])
    drawn = [
        sample(graph, ("post", posts), [{TAGGED: 1}], time=torch.full((len(posts),), 30), latest=latest)
        for latest in (False, True)
    ]
    assert edges_of(drawn[0]) == edges_of(drawn[1])


def test_pygs_data_in_and_out() -> None:
    data_of = pytest.importorskip("torch_geometric.data")
    graph = whole()
    data = graphs.to_pyg(graph)
    again = graphs.from_pyg(data)
    assert again.keys() == graph.keys()
    assert torch.equal(again.times["post"], graph.times["post"])
    found = sample(again, ("user", torch.tensor([1])), [5], time=torch.tensor([12]))
    out = graphs.to_pyg(found.graph, n_id=found.nodes)
    assert isinstance(out, data_of.HeteroData)
    assert out["user"].n_id[0] == 1
    assert torch.equal(out["post"].time, graph.times["post"][found.nodes["post"]])


def test_events_of_pyg_keep_times_and_messages() -> None:
    data_of = pytest.importorskip("torch_geometric.data")
    src, dst, t, msg = torch.tensor([0, 1, 0]), torch.tensor([2, 2, 1]), torch.tensor([5, 3, 4]), torch.randn(3, 2)
    graph = graphs.from_pyg(data_of.TemporalData(src=src, dst=dst, t=t, msg=msg))
    assert graph.times.tolist() == [4, 3, 5]  # by destination, then time
    assert torch.equal(graph.whole.edge_attr, msg)
    assert torch.equal(graph.whole.edge_index, torch.stack([src, dst]))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_samples_with_features(prefetch: int) -> None:
    graph = whole()
    features = {kind: torch.arange(float(n))[:, None] for kind, n in SIZES.items()}
    users, time = torch.arange(12), torch.randint(5, 20, (12,))
    batches = list(
        hetero_batches(graph, ("user", users), [3, 3], features, batch_size=5, time=time, seed=1, prefetch=prefetch)
    )
    assert [batch.batch_size for batch in batches] == [5, 5, 2]
    assert sorted(torch.cat([batch.nodes["user"][: batch.batch_size] for batch in batches]).tolist()) == users.tolist()
    for batch in batches:
        alone = sample(graph, ("user", batch.nodes["user"][:1]), [3, 3], time=batch.times["user"][:1], seed=1)
        assert edges_of(alone) <= edges_of(batch)
        for kind, x in batch.x.items():
            assert torch.equal(x[:, 0].long(), batch.nodes[kind])


def test_batches_run_models_of_pyg() -> None:
    nn = pytest.importorskip("torch_geometric.nn")
    graph = whole()
    layer = nn.HeteroConv({relation: nn.SAGEConv((2, 2), 3) for relation in graph if relation != TAGGED})
    features = {kind: torch.randn(n, 2) for kind, n in SIZES.items()}
    (batch,) = hetero_batches(graph, ("user", torch.tensor([1, 4])), [-1], features, batch_size=2, prefetch=0)
    data = batch.to_pyg()
    out = layer(data.x_dict, data.edge_index_dict)["user"][: data.batch_size]
    expected = layer(features, graphs.to_pyg(graph).edge_index_dict)["user"][[1, 4]]
    torch.testing.assert_close(out, expected)


def test_tables_are_a_graph() -> None:
    users = {"id": ["ann", "bob", "cem"]}
    orders = {"user": ["ann", None, "cem", "ann"], "day": np.array(["2026-01-05", "2026-01-06"] * 2, "datetime64[D]")}
    graph = graphs.from_tables(
        {"users": users, "orders": orders}, {("orders", "user"): ("users", "id")}, times={"orders": "day"}
    )
    assert graph["users", "user", "orders"].edge_index.tolist() == [[0, 2, 0], [0, 2, 3]]
    assert graph["orders", "rev_user", "users"].edge_index.tolist() == [[0, 2, 3], [0, 2, 0]]
    assert graph.num_nodes == {"users": 3, "orders": 4}
    assert (graph.times["orders"][1] - graph.times["orders"][0]).item() == 24 * 3600 * 10**9
    frame = {"key": [2.0, float("nan"), 1.0], "at": [datetime(2026, 1, day, tzinfo=None) for day in (3, 4, 5)]}
    again = graphs.from_tables({"a": frame, "b": {"id": [1, 2]}}, {("a", "key"): ("b", "id")}, times={"a": "at"})
    assert again["b", "key", "a"].edge_index.tolist() == [[1, 0], [0, 2]]
    assert again.times["a"].diff().tolist() == [24 * 3600 * 10**9] * 2
    arrow = pytest.importorskip("pyarrow")
    of_arrow = {name: arrow.table({k: [*values] for k, values in one.items()}) for name, one in {"a": frame}.items()}
    texts = {"id": [1, 2], "at": ["2026-01-03", "2026-01-04 00:00"]}
    third = graphs.from_tables({**of_arrow, "b": texts}, {("a", "key"): ("b", "id")}, times={"a": "at", "b": "at"})
    assert torch.equal(third["b", "key", "a"].edge_index, again["b", "key", "a"].edge_index)
    assert torch.equal(third.times["a"], again.times["a"])
    assert torch.equal(third.times["b"], again.times["a"][:2])


TABLES = {
    "a": {"key": ["x", "y"], "at": [1.0, float("nan")]},
    "b": {"id": ["x", "z"]},
    "c": {"id": ["x", "x"]},
    "f": {"at": ["2026-01-03", "now"]},
}
TABLE_MISTAKES = {
    "no such row": ({("a", "key"): ("b", "id")}, {}, r"a.key row 1 is .*'y'.*, which no row of b has as id"),
    "a name twice": ({("a", "key"): ("c", "id")}, {}, "c.id must name each row once; 'x' is in rows 0 and 1"),
    "no such column": ({("a", "kee"): ("b", "id")}, {}, "table 'a' has no column 'kee'; it has key, at"),
    "no such table": ({("d", "key"): ("b", "id")}, {}, "there is no table 'd'; the tables are a, b, c, f"),
    "no time": ({}, {"a": "at"}, "a.at has no time in row 1"),
    "times of text": ({}, {"a": "key"}, "a.key row 0 is 'x', which is no time: times are numbers, datetimes, or text"),
    "no table": ({}, {"e": "at"}, "table 'e' must be a DataFrame, a table of pyarrow, or {column: values}; got int"),
    "now": ({}, {"f": "at"}, "f.at row 1 is 'now', which is no time"),
}


@pytest.mark.parametrize("name", TABLE_MISTAKES)
def test_mistakes_in_tables_are_named(name: str) -> None:
    foreign, times, message = TABLE_MISTAKES[name]
    with pytest.raises((ValueError, KeyError, TypeError), match=message):
        graphs.from_tables({**TABLES, "e": 5} if "e" in times else TABLES, foreign, times=times)


def _sample(**changes: object) -> HeteroSample:
    arguments = {"graph": whole(), "seeds": ("user", torch.tensor([1, 2])), "fanouts": [2], **changes}
    return sample(**arguments)  # type: ignore[arg-type]


MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "no such kind": ({"seeds": ("author", torch.tensor([1]))}, "seeds are of kind 'author'; the kinds are"),
    "no such node": ({"seeds": ("user", torch.tensor([12]))}, r"nodes\[0\] is 12, but there are 12 nodes"),
    "twice": ({"seeds": ("user", torch.tensor([1, 1]))}, "seeds must be distinct, or at different times"),
    "one time of two": ({"time": torch.tensor([1])}, "time must be 2 numbers"),
    "another dtype": ({"time": torch.tensor([1.0, 2.0])}, "time must have the dtype"),
    "no such relation": ({"fanouts": [{("user", "hates", "post"): 1}]}, "fanouts name"),
    "latest of what": ({"latest": True}, "latest=True needs time"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        _sample(**changes)


def test_times_belong_to_a_kind() -> None:
    with pytest.raises(ValueError, match="times are of kind 'tags'"):
        HeteroGraph(dict(whole()), times={"tags": torch.zeros(5)})
