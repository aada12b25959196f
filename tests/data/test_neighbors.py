"""Sampled batches: what they hold, that they repeat, and that a network trains on them as on the whole graph."""

import threading

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.attention import Additive, Degree, DotProduct, EdgeWeight, Typed
from mpnn.data import neighbor_batches
from mpnn.data.neighbors import in_advance
from mpnn.graphs import Offset
from mpnn.position import ALiBi
from mpnn.update import Concat

N = 60
EDGES = torch.randint(N, (2, 400), generator=torch.Generator().manual_seed(0))
GRAPH = graphs.from_edges(EDGES, N)
WEIGHTED = graphs.from_edges(EDGES, N, edge_attr=torch.rand(400, dtype=torch.float64))
TYPED = graphs.from_edges(EDGES, N, edge_type=torch.arange(400) % 3)
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Sage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(MessagePassing(None, "mean", Concat(6, 6), None) for _ in range(2)).double()

    def forward(self, x, layer_graphs):
        for layer, graph in zip(self.layers, layer_graphs, strict=True):
            x = layer(x[: graph.num_dst], graph, source=x).tanh()
        return x


def batches(**options):
    settings = {"batch_size": 16, "seed": 3, **options}
    return list(neighbor_batches(settings.pop("graph", GRAPH), torch.arange(N), [3, 2], X, **settings))


def same(a, b):
    assert torch.equal(a.nodes, b.nodes)
    assert torch.equal(a.sources, b.sources)
    assert torch.equal(a.x, b.x)
    assert all(torch.equal(g.edge_index, h.edge_index) for g, h in zip(a.graphs, b.graphs, strict=True))


def test_a_batch_holds_in_neighbors_of_its_nodes_and_their_features():
    found = batches()
    assert [len(batch.nodes) for batch in found] == [16, 16, 16, 12]
    assert torch.cat([batch.nodes for batch in found]).sort().values.tolist() == list(range(N))
    pairs = set(map(tuple, EDGES.T.tolist()))
    for batch in found:
        assert torch.equal(batch.sources[: len(batch.nodes)], batch.nodes)
        assert torch.equal(batch.x, X[batch.sources])
        assert batch.graphs[-1].num_dst == len(batch.nodes)
        assert batch.graphs[0].num_src == len(batch.sources)
        for graph, fanout in zip(batch.graphs, (3, 2), strict=True):
            src, dst = batch.sources[graph.edge_index]
            assert set(zip(src.tolist(), dst.tolist(), strict=True)) <= pairs
            assert graph.degree().max() <= fanout


def test_batches_repeat_and_do_not_depend_on_threads_or_files(tmp_path):
    expected = batches()
    graphs.write_csr(tmp_path / "csr", EDGES.numpy(), num_nodes=N)
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    of_files = neighbor_batches(
        graphs.open_csr(tmp_path / "csr"), torch.arange(N), [3, 2], mapped, batch_size=16, seed=3
    )
    for other in (batches(), batches(prefetch=0), list(of_files)):
        for a, b in zip(expected, other, strict=True):
            same(a, b)
    changed = batches(seed=4)
    assert not torch.equal(changed[0].nodes, expected[0].nodes)


def test_with_all_in_neighbors_gradients_are_those_of_the_whole_graph():
    whole, sampled = Sage(), Sage()
    target = torch.randn(N, 6, dtype=torch.float64)
    F.mse_loss(whole(X, [GRAPH, GRAPH]), target, reduction="sum").backward()
    for batch in neighbor_batches(GRAPH, torch.arange(N), [-1, -1], X, batch_size=7):
        F.mse_loss(sampled(batch.x, batch.graphs), target[batch.nodes], reduction="sum").backward()
    for a, b in zip(whole.parameters(), sampled.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (EdgeWeight(), WEIGHTED),
        lambda: (Typed(6, 6, 3), TYPED),
        lambda: (Degree(6, 6), GRAPH),
        lambda: (Degree(6, 6), WEIGHTED),
        lambda: (
            Additive(6, 6, edge_dim=2),
            graphs.from_edges(EDGES, N, edge_attr=torch.rand(400, 2, dtype=torch.float64)),
        ),
        lambda: (DotProduct(6, 1, position=ALiBi(1)), GRAPH),
        lambda: (Typed(6, 6, 3), graphs.window(3).with_relation(Offset(1)).bind(N)),
    ],
)
def test_batches_carry_what_the_whole_graph_has(make):
    """With all in-neighbors, a layer computes for each node what it computes over the whole graph."""
    torch.manual_seed(0)
    attention, graph = make()
    layer = MessagePassing(None, "sum", None, attention).double()
    whole = layer(X, graph)
    for batch in neighbor_batches(graph, torch.arange(N), [-1], X, batch_size=7):
        (block,) = batch.graphs
        torch.testing.assert_close(layer(batch.x[: block.num_dst], block, source=batch.x), whole[batch.nodes])


def test_sampled_edges_keep_their_attributes_and_types():
    graph = graphs.from_edges(EDGES, N, edge_attr=torch.arange(400.0), edge_type=torch.arange(400) % 3)
    for batch in neighbor_batches(graph, torch.arange(N), [3, 2], batch_size=16):
        for block in batch.graphs:
            edge = block.edge_attr.long()  # its number
            assert torch.equal(batch.sources[block.edge_index], EDGES[:, edge])
            assert torch.equal(block.edge_type, edge % 3)


def test_degrees_are_those_of_the_whole_graph(tmp_path):
    sums = torch.zeros(N, dtype=torch.float64).index_add(0, EDGES[1], WEIGHTED.edge_attr)
    on_disk = graphs.write_csr(tmp_path / "csr", EDGES, N)
    for graph, expected in ((GRAPH, GRAPH.degree()), (WEIGHTED, sums), (on_disk, GRAPH.degree())):
        for batch in neighbor_batches(graph, torch.arange(N), [2, 2], batch_size=16):
            for block in batch.to("cpu").graphs:
                for degrees, count in zip(block.degrees, (block.num_dst, block.num_src), strict=True):
                    torch.testing.assert_close(degrees, expected[batch.sources[:count]])


def test_degrees_of_other_weights_are_refused():
    (batch,) = neighbor_batches(GRAPH, torch.arange(N), [2], X, batch_size=N)
    (block,) = batch.graphs
    with pytest.raises(ValueError, match=r"pass edge_attr to graphs.from_edges before sampling"):
        MessagePassing(None, "sum", None, Degree(6, 6)).double()(
            batch.x[:N], block, source=batch.x, edge_attr=torch.ones(block.num_edges, dtype=torch.float64)
        )


def test_errors_of_the_thread_are_raised_in_their_turn_and_the_thread_ends():
    def values():
        yield 1
        raise OSError("the disk is gone")

    found = in_advance(values(), 2)
    assert next(found) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    endless = in_advance(iter(int, 1), 2)
    next(endless)
    endless.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mpnn-batches")]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fanouts": []}, "fanouts must hold a number for each layer"),
        ({"fanouts": [-2]}, "-1 for all in-neighbors; got"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"features": X[:5]}, "a row for each of the 60 nodes; got 5"),
        ({"nodes": torch.zeros(3)}, "nodes must be int64"),
        ({"nodes": torch.tensor([1, 60])}, r"nodes\[1\] is 60, but there are 60 nodes"),
        ({"nodes": torch.tensor([1, 5, 1])}, "nodes must be distinct; 1 appears"),
    ],
)
def test_refusals(options, sentence):
    settings = {"nodes": torch.arange(N), "fanouts": [2], "features": X, "batch_size": 4, **options}
    with pytest.raises(ValueError, match=sentence):
        neighbor_batches(GRAPH, **settings)


@pytest.mark.parametrize(("count", "batch_size", "world"), [(100, 7, 3), (101, 10, 4), (12, 100, 5), (30, 1, 3)])
def test_processes_share_the_nodes_in_equally_many_batches(count: int, batch_size: int, world: int) -> None:
    graph = graphs.from_edges(torch.randint(120, (2, 500)), 120)
    nodes = torch.arange(count)
    batches = [
        [*neighbor_batches(graph, nodes, [3], batch_size=batch_size, seed=4, rank=rank, world=world)]
        for rank in range(world)
    ]
    assert len({len(own) for own in batches}) == 1
    sizes = [len(batch.nodes) for own in batches for batch in own]
    assert 1 <= min(sizes) <= max(sizes) <= batch_size
    visited = torch.cat([batch.nodes for own in batches for batch in own])
    assert visited.sort().values.tolist() == nodes.tolist()


def test_nodes_that_processes_cannot_share_are_refused() -> None:
    graph = graphs.from_edges(torch.randint(9, (2, 30)), 9)
    with pytest.raises(ValueError, match="7 nodes make no 3 batches for each of 3 processes: pass a multiple of 3"):
        neighbor_batches(graph, torch.arange(7), [2], batch_size=1, rank=0, world=3)
    with pytest.raises(ValueError, match="rank must be from 0 to world - 1; got rank 3 of world 3"):
        neighbor_batches(graph, torch.arange(7), [2], batch_size=1, rank=3, world=3)
