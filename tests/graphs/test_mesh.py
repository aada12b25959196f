"""Icospheres: the numbers of their nodes and edges, and their geometry."""

import pytest
import torch

from mpnn import graphs


@pytest.mark.parametrize("level", [0, 1, 3])
def test_numbers_of_nodes_and_edges(level: int) -> None:
    """Of level k alone: 10 * 4^k + 2 nodes, 30 * 4^k edges in each direction."""
    graph = graphs.icosphere(level)
    assert graph.num_dst == graph.num_src == 10 * 4**level + 2
    assert graph.num_edges == 2 * sum(30 * 4**k for k in range(level + 1))
    assert graph.edge_index.unique(dim=1).shape == graph.edge_index.shape
    assert torch.equal(graph.reverse().dense(), graph.dense())


def test_points_are_on_the_sphere_and_edges_join_neighbors() -> None:
    points, graph = graphs.icosphere_points(2), graphs.icosphere(2)
    torch.testing.assert_close(points.norm(dim=1), torch.ones(162))
    assert torch.pdist(points).min() > 0.2
    src, dst = graph.edge_index
    torch.testing.assert_close(graph.edge_attr, points[src] - points[dst])
    length = graph.edge_attr.norm(dim=1)
    assert length[: 2 * 30].max() < 1.1  # of the icosahedron: 1.05
    finest = torch.cat([length[150 + 480 - 120 : 630], length[-120:]])
    assert finest.min() > 0.2
    assert finest.max() < 0.4
    torch.testing.assert_close(points[:12], graphs.icosphere_points(0))


def test_a_level_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be at least 0; got -1"):
        graphs.icosphere(-1)
