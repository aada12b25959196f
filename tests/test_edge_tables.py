"""Tables of numbers in files: what is read, and that nothing else is read as something it is not."""

from __future__ import annotations

import csv
import datetime
import gzip
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mpnn import graphs
from mpnn.graphs import text_table
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
        ("ann,bob\n", "may be a header or an edge of 'ann' and 'bob'"),
        ("", "at least one row"),
        ("0,1\n0.5,1\n", r"line 2 of .* must have whole numbers below 2\^53; got \[0.5, 1.0\]"),
        ("0,nan\n", "line 1 of .* has an edge without a source"),
        (f"0,{10**30}\n", "line 1 of .* must have whole numbers"),
        (
            "%%MatrixMarket matrix array real general\n2 1\n1\n2\n",
            "is a MatrixMarket file of a dense matrix",
        ),
        (
            "%MatrixMarket matrix coordinate real general\n3 3 2\n1 2 1\n",
            "begins as a MatrixMarket file, and is not one",
        ),
        ('0,1\n1,"2\n2,3\n', "line 2 of .* has a quote too few or too many; a cell in quotes ends before a sep"),
        ('1,0\n"2,""1\n"3"x,2\n', "line 2 of .* has a quote too few or too many"),
        ('0,"1"2"\n', "line 1 of .* has a quote too few or too many"),
        ('0,1\n1,"2"\n2,3"4"\n', "line 3 of .* has a quote too few or too many"),
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


@pytest.mark.parametrize("separator", [",", ";", "\t", "|", " "])
def test_cells_in_quotes_hold_whatever_stands_in_them(tmp_path: Path, separator: str) -> None:
    """Line breaks, separators, quotes, comments and empty lines. A line is named as an editor counts it."""
    cells = ["ann\nlee", ', "', f"a{separator}  b", "\n\n# no comment\n", 'said "yes, \n"', "", "plain"]
    path = tmp_path / "q.csv"
    with path.open("w", newline="") as file:
        file.write('# a comment with one quote "\n')
        writer = csv.writer(file, delimiter=separator, lineterminator="\r\n", quoting=csv.QUOTE_ALL)
        writer.writerows([["id", "age"], *([cell, k] for k, cell in enumerate(cells)), ["last", "x"]])
    table = read_table(path)
    assert table.read("id").to_pylist() == [*cells, "last"]
    with pytest.raises(ValueError, match=r"line 15 of .* has 'x' in place of a number"):
        table.numbers("age")


def test_a_row_of_several_lines_crosses_pieces_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "_BYTES", 64)
    path = tmp_path / "e.csv"
    path.write_text("src,dst,note\n" + "".join(f'{k},{k + 1},"a\n\n{"x" * (k % 50)}\nb"\n' for k in range(300)))
    chunks = [*edge_chunks(path, 7, ("src", "dst"))]
    assert np.concatenate(chunks, 1)[0].tolist() == [*range(300)]
    path.write_text(path.read_text() + 'x,1,"c"\n')
    with pytest.raises(ValueError, match=r"line 1202 of .* has 'x' in place of a number"):
        [*edge_chunks(path, 7, ("src", "dst"))]
    path.write_text(path.read_text() + '1,1,"c\n\n')
    with pytest.raises(ValueError, match=r"line 120[23] of .* has (a quote too few|'x' in)"):
        [*edge_chunks(path, 7, ("src", "dst"))]


@pytest.mark.parametrize(
    "banner",
    [
        "%%MatrixMarket matrix coordinate real general",
        "%MatrixMarket matrix coordinate real general",
        "%%matrixmarket MATRIX Coordinate REAL General",
        "% MatrixMarket matrix coordinate real general",
        "%%MatrixMarket matrix coordinate integer general",
        "%%MatrixMarket matrix coordinate pattern general",
    ],
)
def test_matrix_market_is_recognized_by_its_content(tmp_path: Path, banner: str) -> None:
    """In every spelling, under every name. It counts from 1, and its first row holds sizes."""
    path = tmp_path / "e.txt"
    value = "" if "pattern" in banner else " 5"
    path.write_text(f"{banner}\n% a comment\n3 3 2\n1 2{value}\n2 3{value}\n")
    assert np.concatenate([*edge_chunks(path)], 1).T.tolist() == EDGES
    assert np.concatenate([*edge_chunks(path, columns=(0, 1), first=1)], 1).T.tolist() == EDGES
    with pytest.raises(ValueError, match="counts nodes from 1, as its format says; leave out first=0"):
        [*edge_chunks(path, first=0)]
    graph = graphs.write_csr(tmp_path / "g", path)
    assert (graph.num_dst, graph.num_src) == (3, 3)
    with pytest.raises(ValueError, match="is a MatrixMarket file, which holds edges: pass it as edges"):
        read_table(path)
    half = banner.lower().replace("general", "symmetric")
    path.write_text(f"{half}\n9 9 2\n2 1{value}\n3 2{value}\n")
    symmetric = graphs.write_csr(tmp_path / "s", path)
    assert {*map(tuple, symmetric.graph().edge_index.T.tolist())} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert symmetric.num_dst == 9


def test_a_table_named_as_matrix_market_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.mtx.gz"
    path.write_bytes(gzip.compress(b"3 3 1\n1 2 .5\n"))
    with pytest.raises(ValueError, match="is named as a MatrixMarket file, and does not begin as one"):
        [*edge_chunks(path)]


def test_encodings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_bytes("id,age\nZoë,1\n".encode("cp1252"))
    assert read_table(path, encoding="cp1252").text("id").tolist() == ["Zoë"]
    with pytest.raises(
        ValueError, match="it is not UTF-8 text; save it as UTF-8, or name its encoding, such as latin-1"
    ):
        read_table(path)
    with pytest.raises(ValueError, match="there is no encoding 'latin-99'"):
        read_table(path, encoding="latin-99")
    path.write_bytes("id,age\nZoë,1\n".encode("utf-16"))  # a mark says more than a name
    assert read_table(path, encoding="cp1252").text("id").tolist() == ["Zoë"]
    path.write_text("0,1\n1,2\n", encoding="utf-16-le")
    assert np.concatenate([*edge_chunks(path, encoding="utf-16-le")], 1).T.tolist() == EDGES
    graph = graphs.write_csr(tmp_path / "g", path, encoding="utf-16-le")
    assert graph.num_edges == 2


def test_a_header_alone_is_a_table_of_no_edges(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    path.write_text("from,to,hours\n")
    table = read_table(path, of_edges=True)
    assert (len(table), table.names) == (0, ["from", "to", "hours"])
    assert table.numbers("hours").shape == (0,)
    assert table.text("from").shape == (0,)
    assert [chunk.shape for chunk in edge_chunks(path, columns=("from", "to"))] == [(2, 0)]
    assert graphs.write_csr(tmp_path / "g", path, 5, columns=("from", "to")).num_edges == 0
    with pytest.raises(ValueError, match="must be a table with at least one row"):
        read_table(path)


@pytest.mark.parametrize(
    ("cells", "kind", "expected"),
    [
        (["True", "FALSE", "", "true"], "truth", [1, 0, np.nan, 1]),
        (
            ["1970-01-02", "NA", "1970-01-03 12:00", "1969-12-31T18:00:00.5"],
            "date",
            [1, np.nan, 2.5, -0.25 + 0.5 / 86400],
        ),
        (["1970-01-02T01:00+01:00", "1970-01-02 00:00:00Z"], "date", [1, 1]),
        (["1", "2.5", ""], "number", [1, 2.5, np.nan]),
        (["", "NA"], "number", [np.nan, np.nan]),
    ],
)
def test_columns_hold_numbers_truth_or_dates(
    tmp_path: Path, cells: list[str], kind: str, expected: list[float]
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,f\n" + "".join(f"{k},{cell}\n" for k, cell in enumerate(cells)))
    values, found = read_table(path).quantities("f")
    assert found == kind
    np.testing.assert_allclose(values, expected)


def test_parquet_holds_truth_and_dates(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    day = datetime.date(1970, 1, 3)
    moment = datetime.datetime(1970, 1, 2, 12, tzinfo=datetime.timezone.utc)
    table = pyarrow.table({"t": [True, None, False], "d": [day, None, day], "m": [moment, moment, None]})
    parquet.write_table(table, path)
    read = read_table(path)
    for name, kind, expected in (
        ("t", "truth", [1, np.nan, 0]),
        ("d", "date", [2, np.nan, 2]),
        ("m", "date", [1.5, 1.5, np.nan]),
    ):
        values, found = read.quantities(name)
        assert found == kind
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("2020-02-31", "line 3 of .* has '2020-02-31' in column 'f', which is no date"),
        ("31.01.2020", "line 2 of .* has '2020-01-01' in place of a number"),
        ("2020-01-01T00:00Z", "in place of a number"),  # one of two with a zone
        ("True", "in place of a number"),
    ],
)
def test_what_is_no_date_is_refused(tmp_path: Path, cell: str, why: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"id,f\n1,2020-01-01\n2,{cell}\n")
    with pytest.raises(ValueError, match=why):
        read_table(path).quantities("f")


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
