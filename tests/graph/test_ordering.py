"""Reordered graphs: kernels take rows in another order, and outputs do not change."""

import pytest
import torch

from mpnn import graphs, ops
from mpnn.attention import DotProduct
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing


def road_map(side: int = 12) -> Graph:
    """A grid whose nodes are numbered, and whose edges are listed, at random; with attributes, and one lonely node."""
    grid = graphs.grid(side, side).bind(side * side)
    edges = torch.randperm(side * side)[grid.edge_index][:, torch.randperm(grid.num_edges)]
    return graphs.from_edges(edges, side * side + 1, edge_attr=torch.randn(grid.num_edges, 2))


@pytest.mark.parametrize("method", ["rcm", "degree"])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "var", "std", "pna"])
def test_reordering_does_not_change_outputs(name: str, method: str) -> None:
    graph = road_map()
    other = graph.reordered(method)
    x = torch.randn(2, graph.num_src, 19, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(graph.num_edges, 1, dtype=torch.float64, requires_grad=True)
    found = []
    for g in (graph, other):
        out = ops.aggregate(g, x, name, weight=weight, backend="csr")
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        found.append([out, *torch.autograd.grad(out, (x, weight), direction)])
    # Rows are the same rows, added up in the same order: not a bit differs. Gradients likewise.
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def test_hubs_are_split_in_any_order() -> None:
    edges = torch.randint(0, 50, (2, 60_000))
    edges[:, :20_000] = torch.tensor([[7], [3]])
    graph = graphs.from_edges(edges, 50)
    x = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    for name in ("sum", "max", "var"):
        plain, walked = (ops.aggregate(g, x, name, backend="csr") for g in (graph, graph.reordered("degree")))
        torch.testing.assert_close(plain, walked)
        (a,), (b,) = (torch.autograd.grad(out.square().sum(), x) for out in (plain, walked))
        torch.testing.assert_close(a, b)


def test_the_graph_is_the_same_graph() -> None:
    graph = road_map()
    other = graph.reordered()
    assert other.edge_index.equal(graph.edge_index)
    assert other.edge_attr is graph.edge_attr
    assert other.dense().equal(graph.dense())
    assert other.order.sort().values.equal(torch.arange(graph.num_dst))
    assert graph.order is None


def test_attention_and_its_weights_come_as_the_caller_counts() -> None:
    graph = road_map()
    op = MessagePassing(None, "sum", None, DotProduct(8, 2))
    x = torch.randn(graph.num_dst, 8)
    for ours, theirs in zip(
        op(x, graph, return_weights=True), op(x, graph.reordered(), return_weights=True), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_neighbors_come_close_together() -> None:
    graph = road_map(20)

    def spread(g: Graph) -> float:
        place = torch.empty(g.num_dst, dtype=torch.int64)
        place[g.order if g.order is not None else ...] = torch.arange(g.num_dst)
        return float((place[g.edge_index[0]] - place[g.edge_index[1]]).abs().double().mean())

    assert spread(graph.reordered("rcm")) < 0.15 * spread(graph)  # about the side of the grid, against a third of all
    degree = graph.degree()[graph.reordered("degree").order]
    assert (degree.diff() <= 0).all()


def test_structured_and_tiny_graphs() -> None:
    for graph in (graphs.window(2).bind(9), graphs.complete().bind(1), graphs.complete().bind(0)):
        for method in ("rcm", "degree"):
            x = torch.randn(graph.num_src, 3)
            again = ops.aggregate(graph.reordered(method), x, backend="csr")
            assert again.equal(ops.aggregate(graph, x, backend="csr"))


def test_what_cannot_be_reordered() -> None:
    with pytest.raises(ValueError, match="unknown order 'metis'; expected one of rcm, degree"):
        road_map().reordered("metis")
    with pytest.raises(ValueError, match="reordered needs as many sources as destinations; got 3 x 5"):
        graphs.complete().bind(3, 5).reordered()
