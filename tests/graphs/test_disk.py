"""Graphs in memory maps: what is written equals the edges, from every kind of input, in pieces of every size."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mpnn import graphs
from mpnn.graphs import tables
from mpnn.graphs.disk import chunks_of

EDGES = torch.tensor([[4, 0, 2, 2, 1], [1, 3, 3, 1, 3]])


def expected(edges: torch.Tensor, num_nodes: int) -> list[list[int]]:
    return [sorted(edges[0, edges[1] == node].tolist()) for node in range(num_nodes)]


def rows(graph: graphs.CompressedGraph) -> list[list[int]]:
    return [graph.in_neighbors(node).tolist() for node in range(graph.num_dst)]


def test_rows_hold_sorted_sources(tmp_path: Path) -> None:
    graph = graphs.write_csr(tmp_path / "g", EDGES)
    assert rows(graph) == [[], [2, 4], [], [0, 1, 2], []]
    assert (graph.num_dst, graph.num_src, graph.num_edges) == (5, 5, 5)
    assert graph.columns.dtype == np.int32
    assert graph.edge_ids is None
    assert graph.nbytes == 6 * 8 + 5 * 4
    assert graph.degree().tolist() == [0, 2, 0, 3, 0]
    assert graph.degree(torch.tensor([3, 1])).tolist() == [3, 2]
    assert sorted(file.name for file in (tmp_path / "g").iterdir()) == ["columns.npy", "header.json", "offsets.npy"]


@pytest.mark.parametrize("num_edges", [0, 1, 7, 5000])
@pytest.mark.parametrize("chunk", [1, 700, 10_000])
def test_an_external_sort_in_many_pieces(tmp_path: Path, num_edges: int, chunk: int) -> None:
    torch.manual_seed(num_edges)
    edges = torch.randint(40, (2, num_edges))  # repeated edges, and rows that reach over several ranges
    parts = edges.split(chunk, 1) if chunk > 1 or num_edges < 100 else [edges]
    graph = graphs.write_csr(tmp_path / "g", iter(parts), 41, edge_ids=True, memory=1 << 16)
    assert rows(graph) == expected(edges, 41)
    ids = torch.from_numpy(np.array(graph.edge_ids))
    assert torch.equal(graph.graph().edge_index, edges[:, ids])
    assert sorted(ids.tolist()) == list(range(num_edges))
    assert rows(graphs.open_csr(tmp_path / "g", verify=True)) == rows(graph)


def test_every_kind_of_file(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", EDGES.numpy())
    pairs = EDGES.T.tolist()
    np.save(tmp_path / "t.npy", EDGES.T.numpy())
    (tmp_path / "e.csv").write_text("source,target\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    (tmp_path / "e.txt").write_text("# a comment\n\n" + "".join(f"{a}\t{b} # an edge\n" for a, b in pairs))
    for name in ("e.npy", "t.npy", "e.csv", "e.txt"):
        assert rows(graphs.write_csr(tmp_path / f"{name}.graph", tmp_path / name)) == expected(EDGES, 5)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"src": EDGES[0].numpy(), "dst": EDGES[1].numpy(), "year": EDGES[1].numpy()})
    parquet.write_table(table, tmp_path / "e.parquet")
    with pytest.raises(ValueError, match=r"has 3 columns \('src', 'dst', 'year'\), and edges have two"):
        graphs.write_csr(tmp_path / "g", tmp_path / "e.parquet")
    assert rows(graphs.write_csr(tmp_path / "g", tmp_path / "e.parquet", columns=("src", "dst"))) == expected(EDGES, 5)


def test_two_sets_of_nodes(tmp_path: Path) -> None:
    graph = graphs.write_csr(tmp_path / "g", EDGES, num_src=9, num_dst=4)
    assert (graph.num_dst, graph.num_src) == (4, 9)
    assert rows(graph) == expected(EDGES, 4)


def test_chunks_have_at_most_one_size_and_keep_the_order() -> None:
    chunks = list(chunks_of(iter([EDGES[:, :1], EDGES[:, 1:4], EDGES[:, 4:]]), 2))
    assert [chunk.shape[1] for chunk in chunks] == [1, 2, 2]
    assert np.concatenate(chunks, 1).tolist() == EDGES.tolist()


@pytest.mark.parametrize(
    ("edges", "sizes", "error", "message"),
    [
        ([[0, 5], [1, 1]], {"num_nodes": 5}, IndexError, r"edge 1 \(5 -> 1\) has source 5, but there are 5 sources"),
        ([[0, -1], [1, 1]], {}, IndexError, r"indices must be from 0 to 2\^31 - 2"),
        ([[0], [2**31]], {}, IndexError, r"indices must be from 0 to 2\^31 - 2"),
        ([[0.5], [1.0]], {}, TypeError, "integers"),
        ([[0, 1], [1, 1], [2, 1]], {}, ValueError, "transpose"),
        ([[0], [1]], {"num_nodes": 2, "num_src": 2}, ValueError, "not both"),
        ([[0], [1]], {"num_src": 2}, ValueError, "or neither"),
    ],
)
def test_edges_that_are_refused(tmp_path: Path, edges: object, sizes: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        graphs.write_csr(tmp_path / "g", np.array(edges), **sizes)
    assert list(tmp_path.iterdir()) == []


def test_folders_are_not_replaced(tmp_path: Path) -> None:
    graphs.write_csr(tmp_path / "g", EDGES)
    with pytest.raises(FileExistsError, match="delete it first"):
        graphs.write_csr(tmp_path / "g", EDGES)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def chunks():
        yield EDGES
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphs.write_csr(tmp_path / "g", chunks(), 5, memory=1 << 16)
    assert list(tmp_path.iterdir()) == []


def _header(folder: Path, **changes: int) -> None:
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | changes))


DAMAGES = {
    "columns cut short": lambda folder: os.truncate(
        folder / "columns.npy", os.path.getsize(folder / "columns.npy") - 4
    ),
    "no offsets": lambda folder: (folder / "offsets.npy").unlink(),
    "no header": lambda folder: (folder / "header.json").unlink(),
    "more edges": lambda folder: _header(folder, num_edges=6),
    "another version": lambda folder: _header(folder, version=2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_folders_are_refused(tmp_path: Path, damage) -> None:
    graphs.write_csr(tmp_path / "g", EDGES)
    damage(tmp_path / "g")
    with pytest.raises(ValueError, match=r"write (it|the graph) again|not a graph of"):
        graphs.open_csr(tmp_path / "g")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="write_csr"):
        graphs.open_csr(tmp_path / "g")


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    graphs.write_csr(tmp_path / "g", EDGES)
    data = bytearray((tmp_path / "g" / "columns.npy").read_bytes())
    data[-1] ^= 1
    (tmp_path / "g" / "columns.npy").write_bytes(data)
    with pytest.raises(ValueError, match="digest"):
        graphs.open_csr(tmp_path / "g", verify=True)
    graph = graphs.open_csr(tmp_path / "g")  # sizes fit; the sampler finds the node that does not exist
    with pytest.raises(ValueError, match="the graph is damaged"):
        graph.sample(torch.arange(5), -1)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot drop a file from memory")
def test_samples_are_the_same_when_the_file_is_not_in_memory(tmp_path):
    edges = torch.randint(20_000, (2, 300_000), generator=torch.Generator().manual_seed(0))
    nodes = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:3000]
    graphs.write_csr(tmp_path / "g", edges, 20_000)
    with (tmp_path / "g" / "columns.npy").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sampled = graphs.open_csr(tmp_path / "g").sample(nodes, 5, seed=3)
    expected = graphs.compressed(graphs.from_edges(edges, 20_000)).sample(nodes, 5, seed=3)
    assert torch.equal(sampled[0], expected[0])
    assert torch.equal(sampled[1].edge_index, expected[1].edge_index)
    assert torch.equal(sampled[2], expected[2])


def test_names_are_numbered_as_they_first_appear(tmp_path: Path) -> None:
    """Of one set of nodes, of two, and by the numbers of nodes with names; also over several chunks."""
    path = tmp_path / "e.csv"
    path.write_text('src,dst,w\nann,bob,1\n"cem\n2",ann,2\nbob,ann,3\n')
    one = graphs.write_csr(tmp_path / "one", path, columns=("src", "dst"), names="one", edge_ids=True)
    assert one.names == (["ann", "bob", "cem\n2"],) * 2
    assert one.graph().edge_index.T.tolist() == [[1, 0], [2, 0], [0, 1]]
    two = graphs.open_csr(graphs_of(tmp_path, path, "two"), verify=True)
    assert two.names == (["bob", "ann"], ["ann", "cem\n2", "bob"])
    assert (two.num_dst, two.num_src) == (2, 3)
    assert two.graph().edge_index.T.tolist() == [[0, 0], [1, 1], [2, 1]]
    known = graphs.write_csr(tmp_path / "known", path, columns=("src", "dst"), names=["zoe", "cem\n2", "bob", "ann"])
    assert known.num_dst == 4
    assert known.graph().edge_index.T.tolist() == [[3, 2], [1, 3], [2, 3]]
    assert graphs.write_csr(tmp_path / "plain", np.array([[0], [1]])).names is None


def test_a_word_that_stands_again_below_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("a,b\nb,c\na,c\n")
    graph = graphs.write_csr(tmp_path / "g", tmp_path / "e.csv", names="one")
    assert (graph.num_edges, graph.names[0]) == (3, ["a", "b", "c"])


def graphs_of(folder: Path, path: Path, names: str) -> Path:
    graphs.write_csr(folder / names, path, columns=("src", "dst"), names=names)
    return folder / names


def test_many_names_in_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_CHUNK", 7)
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 40, (100, 2))
    (tmp_path / "e.txt").write_text("".join(f"n{a} n{b}\n" for a, b in edges))
    graph = graphs.write_csr(tmp_path / "g", tmp_path / "e.txt", names="one")
    first = [*dict.fromkeys(f"n{k}" for k in edges.ravel())]
    assert graph.names == (first, first)
    found = sorted((first[a], first[b]) for a, b in graph.graph().edge_index.T.tolist())
    assert found == sorted((f"n{a}", f"n{b}") for a, b in edges)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("ann,bob\ncem,dan\n", {"names": "one"}, "may be a header or an edge of 'ann' and 'bob'"),
        ("ann,bob\ncem,dan\n", {"names": "one", "columns": (0, 1)}, "may be a header or an edge of 'ann' and 'bob'"),
        ("a,b\nc,d\n", {"names": "one"}, "may be a header or an edge of 'a' and 'b'"),
        ("from,to\nann,to\n", {"names": "one"}, "may be a header or an edge of 'from' and 'to'"),
        ("from,to\nann,\n", {"names": "one"}, "line 2 of .* has an edge without a source or a destination"),
        (
            "from,to\nann,bob\n",
            {"names": ["ann"]},
            "line 2 of .* has a node 'bob' in column 'to', which is none of the 1",
        ),
        ("from,to\nann,bob\n", {"names": ["ann", "ann"]}, "names must be distinct; 'ann' is there twice"),
        ("from,to\nann,bob\n", {"names": "three"}, 'names must be "one", "two" or the names of all nodes'),
        ("from,to\nann,bob\n", {"names": "one", "first": 1}, "names number the nodes; got first=1"),
        ("from,to\nann,bob\n", {}, r"has 'ann' in place of a number in column 'from'; number .* or let names number"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, text: str, options: dict, message: str) -> None:
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        graphs.write_csr(tmp_path / "g", tmp_path / "e.csv", **options)
    assert not (tmp_path / "g").exists()


def test_a_first_row_of_known_names_is_an_edge(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("ann,bob\ncem,dan\n")
    graph = graphs.write_csr(tmp_path / "g", tmp_path / "e.csv", names=["ann", "bob", "cem", "dan"])
    assert graph.num_edges == 2
    with pytest.raises(ValueError, match="names are those in a file of edges"):
        graphs.write_csr(tmp_path / "h", np.array([[0], [1]]), names="one")
    np.save(tmp_path / "e.npy", np.array([[0], [1]]))
    with pytest.raises(ValueError, match=r"names are text, and .* is an array"):
        graphs.write_csr(tmp_path / "h", tmp_path / "e.npy", names="one")
    (tmp_path / "g" / "names.json").write_text("[]")
    with pytest.raises(ValueError, match=r"names.json is damaged"):
        graphs.open_csr(tmp_path / "g", verify=True)
