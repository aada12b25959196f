"""Reordered graphs: kernels take rows in another order, and outputs do not change."""

import pytest
import torch

from mpnn import graphs, ops
from mpnn.graph import Graph


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


def test_the_graph_is_the_same_graph() -> None:
    graph = road_map()
    other = graph.reordered()
    assert other.edge_index.equal(graph.edge_index)
    assert other.edge_attr is graph.edge_attr
    assert other.dense().equal(graph.dense())
    assert other.order.sort().values.equal(torch.arange(graph.num_dst))
    assert graph.order is None


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
    with pytest.raises(ValueError, match="reordered needs one set of nodes; the graph is 3 x 5"):
        graphs.complete().bind(3, 5).reordered()
