"""Many graphs from three tables of one's own: what is read, and what is refused. The fuzzer draws more."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mpnn.data import DamagedFile, graph_tables
from mpnn.data.graph_tables import graph_inputs
from mpnn.data.tables import EdgeFile

MOLECULES = (
    "id,boils,origin,split\nwater,100,sea,train\nethane,-89,gas,val\nmethanol,65,gas,train\nammonia,-33,gas,test\n"
    "helium,,sea,train\n"
)
ATOMS = (
    "graph,id,element,charge\nwater,o,8,-0.5\nmethanol,c,6,0\nmethanol,o,8,-.5\n"
    "ethane,a,6,0\nethane,b,6,0\nammonia,n,7,-1\nhelium,h,2,0\n"
)
BONDS = "graph,from,to,order\nmethanol,c,o,1\nethane,b,a,1\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The paths of molecules, atoms and bonds."""
    paths = {}
    for name, text in (("graphs", MOLECULES), ("nodes", ATOMS), ("edges", BONDS)):
        paths[name] = tmp_path / f"{name}.csv"
        paths[name].write_text(text)
    return paths


def read(files: dict[str, Path], **changes: Any) -> Any:
    edges = EdgeFile(files["edges"], changes.pop("columns", ("from", "to")), features=changes.pop("features", ()))
    options = {"target": ["boils"], "problem": "regression", "categories": ["element", "origin"], **changes}
    return graph_tables(files["graphs"], files["nodes"], edges, **options)


def test_three_tables_become_graphs(files: dict[str, Path]) -> None:
    data = read(files, features=["order"])
    assert data.ids == ("water", "ethane", "methanol", "ammonia", "helium")
    assert data.graph.tolist() == [0, 1, 1, 2, 2, 3, 4]
    assert (data.inputs, data.graph_inputs) == (("element", "charge"), ("origin",))
    assert data.columns["nodes"]["element"].values == ("6", "8")  # of water and methanol
    assert data.columns["graphs"]["origin"].values == ("gas", "sea")
    assert data.x[:3].tolist() == [[0, 1, -0.5, 0, 1], *[[1, 0, 0, 1, 0]] * 2]
    assert data.x[5].tolist() == [0, 0, -1, 1, 0]
    assert data.edge_index.tolist() == [[2, 1, 4, 3], [1, 2, 3, 4]]
    assert data.edge_features.tolist() == [[1.0]] * 4
    known = data.train_mask | data.val_mask | data.test_mask
    assert known.tolist() == data.is_known.tolist() == [True, True, True, True, False]
    assert data.y[:, 0].isnan().tolist() == (~known).tolist()
    boils = data.y[:, 0] * data.outputs.std[0] + data.outputs.mean[0]
    assert torch.allclose(boils[known], torch.tensor([100.0, -89, 65, -33]))
    assert data.understood[:3] == (
        ("graphs.csv", "5 graphs, header found, commas, features origin (2 categories)"),
        (
            "nodes.csv",
            "7 nodes, 1 to 2 a graph, header found, commas, features element (2 categories), charge, 2 rows with a "
            "category of element that no row for training has (7): zeros",
        ),
        (
            "edges.csv",
            "2 edges, ids as text, header found, commas, from and to, features order, of the graph in column graph",
        ),
    )


def test_a_trained_model_keeps_its_categories(files: dict[str, Path]) -> None:
    """New graphs have the columns of the run, in its order, and no category that it has not seen."""
    data = read(files)
    files["graphs"].write_text("id,origin\nhelium,gas\n")
    files["nodes"].write_text("charge,element,graph\n0,6,helium\n")
    assert graph_inputs(files["graphs"], files["nodes"], None, data.columns).x.tolist() == [[1, 0, 0, 1, 0]]
    files["nodes"].write_text("charge,element,graph\n0,7,helium\n")  # ammonia's, which is for the test
    assert graph_inputs(files["graphs"], files["nodes"], None, data.columns).x.tolist() == [[0, 0, 0, 1, 0]]
    files["nodes"].write_text("charge,element,graph\n0,3,helium\n")
    with pytest.raises(DamagedFile, match=r"line 2 .* the category '3' in column 'element', which occurs in no file"):
        graph_inputs(files["graphs"], files["nodes"], None, data.columns)


def test_nodes_without_names_are_numbered_in_their_graph_or_in_the_file(files: dict[str, Path]) -> None:
    expected = read(files).edge_index
    files["nodes"].write_text(ATOMS.replace("graph,id,", "graph,name,"))
    files["edges"].write_text("graph,from,to\nmethanol,0,1\nethane,1,0\n")
    assert torch.equal(read(files, ignore=["name"]).edge_index, expected)
    files["edges"].write_text("from,to\n1,2\n4,3\n0,0\n")
    assert torch.equal(read(files, ignore=["name"]).edge_index, expected)


def test_graphs_without_features_have_a_one(files: dict[str, Path]) -> None:
    data = read(files, ignore=["element", "charge", "origin"], categories=())
    assert data.x.tolist() == [[1.0]] * 7
    assert "no features: each node has a 1" in data.understood[1][1]


def test_a_second_column_of_names_is_said_to_be_unused(files: dict[str, Path]) -> None:
    head, *rows = files["graphs"].read_text().splitlines()
    files["graphs"].write_text("\n".join([f"graph_id,{head}", *(f"{k},{row}" for k, row in enumerate(rows))]) + "\n")
    data = read(files)
    assert "graph_id" not in data.graph_inputs
    assert data.understood[0][1].endswith("not used: graph_id")


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("graphs", "id,boils", "name,boils", "has no column id or graph, which names each graph; it has 'name'"),
        ("graphs", "ethane,-89,gas", "water,-89,gas", "line 3 of .*graphs.csv has the id of a row above"),
        ("graphs", "sea,train\nethane", "sea,train\nargon,1,sea,\nethane", "line 3 .* has a graph that no row of"),
        ("graphs", "-89", "cold", "line 3 of .* has 'cold' in place of a number in column 'boils'; regression"),
        ("graphs", "-89,", ",", "has 3 rows with a target; training, validation and test need 4 at least"),
        ("graphs", "-89,gas", "-89,NA", r"line 3 of .* has no category in column 'origin' \(it is empty"),
        ("nodes", "graph,id", "molecule,id", r"nodes.csv has no column graph \(or graph_id\), which names the graph"),
        ("nodes", "ammonia,n", "amonia,n", "line 7 .* has a graph in column 'graph' that is no id of .*: 'amonia'"),
        ("nodes", "ethane,b", "ethane,a", "line 6 .* has the id of a row above, which is a node of the same graph"),
        ("nodes", "ethane,b", "ethane,", "line 6 .* has no id"),
        ("nodes", "ethane,b,6,0", "ethane,b,6,", "line 6 .* has no number in column 'charge'"),
        ("nodes", "ethane,b,6,0", "ethane,b,6.5,0", "line 6 .* has no category in column 'element': categories are"),
        ("nodes", "graph,id,element", "graph,id,kind", "no column of features is named 'element', which --categories"),
        ("edges", "ethane,b,a", "ethane,b,o", "line 3 .* has a node 'o' in column 'to' that graph 'ethane' does not"),
        ("edges", "ethane,b,a", "ethene,b,a", "line 3 .* has a graph in column 'graph' that is no id of .*: 'ethene'"),
        ("edges", "graph,", "set,", "has nodes of one id in several graphs, so that .*edges.csv needs a column graph"),
        ("edges", "ethane,b,a,1", "ethane,b,a,1\nethane,a,b,2", "repeats an edge with other features; keep the"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_refused(files: dict[str, Path], name: str, old: str, new: str, why: str) -> None:
    text = files[name].read_text()
    assert old in text
    files[name].write_text(text.replace(old, new))
    with pytest.raises(DamagedFile, match=why):
        read(files, features=["order"])


def test_an_edge_across_graphs_is_refused(files: dict[str, Path]) -> None:
    files["nodes"].write_text(ATOMS.replace("methanol,o", "methanol,oh"))
    files["edges"].write_text("from,to\nc,oh\na,oh\n")
    with pytest.raises(
        DamagedFile, match=r"line 3 .* has an edge from graph 'ethane' to graph 'methanol'; edges connect"
    ):
        read(files)


def test_columns_of_categories_are_added_as_ogb_s_encoders_add_them(files: dict[str, Path]) -> None:
    """The first linear map of a model looks up a vector for each value of a column, and adds those of all columns."""
    data = read(files)
    linear = torch.nn.Linear(data.x.shape[1], 8, bias=False)
    tables, charge = linear.weight.T, data.x[:, 2:3]
    elements, origins = tables[:2], tables[3:]
    of_elements = torch.tensor([1, 0, 0, 0, 1])  # the last two are of elements that no row for training has
    of_origins = torch.tensor([1, 0, 0, 0, 0])
    expected = elements[of_elements] + charge[:5] * tables[2] + origins[of_origins]
    assert torch.allclose(linear(data.x)[:5], expected)
