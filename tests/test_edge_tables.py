"""Tables of numbers in files: what is read, and that nothing else is read as something it is not."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mpnn import graphs
from mpnn.graphs.tables import edge_chunks, named, read_table

EDGES = [[0, 1], [1, 2]]  # 0 -> 1, 1 -> 2


def read(path: Path, text: str | bytes, columns=None) -> list[list[int]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return np.concatenate(list(edge_chunks(path, columns=columns)), 1).T.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "0,1\n1,2\n",
        ",src,dst\n0,0,1\n1,1,2\n",
        "#src,dst\n0,1\n1,2\n",
        "% asym\n0 1\n1 2\n",
        "src,dst\n0,1\n1,2\n".encode("utf-16"),
        gzip.compress(b"0,1\r\n1,2\r\n", mtime=0),
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
        (",src,dst,year\n0,0,1,9\n1,1,2,9\n", ("src", "dst")),
        ('"","dst","name","src"\n"1",1,"Ann, or Bob",0\n"2",2,"Eve",1\n', ("src", "dst")),
        ("id\tsrc\tdst\n7\t0\t1\n8\t1\t2\n", (1, 2)),
        ("src|dst|w\n0|1|1,5\n1|2|2\n", ("src", "dst")),
        ("0 1 0.5\n1 2 0.25\n", (0, 1)),
    ],
)
def test_columns_are_named(tmp_path: Path, text: str, columns: tuple) -> None:
    with pytest.raises(ValueError, match=r"e\.csv has \d columns.*, and edges have two, .*; name two as columns"):
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
        ("0,1\n1,\n", "line 2 of .* has an edge without a source or a destination"),
        (
            "src,dst\nann,bob\n",
            "line 2 of .* has 'ann' in place of a number in column 'src'; number the nodes",
        ),
        ("ann,0\nbob,1\n", "line 1 of .* has 'ann' in place of a number"),
        ("0,1\0\n1,2\n", "line 1 of .* has a zero byte"),
        ("1_0,2\n", "line 1 of .* has '1_0' in place of a number"),
        ("ann,bob\n", "at least one row"),
        ("", "at least one row"),
        ("0,1\n0.5,1\n", r"line 2 of .* must have whole numbers below 2\^53; got \[0.5, 1.0\]"),
        ("0,nan\n", "line 1 of .* has an edge without a source"),
        (f"0,{10**30}\n", "line 1 of .* must have whole numbers"),
        (
            "%%MatrixMarket matrix coordinate pattern general\n3 3 1\n1 2\n",
            "MatrixMarket file: its first row holds sizes",
        ),
        ("Zoë,1\n".encode("latin-1"), "not UTF-8 text"),
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
    assert [chunk.shape[1] for chunk in chunks] == [3, 3, 1]
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
    table = read_table(path)
    assert table.names == ["a", "b"]
    assert (table.numbers("b").tolist(), table.numbers("a").tolist()) == ([2, 4], [1, 3])
    assert table.where(1) == f"line 6 of {path}"
    path.write_text("1,2\n\n3,4\n")
    with pytest.raises(ValueError, match=r"line 2 of .*x\.csv is empty, so that it is unclear which node"):
        read_table(path)


def test_words_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('id,0,name\n007, 1.50 ,"Bob, the second # cook"\n')  # pandas numbers columns without names
    table = read_table(path)
    assert table.numbers("0").tolist() == [1.5]
    assert table.text("id").tolist() == ["007"]
    assert table.text("name").tolist() == ["Bob, the second # cook"]
    path.write_text("id,name\n1,a,b\n")
    with pytest.raises(ValueError, match=r"line 2 of .* has 3 columns, and the first row has 2"):
        read_table(path)


@pytest.mark.parametrize(
    ("text", "is_header"),
    [
        ("from,to\nann,bob\n", None),  # or an edge, of nodes that no other edge has
        ("ann,bob\nbob,ann\nann,cem\n", False),  # "ann" stands in its column again
        ("from,weight\nann,1\n", True),
        ("from,weight\nann,NA\n", None),
        ("ann,1\nbob,2\n", False),
        ("ann,NA\nbob,2\n", False),
        ("ID,club\nann,a\n", True),
        (",age\n0,a\n", True),
        ("1 0,5\n2 1,5\n", False),
        ("a;1,5\nb;2,5\n", False),
        ("#age,club\nann,a\n", None),
        ("# age, club\nann,a\nann,b\n", False),
    ],
)
def test_a_first_row_is_a_header_or_a_row(tmp_path: Path, text: str, is_header: bool | None) -> None:
    (tmp_path / "x.csv").write_text(text)
    table = read_table(tmp_path / "x.csv")
    assert (bool(table.header), table.is_sure) == (is_header is not False, is_header is not None)


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "0,1\n")
        archive.writestr("b.csv", "0,1\n")
    with pytest.raises(ValueError, match=r"must hold one table; it holds 2 files, a\.csv, b\.csv"):
        read_table(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("[Content_Types].xml", "")
    with pytest.raises(ValueError, match="is a workbook; save its sheet as CSV"):
        read_table(path)
    path.write_bytes(gzip.compress(b"0,1\n" * 1000)[:20])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        read_table(path)
    (tmp_path / "x.parquet").write_text("0,1\n")
    with pytest.raises(ValueError, match="is not Parquet"):
        read_table(tmp_path / "x.parquet")
    path.write_text("a,b;c\nd,e;f\n")
    with pytest.raises(ValueError, match="as many commas as the others, and as many semicolons"):
        read_table(path)


def test_columns_are_written_with_a_comma() -> None:
    assert named("src, dst") == ["src", "dst"]
    assert named("1,2") == [1, 2]


def test_graphs_on_disk_are_read_by_this_parser(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("\ufeff,dst,src\n0,1,0\n1,2,1\n")
    graph = graphs.write_csr(tmp_path / "g", tmp_path / "e.csv", columns=("src", "dst"))
    assert graph.graph().edge_index.T.tolist() == EDGES
    with pytest.raises(ValueError, match="edges are no path"):
        graphs.write_csr(tmp_path / "h", np.array(EDGES).T, columns=("src", "dst"))
