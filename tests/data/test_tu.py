"""Collections of small graphs: the text format by hand, with its odd lines, and the real MUTAG and PROTEINS."""

import pytest
import torch
from real_data import real
from tu_files import TWO_GRAPHS

from mpnn.data.errors import DamagedFile
from mpnn.data.tu import read_tu, tu


def write(path, content):
    path.write_text(content)
    return path


def test_tu_by_hand(tmp_path):
    data = read_tu(write(tmp_path / "two.txt", TWO_GRAPHS))
    star, pair = data.graphs
    assert star.edge_index.tolist() == [[1, 2, 0, 0], [0, 0, 1, 2]]
    assert (star.tags.tolist(), star.label, star.num_nodes) == ([0, 1, 0], 1, 3)
    assert pair.edge_index.shape == (2, 0)
    assert pair.edge_index.dtype == torch.int64
    assert (pair.tags.tolist(), pair.label) == ([1, 1], 0)
    assert (data.num_tags, data.num_classes) == (2, 2)


@pytest.mark.parametrize(
    ("content", "line", "complaint"),
    [
        ("", 1, "the file ends where the number of graphs should follow"),
        ("two\n", 1, "expected the number of graphs in whole numbers, found 'two'"),
        ("1\n3\n", 2, 'expected "n label" in whole numbers'),
        ("1\n0 1\n", 2, "a graph of 0 nodes"),
        ("1\n2 1\n0 1 1\n", 4, "the file ends"),
        ("1\n2 1\n0 2 1\n0 1 0\n", 3, "node 0 announces 2 neighbors and lists 1"),
        ("1\n2 1\n0 1 1\n0 1 2\n", 4, "node 1 has the neighbor 2, but its graph has 2 nodes"),
        ("1\n2 1\n0 1 1\n0 1 0.5\n", 4, "found '0 1 0.5'"),
        ("1\n1 1\n0 0\n1 1\n", 4, "expected the end of the file"),
        ("1\n1 1\n0 \u00e9\n", 3, "in whole numbers"),
    ],
)
def test_an_odd_tu_file_is_named_with_its_line(tmp_path, content, line, complaint):
    path = tmp_path / "odd.txt"
    path.write_bytes(content.encode("utf-8"))
    with pytest.raises(DamagedFile) as caught:
        read_tu(path)
    assert f"odd.txt, line {line}: " in str(caught.value)
    assert complaint in str(caught.value)


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
