"""Sampled batches that see edges before a time only, against a search through all edges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, graphs
from mpnn.attention import Degree, DotProduct
from mpnn.data import NeighborBatch, neighbor_batches
from mpnn.distributed import disk
from mpnn.graphs import TemporalGraph

N, E, L = 20, 300, 2
RANDOM = torch.Generator().manual_seed(0)
EDGES = torch.randint(N, (2, E), generator=RANDOM)
TIMES = torch.randint(40, (E,), generator=RANDOM)  # many edges at one time
KIND = torch.arange(E) % 3
GRAPH = graphs.from_edges(EDGES, N, edge_attr=torch.arange(E).double(), edge_type=KIND)
NODES, BEFORE = torch.randint(N, (50,), generator=RANDOM), torch.randint(45, (50,), generator=RANDOM)
X = torch.randn(N, 4, generator=RANDOM, dtype=torch.float64)

every_option = pytest.mark.parametrize(
    ("latest", "as_of"), [(latest, as_of) for latest in (False, True) for as_of in ("query", "edge")]
)


def batches(past: TemporalGraph, fanouts: list[int], **options: Any) -> list[NeighborBatch]:
    settings = {"batch_size": 16, "before": BEFORE, "seed": 5, **options}
    return list(neighbor_batches(past, NODES, fanouts, X, **settings))


def seen(node: int, before: float) -> list[int]:
    """The edges into a node before a time, the latest last; of one time, in their order in the graph."""
    edges = [e for e in range(E) if EDGES[1, e] == node and TIMES[e] < before]
    return sorted(edges, key=lambda e: int(TIMES[e]))


def same(a: NeighborBatch, b: NeighborBatch) -> None:
    assert torch.equal(a.nodes, b.nodes)
    assert torch.equal(a.sources, b.sources)
    assert torch.equal(a.times, b.times)
    assert all(torch.equal(g.edge_attr, h.edge_attr) for g, h in zip(a.graphs, b.graphs, strict=True))


@every_option
@pytest.mark.parametrize("fanouts", [[3, 2], [-1, -1]])
@pytest.mark.covering
def test_a_batch_sees_what_a_search_through_all_edges_finds(latest: bool, as_of: str, fanouts: list[int]) -> None:
    found = batches(TemporalGraph(GRAPH, TIMES, latest=latest, as_of=as_of), fanouts, shuffle=False)
    assert torch.equal(torch.cat([batch.nodes for batch in found]), NODES)
    assert torch.equal(torch.cat([batch.times[: len(batch.nodes)] for batch in found]), BEFORE)
    for batch in found:
        assert batch.graphs[1].num_dst == len(batch.nodes)
        assert torch.equal(batch.x, X[batch.sources])
        pairs = Counter(zip(batch.sources.tolist(), batch.times.tolist(), strict=True))
        wanted = Counter(zip(batch.nodes.tolist(), batch.times.tolist(), strict=False))
        assert all(count == wanted.get(pair, 1) for pair, count in pairs.items())  # nobody else is there twice
        for layer, (graph, fanout) in enumerate(zip(batch.graphs, fanouts, strict=True)):
            edge, (src, dst) = graph.edge_attr.long(), graph.edge_index
            assert torch.equal(EDGES[:, edge], batch.sources[graph.edge_index])
            assert torch.equal(graph.edge_type, KIND[edge])
            assert torch.equal(batch.ages[layer], batch.times[dst] - TIMES[edge])
            assert torch.equal(batch.times[src], TIMES[edge] if as_of == "edge" else batch.times[dst])
            for i in range(graph.num_dst):
                own, past = edge[dst == i].tolist(), seen(int(batch.sources[i]), int(batch.times[i]))
                assert len(own) == (len(past) if fanout < 0 else min(fanout, len(past)))
                if latest or fanout < 0:
                    assert own == past[len(past) - len(own) :]
                else:
                    assert own == [e for e in past if e in set(own)]  # distinct, ascending in time


def test_every_subset_of_the_past_is_as_likely() -> None:
    past, draws = TemporalGraph(graphs.from_edges([[0, 1, 2, 3, 4, 5], [5] * 6], 6), torch.arange(6)), 1500
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        *_, edges, _ = past.sample_before(torch.tensor([5]), torch.tensor([5]), 2, seed)
        counts[tuple(edges.tolist())] += 1
    assert len(counts) == 10  # of edges 0 to 4
    chi_squared = sum((count - draws / 10) ** 2 / (draws / 10) for count in counts.values())
    assert chi_squared < 33.7  # 9 degrees of freedom: exceeded once in 10,000 times


@every_option
def test_batches_repeat_and_later_edges_change_nothing(latest: bool, as_of: str) -> None:
    past = TemporalGraph(GRAPH, TIMES, latest=latest, as_of=as_of)
    expected = batches(past, [3, 2], before=BEFORE.clamp(max=20))
    early = TIMES < 20
    known = graphs.from_edges(EDGES[:, early], N, edge_attr=GRAPH.edge_attr[early], edge_type=KIND[early])
    shorter = TemporalGraph(known, TIMES[early], latest=latest, as_of=as_of)
    for other in (past, shorter):
        for prefetch in (0, 2):
            found = batches(other, [3, 2], before=BEFORE.clamp(max=20), prefetch=prefetch)
            for a, b in zip(expected, found, strict=True):
                same(a, b)
    if not latest:
        changed = batches(past, [3, 2], before=BEFORE.clamp(max=20), seed=6, shuffle=False)
        repeated = batches(past, [3, 2], before=BEFORE.clamp(max=20), shuffle=False)
        assert not torch.equal(changed[0].graphs[1].edge_attr, repeated[0].graphs[1].edge_attr)


@pytest.mark.parametrize("times", [TIMES, TIMES.double() / 7, TIMES.float(), TIMES.int(), 2**53 + TIMES])
def test_times_of_any_type_are_exact(times: Tensor) -> None:
    scale = torch.arange(45, dtype=TIMES.dtype)
    before = {torch.int64: scale + (2**53 if times.max() > 99 else 0), torch.float64: scale.double() / 7}.get(
        times.dtype, scale.to(times.dtype)
    )[BEFORE]
    expected = batches(TemporalGraph(GRAPH, TIMES, latest=True), [-1, 3])
    for a, b in zip(expected, batches(TemporalGraph(GRAPH, times, latest=True), [-1, 3], before=before), strict=True):
        assert torch.equal(a.sources, b.sources)
        assert all(torch.equal(g.edge_attr, h.edge_attr) for g, h in zip(a.graphs, b.graphs, strict=True))


def test_a_layer_computes_what_it_computes_over_the_graph_of_the_past() -> None:
    torch.manual_seed(0)
    layer = MessagePassing(None, "sum", None, DotProduct(4, 2)).double()
    for batch in batches(TemporalGraph(GRAPH, TIMES), [-1]):
        (block,) = batch.graphs
        found = layer(batch.x[: block.num_dst], block, source=batch.x)
        for k, (node, before) in enumerate(zip(batch.nodes, batch.times, strict=False)):
            whole = graphs.from_edges(EDGES[:, before > TIMES], N)
            torch.testing.assert_close(found[k], layer(X, whole)[node], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
def test_degrees_count_the_past(weighted: bool) -> None:
    weight = torch.rand(E, generator=RANDOM, dtype=torch.float64)
    graph = graphs.from_edges(EDGES, N, edge_attr=weight if weighted else None)
    layer = MessagePassing(None, "sum", None, Degree(4, 4)).double()
    for batch in batches(TemporalGraph(graph, TIMES), [-1]):
        (block,) = batch.graphs
        found = layer(batch.x[: block.num_dst], block, source=batch.x)
        for k, (node, before) in enumerate(zip(batch.nodes, batch.times, strict=False)):
            early = before > TIMES
            whole = graphs.from_edges(EDGES[:, early], N, edge_attr=weight[early] if weighted else None)
            torch.testing.assert_close(found[k], layer(X, whole)[node], rtol=1e-10, atol=1e-10)


def test_processes_share_the_queries() -> None:
    past = TemporalGraph(GRAPH, TIMES, latest=True)
    parts = [batches(past, [3], rank=rank, world=3, batch_size=7) for rank in range(3)]
    assert len({len(own) for own in parts}) == 1
    asked = [pair for own in parts for b in own for pair in zip(b.nodes.tolist(), b.times.tolist(), strict=False)]
    assert Counter(asked) == Counter(zip(NODES.tolist(), BEFORE.tolist(), strict=True))


def test_moved_batches_are_whole() -> None:
    batch = batches(TemporalGraph(GRAPH, TIMES), [3, 2])[0]
    moved = batch.to("cpu")
    same(batch, moved)
    assert all(map(torch.equal, moved.ages, batch.ages))
    assert batch.to("meta").ages[1].is_meta
    assert batches(TemporalGraph(GRAPH, TIMES), [3])[0].to("meta").times.is_meta


def test_refusals() -> None:
    past, nodes = TemporalGraph(GRAPH, TIMES), torch.tensor([1, 1])
    for graph, before in ((GRAPH, BEFORE), (past, None)):
        with pytest.raises(ValueError, match="need each other"):
            neighbor_batches(graph, NODES, [2], batch_size=4, before=before)
    for before, sentence in (
        (torch.tensor([1.0, 2.0]), "before must have the dtype of the times of edges, torch.int64; got torch.float32"),
        (torch.tensor([1]), r"before must be 2 numbers; got torch.int64 of shape \[1\]"),
        (torch.tensor([True, False]), "before must be 2 numbers; got torch.bool"),
    ):
        with pytest.raises(ValueError, match=sentence):
            neighbor_batches(past, nodes, [2], batch_size=4, before=before)
    later = TemporalGraph(GRAPH, TIMES.float())
    with pytest.raises(ValueError, match=r"before\[1\] is NaN"):
        neighbor_batches(later, nodes, [2], batch_size=4, before=torch.tensor([1.0, torch.nan]))
    with pytest.raises(ValueError, match=r"nodes\[0\] is 20, but there are 20 nodes"):
        neighbor_batches(past, torch.tensor([20]), [2], batch_size=4, before=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"times must be 300 numbers; got torch.int64 of shape \[7\]"):
        TemporalGraph(GRAPH, TIMES[:7])
    with pytest.raises(ValueError, match=r"times\[3\] is NaN"):
        TemporalGraph(GRAPH, torch.where(torch.arange(E) == 3, torch.nan, TIMES.double()))
    with pytest.raises(ValueError, match="as_of must be 'query' or 'edge'; got 'now'"):
        TemporalGraph(GRAPH, TIMES, as_of="now")
    with pytest.raises(ValueError, match="fanout must be"):
        past.sample_before(nodes, torch.tensor([3, 4]), -2)


def test_times_are_not_ignored_where_there_are_none(tmp_path: Path) -> None:
    graph = graphs.from_edges(torch.randint(6, (2, 12)), 6)
    with pytest.raises(ValueError, match="the edges of this graph have no times"):
        graphs.compressed(graph).degree(torch.arange(2), torch.zeros(2))
    with pytest.raises(TypeError, match="a cut would lose what a TemporalGraph adds"):
        disk.cut(graphs.TemporalGraph(graph, torch.rand(12)), tmp_path / "cut", np.zeros(6, np.int32), 1)
