"""Collections of small graphs: the text format by hand, and the real MUTAG and PROTEINS."""

import pytest
import torch
from real_data import real

from mpnn.data.tu import read_tu, tu

TWO_GRAPHS = "2\n3 1\n5 2 1 2\n7 1 0\n5 1 0\n2 -1\n7 0\n7 0\n"


def test_tu_by_hand():
    data = read_tu(TWO_GRAPHS)
    star, pair = data.graphs
    assert star.edge_index.tolist() == [[1, 2, 0, 0], [0, 0, 1, 2]]
    assert (star.tags.tolist(), star.label, star.num_nodes) == ([0, 1, 0], 1, 3)
    assert pair.edge_index.shape == (2, 0)
    assert pair.edge_index.dtype == torch.int64
    assert (pair.tags.tolist(), pair.label) == ([1, 1], 0)
    assert (data.num_tags, data.num_classes) == (2, 2)


@pytest.mark.parametrize(
    ("collection", "graphs", "nodes", "tags", "positive"),
    [("MUTAG", 188, 3371, 7, 125), ("PROTEINS", 1113, 43471, 3, 450)],
)
def test_the_real_collections(collection, graphs, nodes, tags, positive):
    data = real(tu, collection)
    assert (len(data.graphs), data.num_classes) == (graphs, 2)
    assert sum(graph.num_nodes for graph in data.graphs) == nodes
    assert sum(graph.label for graph in data.graphs) == positive
    # Without the first graph, which is damaged in a copy of MUTAG in circulation.
    assert torch.cat([graph.tags for graph in data.graphs[1:]]).unique().numel() == tags
    for graph in data.graphs:
        src, dst = graph.edge_index.tolist()
        assert set(zip(src, dst, strict=True)) == set(zip(dst, src, strict=True))
        assert not graph.edge_index.numel() or graph.edge_index.max() < graph.num_nodes
