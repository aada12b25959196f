"""Tables of numbers in files: what is read, and that nothing else is read as something it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpnn import graphs
from mpnn.graphs.tables import column_names, edge_chunks, named, read_columns

EDGES = [[0, 1], [1, 2]]  # 0 -> 1, 1 -> 2


def read(path: Path, text: str | bytes, columns=None) -> list[list[int]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return np.concatenate(list(edge_chunks(path, columns=columns)), 1).T.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "0,1\n1,2\n",
        "\ufeff0,1\n1,2\n",
        "+0,1\n1,2\n",
        " 0,1\r\n 1, 2 # a comment\r\n",
        "0;1\n1;2\n",
        "0\t1\n\n1\t2\n\n",
        "# SNAP\n# FromNodeId ToNodeId\n0   1\n1   2\n",
        "src,dst\n0,1\n1,2\n",
        '"src","dst"\n"0","1"\n"1","2"\n',
        "0.0,1.0\n1e0,2.0\n",
    ],
)
def test_two_columns_are_edges(tmp_path: Path, text: str) -> None:
    assert read(tmp_path / "e.csv", text) == EDGES


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (",src,dst\n0,0,1\n1,1,2\n", ("src", "dst")),
        ('"","dst","name","src"\n"1",1,"Ann, or Bob",0\n"2",2,"Eve",1\n', ("src", "dst")),
        ("\tsrc\tdst\n7\t0\t1\n8\t1\t2\n", (1, 2)),
        ("0 1 0.5\n1 2 0.25\n", (0, 1)),
    ],
)
def test_columns_are_named(tmp_path: Path, text: str, columns: tuple) -> None:
    with pytest.raises(ValueError, match=r"e\.csv has \d columns.*, and edges have two, .*; name two of them"):
        read(tmp_path / "e.csv", text)
    assert read(tmp_path / "e.csv", text, columns) == EDGES


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0\n1\n", "has 1 columns, and edges have two"),
        ("0,1\n1,2,3\n", "line 2 of .* has 3 columns, and the first row has 2"),
        ("0 1\n1,2\n", "line 2 of .* has 1 columns, and the first row has 2"),
        ("0\t1\n1,2\n", "line 2 of .* has 1 columns"),
        ("a,b\n0,1\n\n1,,2\n", "line 4 of .* has 3 columns"),
        ("0,1\n1,\n", "line 2 of .* has '' in place of a number$"),
        (
            "src,dst\nann,bob\n",
            "line 2 of .* has 'ann' in place of a number in column 'src'; number the nodes",
        ),
        ("ann,0\nbob,1\n", "line 1 of .* has 'ann' in place of a number"),
        ("1_0,2\n", "line 1 of .* has '1_0' in place of a number"),
        ("ann,bob\n", "at least one row"),
        ("", "at least one row"),
        ("0,1\n0.5,1\n", r"line 2 of .* must have whole numbers below 2\^53; got \[0.5, 1.0\]"),
        ("0,nan\n", "line 1 of .* must have whole numbers"),
        (f"0,{10**30}\n", "line 1 of .* must have whole numbers"),
        (
            "%%MatrixMarket matrix coordinate pattern general\n3 3 1\n1 2\n",
            "MatrixMarket file: its first row holds sizes",
        ),
        ("0,1\n".encode("utf-16"), "not UTF-8 text"),
    ],
)
def test_what_is_no_table_of_edges_is_refused(tmp_path: Path, text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(tmp_path / "e.csv", text)


@pytest.mark.parametrize(
    "columns", [("src", "dest"), ("src",), ("src", "src"), (0, 4), ("src", "twice"), ("src", "dst", "twice")]
)
def test_columns_that_a_file_does_not_have_are_refused(tmp_path: Path, columns: tuple) -> None:
    with pytest.raises(ValueError, match=r"two different columns of the 4 of .*\('src', 'dst', 'twice', 'twice'\)"):
        read(tmp_path / "e.csv", "src,dst,twice,twice\n0,1,1,1\n", columns)


def test_a_wide_row_in_any_column_is_found(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 3 of .* has 4 columns, and the first row has 3"):
        read(tmp_path / "e.csv", "name,src,dst\nAnn,0,1\nBob, the second,1,2\n", ("src", "dst"))


def test_chunks_have_the_size_and_keep_the_order(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n" + "".join(f"{k},{k + 1}\n" for k in range(7)))
    chunks = list(edge_chunks(tmp_path / "e.csv", 3))
    assert [chunk.shape[1] for chunk in chunks] == [2, 3, 2]  # the header is a line of the first
    assert np.concatenate(chunks, 1)[0].tolist() == [*range(7)]


def test_arrays_of_edges_stand_or_lie(tmp_path: Path) -> None:
    edges = np.arange(6).reshape(2, 3)
    for name, array in (("lie", edges), ("stand", edges.T)):
        np.save(tmp_path / f"{name}.npy", array)
        assert np.array_equal(next(edge_chunks(tmp_path / f"{name}.npy")), edges)
    np.save(tmp_path / "wide.npy", np.zeros((3, 4), int))
    with pytest.raises(ValueError, match=r"must hold edges \[2, E\] or \[E, 2\]; got \[3, 4\]"):
        next(edge_chunks(tmp_path / "wide.npy"))
    with pytest.raises(ValueError, match="columns= names columns of text"):
        next(edge_chunks(tmp_path / "lie.npy", columns=(0, 1)))


def test_rows_of_nodes_have_no_gaps(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("# features\n\na,b\n1,2\n# the second\n3,4\n\n")
    assert column_names(path) == ["a", "b"]
    table = read_columns(path, ["b", "a"])
    assert {name: column.tolist() for name, column in table.columns.items()} == {"b": [2, 4], "a": [1, 3]}
    assert (table.lines, table.where(1)) == ([4, 6], f"line 6 of {path}")
    path.write_text("1,2\n\n3,4\n")
    with pytest.raises(ValueError, match=r"line 2 of .*x\.csv is empty, so that it is unclear which node"):
        read_columns(path, ["0"])


def test_words_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('id,0,name\n007, 1.50 ,"Bob, the second # cook"\n')  # pandas numbers columns without names
    table = read_columns(path, ["0"], ["id", "name"])
    assert {name: column.tolist() for name, column in table.columns.items()} == {
        "0": [1.5],
        "id": ["007"],
        "name": ["Bob, the second # cook"],
    }
    path.write_text("id,name\n1,a,b\n")
    with pytest.raises(ValueError, match=r"line 2 of .* has 3 columns, and the first row has 2"):
        read_columns(path, text=["id"])


def test_columns_are_written_with_a_comma() -> None:
    assert named("src, dst") == ["src", "dst"]
    assert named("1,2") == [1, 2]


def test_graphs_on_disk_are_read_by_this_parser(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("\ufeff,dst,src\n0,1,0\n1,2,1\n")
    graph = graphs.write_csr(tmp_path / "g", tmp_path / "e.csv", columns=("src", "dst"))
    assert graph.graph().edge_index.T.tolist() == EDGES
    with pytest.raises(ValueError, match="edges are no path"):
        graphs.write_csr(tmp_path / "h", np.array(EDGES).T, columns=("src", "dst"))
