"""Sampled batches of links: nothing of a batch's links is in its messages or degrees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.data import LinkBatch, link_batches, split_links
from mpnn.data.neighbors import NeighborBatch
from mpnn.graphs import HeteroGraph, HeteroSample
from mpnn.models import GCN, HGT, Inner, LinkPredictor, PairMLP

N = 30


def whole_graph(weights: bool = False) -> Graph:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(N, (2, 150), generator=generator)
    graph = graphs.from_edges(edges, N).undirected()
    weight = torch.rand(graph.num_edges, generator=generator)
    return graphs.from_edges(graph.edge_index, N, edge_attr=weight) if weights else graph


def links_of(graph: Graph) -> Tensor:
    return split_links(graph).train


def known(graph: Graph) -> set[tuple[int, int]]:
    return {(int(j), int(i)) for j, i in graph.edge_index.T}


def messages(batch: LinkBatch) -> list[set[tuple[int, int]]]:
    """The edges of each sampled graph, by the numbers of nodes in the whole graph."""
    assert isinstance(batch.sample, NeighborBatch)
    sources = batch.sample.sources
    return [{(int(sources[j]), int(sources[i])) for j, i in one.edge_index.T} for one in batch.sample.graphs]


@pytest.mark.parametrize("fanouts", [[-1, -1], [3, 2]])
def test_messages_are_those_of_the_graph_without_the_links_of_the_batch(fanouts: list[int]) -> None:
    graph = whole_graph()
    links = links_of(graph)
    seen = []
    for batch in link_batches(graph, links, fanouts, batch_size=20, negatives=2):
        assert isinstance(batch.sample, NeighborBatch)
        asked = {tuple(link) for link in links[:, batch.links].T.tolist()}
        either = asked | {(j, i) for i, j in asked}
        ends = batch.sample.nodes[batch.pairs]
        assert torch.equal(ends[:, batch.is_link], links[:, batch.links])
        assert int((~batch.is_link).sum()) == 2 * len(batch.links)
        for j, i in ends[:, ~batch.is_link].T.tolist():
            assert (j, i) not in known(graph)
            assert i != j
        assert torch.equal(ends[0, ~batch.is_link], links[0, batch.links].repeat(2))
        rest = known(graph) - either
        for found, one in zip(messages(batch), batch.sample.graphs, strict=True):
            assert found <= rest
            if fanouts == [-1, -1]:
                of = batch.sample.sources[: one.num_dst]
                assert found == {(j, i) for j, i in rest if i in of.tolist()}
        seen += batch.links.tolist()
    assert sorted(seen) == list(range(links.shape[1]))


@pytest.mark.parametrize("weights", [False, True])
def test_whole_neighborhoods_compute_what_the_graph_without_the_links_does(weights: bool) -> None:
    """A GCN, whose weights are degrees: a degree that counted the link would tell it."""
    torch.manual_seed(0)
    graph, x = whole_graph(weights), torch.randn(N, 5)
    links, model = links_of(graph), GCN(5, 4, 8, dropout=0.0)
    for batch in link_batches(graph, links, [-1, -1], x, batch_size=25):
        assert isinstance(batch.sample, NeighborBatch)
        h = batch.sample.x
        assert h is not None
        for layer, one in zip(model.layers, batch.sample.graphs, strict=True):
            h = layer(h[: one.num_dst], one, source=h)
        asked = {tuple(link) for link in links[:, batch.links].T.tolist()}
        keep = [k for k, (j, i) in enumerate(graph.edge_index.T.tolist()) if not {(j, i), (i, j)} & asked]
        attr = None if graph.edge_attr is None else graph.edge_attr[keep]
        without = graphs.from_edges(graph.edge_index[:, keep], N, edge_attr=attr)
        torch.testing.assert_close(h, model(x, without)[batch.sample.nodes], atol=1e-5, rtol=1e-4)


def test_a_batch_depends_on_its_seed_alone() -> None:
    graph = whole_graph()
    links = links_of(graph)

    def epoch(seed: int, prefetch: int = 2) -> list[tuple[Tensor, ...]]:
        found = link_batches(graph, links, [2], batch_size=30, seed=seed, prefetch=prefetch)
        return [(b.sample.nodes, b.pairs, b.sample.graphs[0].edge_index) for b in found]  # type: ignore[union-attr]

    same = zip(epoch(1), epoch(1, prefetch=0), strict=True)
    assert all(torch.equal(a, b) for one, other in same for a, b in zip(one, other, strict=True))
    assert not torch.equal(epoch(1)[0][0], epoch(2)[0][0])
    ordered = next(link_batches(graph, links, [2], batch_size=9, shuffle=False, types=torch.arange(links.shape[1])))
    assert ordered.links.tolist() == list(range(9))
    assert ordered.types is not None
    assert ordered.types.tolist() == [*range(9), *range(9)]


def test_links_in_time_see_what_was_before_them() -> None:
    graph = whole_graph()
    time = torch.arange(graph.num_edges)
    past = graphs.TemporalGraph(graph, time)
    links, when = graph.edge_index[:, 60:90], time[60:90]
    for batch in link_batches(past, links, [-1], batch_size=10, times=when, shuffle=False):
        assert isinstance(batch.sample, NeighborBatch)
        nodes, one = batch.sample.nodes, batch.sample.graphs[0]
        assert torch.equal(nodes[batch.pairs[:, batch.is_link]], links[:, batch.links])
        moments = when[batch.links].repeat(4)
        for place in range(len(nodes)):
            found = sorted(batch.sample.sources[one.edge_index[0, one.edge_index[1] == place]].tolist())
            into = (graph.edge_index[1] == nodes[place]) & (time < moments[place])
            assert found == sorted(graph.edge_index[0, into].tolist())


def shop() -> HeteroGraph:
    generator = torch.Generator().manual_seed(1)
    ends = torch.stack([torch.randint(12, (60,), generator=generator), torch.randint(9, (60,), generator=generator)])
    buys = graphs.from_edges(ends.unique(dim=1), num_src=12, num_dst=9)
    near = graphs.from_edges(torch.randint(9, (2, 20), generator=generator), 9)
    return HeteroGraph(
        {("user", "buys", "item"): buys, ("item", "bought by", "user"): buys.reverse(), ("item", "near", "item"): near}
    )


def test_users_and_items_are_sampled_into_one_graph() -> None:
    graph = shop()
    relation = ("user", "buys", "item")
    links = graph[relation].edge_index
    x = {"user": torch.randn(12, 3), "item": torch.randn(9, 3)}
    torch.manual_seed(0)
    model = LinkPredictor(HGT({"user": 3, "item": 3}, 4, [*graph], 8, 2), Inner(), kinds=("user", "item")).eval()
    for batch in link_batches(graph, links, [-1, -1], x, batch_size=7, relation=relation):
        found = batch.sample
        assert isinstance(found, HeteroSample)
        asked = links[:, batch.links]
        ends = torch.stack([found.nodes["user"][batch.pairs[0]], found.nodes["item"][batch.pairs[1]]])
        assert torch.equal(ends[:, batch.is_link], asked)
        assert not {tuple(p) for p in ends[:, ~batch.is_link].T.tolist()} & {tuple(p) for p in links.T.tolist()}
        either = {tuple(link) for link in asked.T.tolist()}
        for (src, name, dst), edges in found.graph.items():
            pairs = zip(found.nodes[src][edges.edge_index[0]], found.nodes[dst][edges.edge_index[1]], strict=True)
            of_whole = graph[src, name, dst].edge_index.T[found.edge_ids[src, name, dst]].tolist()
            known = [(int(j), int(i)) for j, i in pairs]
            assert known == [tuple(edge) for edge in of_whole]
            if name != "near":
                assert not {(j, i) if src == "user" else (i, j) for j, i in known} & either
        keep = torch.tensor([tuple(link) not in either for link in links.T.tolist()])
        rest = graphs.from_edges(links[:, keep], num_src=12, num_dst=9)
        kinds = {relation: rest, ("item", "bought by", "user"): rest.reverse()}
        without = HeteroGraph({**graph, **kinds}, graph.num_nodes)
        expected = model(x, ends, without)
        torch.testing.assert_close(model(batch.x, batch.pairs, found.graph), expected, atol=1e-5, rtol=1e-4)


def test_training_on_batches_learns() -> None:
    torch.manual_seed(0)
    group = torch.arange(60) % 2
    pairs = torch.combinations(torch.arange(60)).T
    pairs = pairs[:, (group[pairs[0]] == group[pairs[1]]) & (torch.rand(pairs.shape[1]) < 0.4)]
    split = split_links(graphs.from_edges(pairs, 60).undirected(), 0.1, 0.1)
    x = torch.eye(2)[group] + torch.randn(60, 2)
    model = LinkPredictor(GCN(2, 8, 16, dropout=0.0), PairMLP(8, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for epoch in range(6):
        for batch in link_batches(split.graph, split.train, [8, 8], x, batch_size=64, seed=epoch):
            h = batch.sample.x  # type: ignore[union-attr]
            for layer, one in zip(model.encoder.layers, batch.sample.graphs, strict=True):  # type: ignore[union-attr]
                h = layer(h[: one.num_dst], one, source=h)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                model.score(h, batch.pairs), batch.is_link.float()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.5 < losses[0]


def test_what_does_not_fit_is_refused() -> None:
    graph, hetero = whole_graph(), shop()
    links = links_of(graph)
    with pytest.raises(
        ValueError, match=r"fanouts must hold a number for each layer, -1 for all in-neighbors; got \[\]"
    ):
        link_batches(graph, links, [], batch_size=4)
    with pytest.raises(ValueError, match=r"links must be int64 \[2, L\], sources then destinations"):
        link_batches(graph, links.T, [2], batch_size=4)
    with pytest.raises(IndexError, match="link 1 has destination 99, but there are 30 destinations"):
        link_batches(graph, torch.tensor([[0, 1], [1, 99]]), [2], batch_size=4)
    with pytest.raises(ValueError, match="name the relation of the links, one of"):
        link_batches(hetero, links, [2], batch_size=4)
    with pytest.raises(ValueError, match=r"there is no relation \('user', 'sells', 'item'\); the graph has"):
        link_batches(hetero, links, [2], batch_size=4, relation=("user", "sells", "item"))
    with pytest.raises(ValueError, match="has two sets of nodes: pass a HeteroGraph with the links and their reverse"):
        link_batches(hetero["user", "buys", "item"], links, [2], batch_size=4)
    with pytest.raises(ValueError, match=r"times= and a graphs.TemporalGraph need each other"):
        link_batches(graph, links, [2], batch_size=4, times=torch.zeros(links.shape[1]))
    with pytest.raises(ValueError, match="features must have a row for each of the 30 nodes; got 7"):
        link_batches(graph, links, [2], torch.zeros(7, 2), batch_size=4)
    with pytest.raises(ValueError, match=r"types must be \[\d+\], one for each link"):
        link_batches(graph, links, [2], batch_size=4, types=torch.zeros(3, dtype=torch.int64))
    full = graphs.complete().bind(6)
    full = graphs.from_edges(full.edge_index, 6)
    with pytest.raises(ValueError, match=r"node \d is linked to nearly all 6 destinations"):
        next(link_batches(full, full.edge_index[:, 1:3], [2], batch_size=4))
