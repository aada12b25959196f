"""Graphs in files of other programs: nodes with their attributes, and edges with theirs."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from typer.testing import CliRunner

from mpnn import graphs
from mpnn.cli.app import app
from mpnn.data import DamagedFile, node_tables
from mpnn.data.tables import EdgeFile, node_inputs
from mpnn.graphs.tables import edge_chunks, is_graph, read_table


def karate(directed: bool = False) -> Any:
    """Zachary's club, whose members have an age, and a date and a name of two words and a quote."""
    graph = networkx.karate_club_graph()
    graph = graph.to_directed() if directed else graph
    if directed:
        graph.remove_edges_from([(u, v) for u, v in graph.edges if u > v])
    for node, data in graph.nodes(data=True):
        data |= {"age": 20 + node % 7, "since": f"2020-01-{1 + node % 28:02}", "is_old": node % 7 > 3}
        data["club"] = 'Zoë\'s "club"' if data["club"] == "Officer" else data["club"]
    return networkx.relabel_nodes(graph, {node: f"m{node}" for node in graph})


def node_link(graph: Any, path: Path) -> None:
    data = networkx.node_link_data(graph, edges="edges")
    path.write_text(json.dumps({**data, "edges": data["edges"]}))


def old_node_link(graph: Any, path: Path) -> None:
    data = networkx.node_link_data(graph, edges="edges")
    path.write_text(json.dumps({"links": data.pop("edges"), **data}, indent=1))


def dot(graph: Any, path: Path) -> None:
    networkx.nx_pydot.write_dot(graph, path)


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "GraphML": networkx.write_graphml,
    "GEXF": networkx.write_gexf,
    "GML": networkx.write_gml,
    "JSON": node_link,
    "JSON with links": old_node_link,
    "DOT": dot,
}


@pytest.mark.parametrize(
    ("form", "directed"),
    [
        pytest.param(form, directed, marks=[pytest.mark.slow] * (form == "DOT" and directed))  # pydot takes seconds
        for form in WRITERS
        for directed in (False, True)
    ],
)
def test_a_graph_of_another_program_is_read_with_its_attributes(tmp_path: Path, form: str, directed: bool) -> None:
    """Whatever the file is called, packed or not."""
    graph = karate(directed)
    path = tmp_path / "club"
    WRITERS[form](graph, path)
    assert is_graph(path)
    data = node_tables(path, target="club", edges=EdgeFile(path, weights="weight"))
    names = [*graph]
    assert data.ids == tuple(names)
    assert data.inputs == ("age", "since", "is_old")
    clubs = [data.outputs.names[k] for k in data.y.tolist()]
    assert clubs == [club for _, club in graph.nodes(data="club")]
    expected = [[20 + k % 7, 18262 + k % 28, k % 7 > 3] for k in range(34)]
    assert torch.equal(data.x, torch.tensor(expected).float())
    edges = {}
    for u, v, weight in graph.edges(data="weight"):
        edges[names.index(u), names.index(v)] = weight
        if not directed:
            edges[names.index(v), names.index(u)] = weight
    assert dict(zip(map(tuple, data.edge_index.T.tolist()), data.edge_weight.tolist(), strict=True)) == edges
    assert f"{form.split()[0]}, {'directed' if directed else 'undirected'}" in data.understood[0][1]
    plain = node_tables(path, target="club")
    assert torch.equal(plain.edge_index, data.edge_index)
    assert "weight" in plain.understood[1][1].split("not used: ")[1]
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert torch.equal(node_tables(path, target="club").x, data.x)


def test_numbers_and_names_of_nodes(tmp_path: Path) -> None:
    """D3's JSON numbers nodes by their place; edges of nodes with numbers are a graph on disk."""
    path = tmp_path / "g.json"
    path.write_text('{"nodes": [{"group": 1}, {"group": 2}, {"group": 1}], "links": [{"source": 0, "target": 2}]}')
    assert read_table(path).text("id").tolist() == ["0", "1", "2"]
    chunks = [chunk.tolist() for chunk in edge_chunks(path)]
    assert chunks == [[[0], [2]]]
    assert graphs.write_csr(tmp_path / "g", path, 3).num_edges == 1


def test_mixed_and_missing_attributes(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    nodes = [{"id": "a", "x": 1, "y": "1"}, {"id": "b", "x": 2.5, "at": [1, 2]}, {"id": "c", "y": 2, "z": True}]
    path.write_text(json.dumps({"nodes": nodes, "edges": []}))
    table = read_table(path)
    assert table.names == ["id", "x", "y", "z"]
    assert table.numbers("x")[:2].tolist() == [1, 2.5]
    assert table.text("y").tolist() == ["1", None, "2"]
    assert table.quantities("z")[1] == "truth"
    assert "left out as they are no single values: at" in table.form
    data = read_table(path, of_edges=True)
    assert (len(data), data.names) == (0, ["source", "target"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<?xml version="1.0"?><html></html>', "is XML, and neither GraphML nor GEXF"),
        ('<graphml><graph edgedefault="directed"><node id="a"/><edge source="a" target="b"/></graph></graphml>',
         "begins as GraphML, and networkx cannot read it"),
        ('{"nodes": [{"id": 1}], "links": [{"source": 1, "target": 2}]}',
         "it lists 1 nodes, and edges have ends among 2"),
        ('{"vertices": []}', 'a graph in JSON has "nodes" and "links"'),
        ('[{"id": 1}, {"id": 2}]', 'a graph in JSON has "nodes" and "links"'),
        ("graph [ node [ id 1 ]", "begins as GML, and networkx cannot read it"),
        ("digraph { a -> ", "begins as DOT, and networkx cannot read it"),
        ("digraph { a -> b; subgraph s { c -> d } }", "it has subgraphs, which networkx leaves out"),
        ('{"nodes": [], "links": []}', "has no nodes"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "g"
    path.write_text(text)
    with pytest.raises(DamagedFile, match=why):
        node_tables(path, target="club")


@pytest.mark.parametrize(
    "text", ["graph,id\n1,2\n", "digraph,x\n1,2\n", "graph;{a\n1;2\n", "{a,b\n1,2\n", "[1],2\n[3],4\n"]
)
def test_tables_that_begin_as_a_graph_are_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert not is_graph(tmp_path / "t.csv")
    assert len(read_table(tmp_path / "t.csv").names) == 2


def test_a_graph_without_its_reader_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.dot"
    path.write_text("graph { a -- b }")
    monkeypatch.setitem(__import__("sys").modules, "pydot", None)
    with pytest.raises(
        ImportError, match=r'reading g.dot, DOT, needs pydot: pip install -c constraints.txt "\.\[files\]"'
    ):
        read_table(path)
    monkeypatch.setitem(__import__("sys").modules, "networkx", None)
    with pytest.raises(
        ImportError, match=r'reading g.dot, DOT, needs networkx: pip install -c constraints.txt "\.\[files\]"'
    ):
        read_table(path)


def test_nodes_of_another_graph_are_those_of_the_model(tmp_path: Path) -> None:
    networkx.write_graphml(karate(), tmp_path / "a.graphml")
    data = node_tables(tmp_path / "a.graphml", target="club")
    networkx.write_gml(karate().subgraph(["m0", "m1", "m2"]), tmp_path / "b.gml")
    found = node_inputs(tmp_path / "b.gml", None, data.columns)
    assert {*found.ids} == {"m0", "m1", "m2"}
    assert found.edge_index.shape == (2, 6)


def test_a_model_of_a_graph_file_predicts_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    networkx.write_graphml(karate(), "club.graphml")
    networkx.write_gexf(karate().subgraph(["m0", "m1", "m33"]), "new.gexf")

    def run(command: str) -> str:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
        return result.output

    said = run("train --nodes club.graphml --target club --scale --weights weight --model gcn --steps 30 --out run")
    assert "78 edges, ids as text, GraphML, undirected, source and target, column weight is a weight" in " ".join(
        said.split()
    )
    run("predict run --nodes new.gexf -o new.csv")
    run("predict run -o old.csv")
    assert "accuracy" in run("eval run")
    with open("new.csv", newline="") as file:
        assert {row["id"] for row in csv.DictReader(file)} == {"m0", "m1", "m33"}
    assert len(Path("old.csv").read_text().splitlines()) == 35
