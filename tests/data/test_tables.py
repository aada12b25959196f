"""Graphs from files of one's own: what is read, how it is split, and what is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pytest
import torch
from pyarrow import parquet
from table_fuzzer import misread

from mpnn.data import DamagedFile, node_tables
from mpnn.data.columns import Column
from mpnn.data.tables import EdgeFile, node_inputs

PEOPLE = "id,age,job,team\nann,30,cook,a\nbob,41,,a\neve,25,nurse,b\ndan,50,cook,b\nzoe,33,nurse,b\n"
KNOWS = "from,to,hours\nann,bob,1.5\nbob,eve,2\neve,bob,2\ndan,dan,9\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A path of ten nodes; the class of the last is unknown."""
    np.save(tmp_path / "x.npy", np.eye(10))
    (tmp_path / "y.txt").write_text("# class\n" + "0\n1\n" * 4 + "1\n-1\n")
    (tmp_path / "e.csv").write_text("".join(f"{i},{i + 1}\n" for i in range(9)) + "1,0\n")
    return {"nodes": tmp_path / "x.npy", "labels": tmp_path / "y.txt", "edges": tmp_path / "e.csv"}


@pytest.fixture
def people(tmp_path: Path) -> dict[str, Any]:
    """Five people with names, in one table with what is learned: their jobs."""
    (tmp_path / "people.csv").write_text(PEOPLE)
    (tmp_path / "knows.csv").write_text(KNOWS)
    edges = EdgeFile(tmp_path / "knows.csv", weights="hours")
    return {"nodes": tmp_path / "people.csv", "edges": edges, "target": ["job"], "ignore": ["team"]}


def test_tables_become_a_graph_with_a_split_of_its_labeled_nodes(files: dict[str, Path]) -> None:
    data = node_tables(**files)
    assert torch.equal(data.x, torch.eye(10))
    assert data.edge_index.shape == (2, 18)  # nine links in both directions, one of them listed twice
    parts = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert parts.sum(1).tolist() == [5, 2, 2]
    assert parts.sum(0).tolist() == [1] * 9 + [0]
    assert torch.equal(data.train_mask, node_tables(**files).train_mask)
    assert node_tables(files["nodes"], files["labels"]).edge_index.shape == (2, 0)


@pytest.mark.parametrize("name", ["id", "ID", "node_id"])
def test_names_of_nodes_and_classes_are_kept(people: dict[str, Any], name: str) -> None:
    people["nodes"].write_text(PEOPLE.replace("id", name, 1))
    data = node_tables(**people)
    assert (data.ids, data.inputs, data.outputs.names) == (
        ("ann", "bob", "eve", "dan", "zoe"),
        ("age",),
        ("cook", "nurse"),
    )
    assert data.y.tolist() == [0, -1, 1, 0, 1]
    assert not (data.train_mask | data.val_mask | data.test_mask)[1]  # Bob's job is unknown
    assert data.edge_index.T.tolist() == [[1, 0], [0, 1], [2, 1], [1, 2]]  # by dst, then src; Dan's loop is gone
    assert data.edge_weight is not None
    assert data.edge_weight.tolist() == [1.5, 1.5, 2, 2]


def test_directed_edges_count_once(people: dict[str, Any]) -> None:
    people["edges"] = EdgeFile(people["edges"].path, ("from", "to"), directed=True)
    data = node_tables(**people)
    assert data.edge_index.T.tolist() == [[0, 1], [2, 1], [1, 2]]
    assert data.edge_weight is None


def test_rows_of_other_tables_are_found_by_their_id(people: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("job,id\nnurse,zoe\ncook,ann\ncook,dan\nnurse,eve\n")
    (tmp_path / "parts.csv").write_text("split,id\ntest,zoe\nval,eve\ntrain,dan\ntrain,ann\n")
    people |= {"labels": tmp_path / "jobs.csv", "split": tmp_path / "parts.csv", "target": None}
    people["ignore"] = ["team", "job"]
    data = node_tables(**people)
    assert data.y.tolist() == [0, -1, 1, 0, 1]
    masks = data.train_mask, data.val_mask, data.test_mask
    assert [mask.nonzero().flatten().tolist() for mask in masks] == [[0, 3], [2], [4]]


def test_masks_state_the_split(files: dict[str, Path], tmp_path: Path) -> None:
    rows = [f"{int(k < 4)},{k in (4, 5)},{1.0 if k in (6, 7) else ''}" for k in range(10)]
    (tmp_path / "masks.csv").write_text("train_mask,val_mask,test_mask\n" + "\n".join(rows))
    data = node_tables(**files, split=tmp_path / "masks.csv")
    assert data.train_mask.tolist() == [True] * 4 + [False] * 6
    assert data.val_mask.nonzero().flatten().tolist() == [4, 5]
    assert data.test_mask.nonzero().flatten().tolist() == [6, 7]


def test_several_labels_and_numbers_are_targets(files: dict[str, Path]) -> None:
    files["labels"].write_text("likes,owns\n" + "1,0\n0,1\n" * 4 + ",\n1,1\n")
    data = node_tables(**files, problem="multilabel")
    assert data.y.dtype == torch.bool
    assert data.y[:2].tolist() == [[True, False], [False, True]]
    assert data.outputs.names == ("likes", "owns")
    files["labels"].write_text("price\n" + "".join(f"{k}.5\n" for k in range(10)))
    data = node_tables(**files, problem="regression")
    assert data.y[data.train_mask].mean().abs() < 1e-6
    numbers = data.y * torch.tensor(data.outputs.std) + torch.tensor(data.outputs.mean)
    torch.testing.assert_close(numbers[:, 0], torch.arange(10) + 0.5)


def test_large_targets_keep_their_digits(files: dict[str, Path]) -> None:
    files["labels"].write_text("time\n" + "".join(f"{1_700_000_000 + k}\n" for k in range(10)))  # 128 apart in float32
    data = node_tables(**files, problem="regression")
    steps = (data.y[1:, 0] - data.y[:-1, 0]) * data.outputs.std[0]
    torch.testing.assert_close(steps, torch.ones(9))
    files["labels"].write_text("time\n" + "1e200\n2e200\n" * 5)
    with pytest.raises(DamagedFile, match=r"line 2 of .* has a target that is not finite, or too large"):
        node_tables(**files, problem="regression")


def test_rows_with_ids_are_those_of_numbered_nodes(files: dict[str, Path]) -> None:
    files["labels"].write_text("id,c\n" + "".join(f"{k},{'ab'[k < 3]}\n" for k in reversed(range(9))))
    data = node_tables(**files)
    assert [data.outputs.names[k] for k in data.y[:9]] == [*"bbbaaaaaa"]
    assert data.y[9] == -1
    assert int(data.train_mask.sum() + data.val_mask.sum() + data.test_mask.sum()) == 9
    files["labels"].write_text("id,c\n" + "".join(f"n{k},{'ab'[k < 3]}\n" for k in range(10)))
    with pytest.raises(DamagedFile, match=r"line 2 of .* has a node in column 'id' that is no id of .*x.npy"):
        node_tables(**files)


def test_classes_are_numbers_of_any_kind(files: dict[str, Path]) -> None:
    files["labels"].write_text("year\n" + "2010.0\n1999.0\n" * 4 + "\n".join(["-1", "1999"]))  # pandas, of a gap
    assert node_tables(**files).outputs.names == ("1999", "2010")


def test_other_nodes_need_the_features_of_the_model(people: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,height,id\n20,1.8,kim\n")
    inputs = node_inputs(tmp_path / "new.csv", None, {"nodes": {"age": Column("number")}})
    assert (inputs.x.tolist(), inputs.ids) == ([[20.0]], ("kim",))
    of_model = {name: Column("number") for name in ("height", "age")}  # the order of the model, not of the file
    swapped = node_inputs(tmp_path / "new.csv", None, {"nodes": of_model})
    assert (swapped.x.tolist(), swapped.inputs) == ([[pytest.approx(1.8), 20.0]], ("height", "age"))
    with pytest.raises(DamagedFile, match=r"new\.csv has no column 'weight'; it has 'age', 'height', 'id'"):
        node_inputs(tmp_path / "new.csv", None, {"nodes": {"weight": Column("number")}})


def test_parquet_holds_the_same(people: dict[str, Any], tmp_path: Path) -> None:
    expected = node_tables(**people)
    for name in ("people", "knows"):
        options = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
        parquet.write_table(
            pyarrow.csv.read_csv(tmp_path / f"{name}.csv", convert_options=options), tmp_path / f"{name}.parquet"
        )
    edges = EdgeFile(tmp_path / "knows.parquet", weights="hours")
    data = node_tables(**people | {"nodes": tmp_path / "people.parquet", "edges": edges})
    assert (data.ids, data.outputs.names) == (expected.ids, expected.outputs.names)
    for name in ("x", "y", "train_mask", "edge_index", "edge_weight"):
        assert torch.equal(getattr(data, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("edges", "0,1\n3,10\n", r"line 2 of .*e.csv has no two of the 10 nodes of .*x.npy, numbered from 0"),
        ("edges", "a,b\n1,x\n", r"line 2 of .*e.csv has 'x' in place of a number"),
        ("edges", "a,b,c\n1,2,3\n", r"has 3 columns \('a', 'b', 'c'\), and edges have two"),
        ("labels", "10\n" * 10, "has one class only, 10"),
        ("labels", "0\n1\n\n" + "0\n" * 7, r"line 3 of .*y.txt is empty"),
        ("labels", "0\n1\n0\n" + "-1\n" * 7, "has 3 rows with a target; training, validation and test need 4 at least"),
        ("labels", "0\n1\n", r"must have one row for each of the 10 rows"),
        ("labels", "a\nb\n" * 4 + "b\n", r"must have one row for each of the 10 rows of .*; it has 9"),
        ("labels", "job\n" + "cook\nnurse\n" * 4 + "cook\n", r"one row for each of the 10 rows of .*; it has 9"),
        ("labels", "0\n0.5\n" * 5, r"line 2 of .*y.txt has a number that is no class.* problem to regression"),
        ("labels", "0\n-2\n" * 5, r"line 2 of .*y.txt has a number that is no class"),
        ("labels", "c\n" + "0\n1\n" * 4 + "x\n0\n", r"line 10 of .*y.txt has a word in column 'c' among numbers"),
        (
            "labels",
            "c\n" + "".join(f"n{k}\n" for k in range(10)),
            "column 'c' .* has 10 classes for 10 rows, and a class",
        ),
        (
            "labels",
            ",c\n" + "".join(f"{2 * k},{k % 2}\n" for k in range(10)),
            r"pandas wrote to .* are not 0, 1, 2, \.\.\.",
        ),
        ("edges", "1,2\n2,10\n", r"no edge of .*e.csv has node 0: set first to 1 \(--first 1\) if"),
        ("edges", "0,1\n1,null\n", r"line 2 of .*e.csv has an edge without a source or a destination"),
        ("edges", "0,1\n1,9007199254740993\n", r"line 2 of .*e.csv must have whole numbers below 2\^53"),
        ("labels", "c,d\n" + "0,1\n" * 10, "has 2 columns to learn, c, d, and classes are one"),
        ("labels", "-1\n" * 10, "has 0 rows with a target"),
    ],
)
def test_tables_that_do_not_fit_are_refused(files: dict[str, Path], name: str, text: str, why: str) -> None:
    files[name].write_text(text)
    with pytest.raises(DamagedFile, match=why):
        node_tables(**files)


@pytest.mark.parametrize(
    ("people_text", "knows_text", "why"),
    [
        (PEOPLE + "ann,1,cook,a\n", KNOWS, r"line 7 of .*people.csv has the id of a row above; ids are unique"),
        (PEOPLE + ",1,cook,a\n", KNOWS, r"line 7 of .*people.csv has no id"),
        (PEOPLE + "NA,1,cook,a\n", KNOWS, r"line 7 of .*people.csv has no id \(NA, nan, None and null stand for"),
        (
            PEOPLE.replace("41", "null"),
            KNOWS,
            r"line 3 of .*people.csv has no number in column 'age' \(it is empty, NaN",
        ),
        (PEOPLE.replace("41", "1_0"), KNOWS, r"line 3 of .*people.csv has '1_0' in place of a number in column 'age'"),
        (
            PEOPLE.replace("bob", '"bob'),
            KNOWS,
            r"line 3 of .*people.csv has a quote too few or too many; a cell in quotes ends",
        ),
        (
            "id,age,job,team\n" + "".join(f"n{k},{1_700_000_000 + k},{k % 2},a\n" for k in range(9)),
            KNOWS,
            r"line 3 of .* has 1700000001 in column 'age', whose differences float32 rounds away; scale the features",
        ),
        (
            PEOPLE.replace("id,", "person,"),
            KNOWS,
            r"line 2 of .* has 'ann' .* in column 'person'; .*ignore it \(--ignore NAME\); if it names .*call it id",
        ),
        (
            "user_id,age,job,team\n" + "".join(f"{k},5,{k % 2},a\n" for k in range(9)),
            KNOWS,
            r"column 'user_id' of .*people.csv seems to name the nodes; call it id, ignore it, or rename",
        ),
        (PEOPLE, "ann,zed\nann,bob\n", r"line 1 of .*knows.csv has a node in column '1' that is no id of .*people.csv"),
        (
            PEOPLE,
            "yan,zed\nann,bob\n",
            r"first line of .* may be a header or an edge of 'yan' and 'zed': name the columns",
        ),
        (PEOPLE + "#kim,1,cook,a\n", KNOWS, r"line 7 of .*people.csv begins with #, and may be a comment or a row"),
        (
            PEOPLE.replace("30", "old"),
            KNOWS,
            r"line 2 .* has 'old' .* in column 'age'; features are numbers, .* ignore",
        ),
        (PEOPLE.replace("id,", ","), KNOWS, "column 0 of .*people.csv has no name: name it id if it names"),
        (PEOPLE.replace("team", "age"), KNOWS, "has 4 columns, and two are named 'age'"),
        (PEOPLE.replace("team", "squad"), KNOWS, "has no column 'team'; it has 'id', 'age', 'job', 'squad'"),
        (
            PEOPLE,
            KNOWS + "kim,ann,1\n",
            r"line 6 of .*knows.csv has a node in column 'from' that is no id of .*people.csv: 'kim'",
        ),
        (PEOPLE, KNOWS + "ann,bob,7\n", r"line 6 of .*knows.csv repeats an edge with another weight"),
        (PEOPLE, KNOWS.replace("1.5", "-inf"), r"line 2 of .*knows.csv has a weight that is not finite"),
        (PEOPLE, KNOWS.replace("1.5", ""), r"line 2 of .*knows.csv has no number in column 'hours'"),
        (PEOPLE, KNOWS.replace("hours", "days"), "has no column 'hours'; it has 'from', 'to', 'days'"),
        (PEOPLE, KNOWS.replace("from,to", "ann,bob"), "the first line of .* links 'ann' and 'bob'; write a header"),
    ],
)
def test_tables_with_names_that_do_not_fit_are_refused(
    people: dict[str, Any], people_text: str, knows_text: str, why: str
) -> None:
    people["nodes"].write_text(people_text)
    people["edges"].path.write_text(knows_text)
    if "hours" not in knows_text and "days" not in knows_text:
        people["edges"] = people["edges"].path
    with pytest.raises(DamagedFile, match=why):
        node_tables(**people)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("split\n" + "train\n" * 4 + "valid\n" * 6, "line 6 .* has a split other than train, val, test and nothing"),
        (
            "split\n" + "train\n" * 9 + '""\n',
            "leaves a part empty; training needs rows with a target in train, val, test",
        ),
        ("train_mask,val_mask,test_mask\n" + "1,1,0\n" * 10, "line 2 .* puts a row into two parts"),
        ("train_mask,val_mask\n" + "1,0\n" * 10, "has no column 'test_mask'"),
    ],
)
def test_a_wrong_split_is_refused(files: dict[str, Path], tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "split.csv").write_text(text)
    with pytest.raises(DamagedFile, match=why):
        node_tables(**files, split=tmp_path / "split.csv")


def test_targets_with_gaps_or_other_labels_are_refused(files: dict[str, Path]) -> None:
    files["labels"].write_text("a,b\n" + "1,0\n" * 9 + "1,\n")
    with pytest.raises(DamagedFile, match=r"line 11 of .* has some of the targets; fill all of them, or none"):
        node_tables(**files, problem="regression")
    files["labels"].write_text("a,b\n" + "1,0\n" * 9 + "1,2\n")
    with pytest.raises(DamagedFile, match=r"line 11 of .* has a label other than 0 and 1"):
        node_tables(**files, problem="multilabel")


def test_features_that_are_not_finite_are_refused(files: dict[str, Path]) -> None:
    x = np.eye(10)
    x[3, 2] = np.nan
    np.save(files["nodes"], x)
    with pytest.raises(DamagedFile, match=r"row 4 of .* has no number in column '2'"):
        node_tables(**files)
    np.save(files["nodes"], np.eye(10) * 1e300)
    with pytest.raises(DamagedFile, match=r"row 1 of .* is infinite or too large for float32"):
        node_tables(**files)


def test_numbers_of_columns_are_no_features(files: dict[str, Path], tmp_path: Path) -> None:
    files["nodes"] = tmp_path / "x.csv"
    files["nodes"].write_text("0,1,2\n" + "5,6,7\n" * 9)
    with pytest.raises(DamagedFile, match=r"line 1 of .*x.csv counts the columns, as pandas"):
        node_tables(**files)


def test_arrays_of_edges_hold_whole_numbers(files: dict[str, Path], tmp_path: Path) -> None:
    files["edges"] = tmp_path / "e.npy"
    np.save(files["edges"], np.array([[0, 1, 2], [1, 2, 3]], np.uint64))
    assert node_tables(**files).edge_index.dtype == torch.int64
    np.save(files["edges"], np.array([[0, 1, 2], [1, 2.5, 3]]))
    with pytest.raises(DamagedFile, match=r"row 2 of .*e.npy must have whole numbers"):
        node_tables(**files)


@pytest.mark.parametrize(
    ("text", "features", "jobs"),
    [
        (PEOPLE.replace(",", ";").replace("30", "30,5"), [30.5, 41, 25, 50, 33], "cook nurse"),
        (PEOPLE.replace(",", "|"), [30, 41, 25, 50, 33], "cook nurse"),
        (PEOPLE.replace("30", '"30,5"'), [30.5, 41, 25, 50, 33], "cook nurse"),
        (PEOPLE.replace(",", "\t").replace("age", "age, in years"), [30, 41, 25, 50, 33], "cook nurse"),
        (PEOPLE.replace("age", "#age").replace("bob,41,", "bob,41,None"), [30, 41, 25, 50, 33], "cook nurse"),
        (PEOPLE.replace("id,", "ID,").replace("\n", "\r\n"), [30, 41, 25, 50, 33], "cook nurse"),
        (
            "\n".join(f"{k - 1 if k else ''},{row}" for k, row in enumerate(PEOPLE.split())),
            [30, 41, 25, 50, 33],
            "cook nurse",
        ),
    ],
)
def test_dialects_hold_the_same(people: dict[str, Any], text: str, features: list[float], jobs: str) -> None:
    people["nodes"].write_text(text, newline="")
    people["edges"].path.write_bytes(gzip.compress(people["edges"].path.read_bytes()))  # whatever its name is
    data = node_tables(**people)
    assert data.x[:, 0].tolist() == features
    assert data.outputs.names == tuple(jobs.split())
    assert data.edge_weight is not None
    assert data.edge_weight.tolist() == [1.5, 1.5, 2, 2]


def test_a_comma_that_may_divide_thousands_is_refused(people: dict[str, Any]) -> None:
    people["nodes"].write_text(PEOPLE.replace("30", '"1,234"'))
    with pytest.raises(
        DamagedFile, match=r"line 2 of .* has a comma in a number of column 'age', which may be a thousand"
    ):
        node_tables(**people)
    people["nodes"].write_text(PEOPLE.replace(",", ";").replace("30", "30,5").replace("41", "41.5"))
    with pytest.raises(DamagedFile, match=r"'30,5' in place of a number"):
        node_tables(**people)


def test_how_files_were_read_is_said(people: dict[str, Any]) -> None:
    assert node_tables(**people).understood == (
        ("people.csv", "5 nodes, named by column id, header found, commas, features age"),
        (
            "knows.csv",
            "4 edges, ids as text, header found, commas, from and to, column hours is a weight, 1 self-loops left out, "
            "1 rows of the other direction left out",
        ),
        ("people.csv", "2 classes, cook, nurse, for 4 of 5 nodes"),
        ("people.csv", "2 train, 1 val, 1 test (at random)"),
    )


def test_edges_that_count_from_1_say_so(files: dict[str, Path]) -> None:
    expected = node_tables(**files).edge_index
    files["edges"].write_text("".join(f"{i + 1} {i + 2}\n" for i in range(9)))
    assert torch.equal(node_tables(**files | {"edges": EdgeFile(files["edges"], first=1)}).edge_index, expected)


def test_row_numbers_of_pandas_are_no_features(people: dict[str, Any], tmp_path: Path) -> None:
    """A filtered DataFrame keeps its row numbers in Parquet, and no number says which node they mean."""
    table = pyarrow.table({"age": [1.0, 2, 3, 4], "job": ["a", "a", "b", "b"], "__index_level_0__": [0, 2, 3, 5]})
    metadata = {"pandas": json.dumps({"index_columns": ["__index_level_0__"]})}
    path = tmp_path / "f.parquet"
    parquet.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(DamagedFile, match=r"row numbers that pandas wrote to .*f.parquet are not 0, 1, 2, \.\.\."):
        node_tables(path, target=["job"])
    named = table.append_column("id", pyarrow.array(["a", "b", "c", "d"]))
    parquet.write_table(named.replace_schema_metadata(metadata), path)
    assert node_tables(path, target=["job"]).inputs == ("age",)


def test_no_draw_of_the_fuzzer_is_misread() -> None:
    assert misread(range(200)) == []


@pytest.mark.slow
def test_no_draw_of_many_is_misread() -> None:
    assert misread(range(1000, 1800)) == []


def test_columns_of_edges_are_named(files: dict[str, Path]) -> None:
    files["edges"].write_text("id,src,dst\n7,0,1\n8,1,2\n")
    edges = EdgeFile(files["edges"], ("src", "dst"))
    assert node_tables(**files | {"edges": edges}).edge_index.shape == (2, 4)


def test_edges_may_have_empty_lines_between_them(files: dict[str, Path], people: dict[str, Any]) -> None:
    files["edges"].write_text("0,1\n\n1,2  # the second\n")
    assert node_tables(**files).edge_index.shape == (2, 4)
    people["edges"].path.write_text(KNOWS.replace("\n", "\n\n"))
    assert node_tables(**people).edge_index.shape == (2, 4)


def test_text_after_a_hash_belongs_to_a_word(files: dict[str, Path]) -> None:
    files["labels"].write_text("# languages\nlanguage\n" + "C#\nC\n" * 5)
    assert node_tables(**files).outputs.names == ("C", "C#")


def test_arrays_of_python_objects_are_refused(files: dict[str, Path]) -> None:
    np.save(files["nodes"], np.array([[print]], dtype=object), allow_pickle=True)
    with pytest.raises(DamagedFile, match="not a table of numbers"):
        node_tables(**files)


def test_integers_are_numbers_unless_they_are_called_categories(people: dict[str, Any]) -> None:
    """Of nodes and of edges; words are categories too, and other columns as before."""
    people["nodes"].write_text(PEOPLE.replace("age,", "kind,"))
    data = node_tables(**people)
    assert data.x[:, 0].tolist() == [30, 41, 25, 50, 33]
    edges = EdgeFile(people["edges"].path, ("from", "to"), features=["hours"])
    people["edges"].path.write_text("from,to,hours\nann,bob,2\nbob,eve,10\neve,bob,10\n")
    people |= {"edges": edges, "ignore": ["split"]}
    people["nodes"].write_text("id,kind,job,team,split\nann,30,cook,a,train\nbob,41,,a,\neve,25,nurse,b,train\ndan,50,cook,b,"
                               "val\nzoe,33,nurse,b,test\n")  # fmt: skip
    data = node_tables(**people, categories=["kind", "team", "hours"])
    values = {name: column.values for of in data.columns.values() for name, column in of.items()}
    assert values == {"kind": ("25", "30"), "team": ("a", "b"), "hours": ("2", "10")}
    kinds = torch.tensor([[0, 1], [0, 0], [1, 0], [0, 0], [0, 0]])
    teams = torch.tensor([[1, 0]] * 2 + [[0, 1]] * 3)
    assert torch.equal(data.x, torch.cat([kinds, teams], 1))
    assert data.edge_index.tolist() == [[1, 0, 2, 1], [0, 1, 1, 2]]
    assert data.edge_features.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert "3 rows with a category of kind that no row for training has (41): zeros" in data.understood[0][1]
    assert torch.equal(node_inputs(people["nodes"], edges, data.columns).x, data.x)
    people["nodes"].write_text("id,kind,team\nann,31,a\n")
    with pytest.raises(
        DamagedFile, match=r"line 2 of .* has the category '31' in column 'kind', which occurs in no file"
    ):
        node_inputs(people["nodes"], None, data.columns)
    people["nodes"].write_text(PEOPLE.replace("age,", "kind,").replace("41", "30"))
    people["ignore"] = ()
    with pytest.raises(DamagedFile, match="no column of features is named 'tem', which --categories names"):
        node_tables(**people, categories=["tem", "team"])
    people["nodes"].write_text("id,kind,job\n" + "".join(f"n{k},k{k},{'ab'[k % 2]}\n" for k in range(1700)))
    with pytest.raises(DamagedFile, match=r"column 'kind' of .* has 1,020 categories, and 1,000 are the most"):
        node_tables(people["nodes"], target=["job"], categories=["kind"])
