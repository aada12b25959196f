"""`mpnn view RUN --node N`: the neighborhood of a node in a run of `mpnn train` on nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from viewer_page import data_of, run, weights_of

from mpnn.cli import view_nodes
from mpnn.cli.app import app
from mpnn.cli.measure import attention_weights
from mpnn.cli.train import saved_run

SIZE = 30
CLASSES = [*(k % 3 for k in range(SIZE - 1)), -1]


def trained(place: Path, *options: str) -> Path:
    """A run on a ring of 30 nodes of three classes; that of the last node is not known."""
    rng = np.random.default_rng(0)
    np.save(place / "x.npy", rng.random((SIZE, 4), dtype=np.float32))
    (place / "y.csv").write_text("\n".join(map(str, CLASSES)))
    (place / "links.csv").write_text("\n".join(f"{k},{(k + 1) % SIZE}" for k in range(SIZE)))
    files = ["--features", place / "x.npy", "--labels", place / "y.csv", "--edges", place / "links.csv"]
    arguments = ["train", *files, "--steps", "2", "--out", place / "run", *options]
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return place / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("ring"))


def page_of(folder: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    done = run(folder, *arguments, "-o", tmp_path / "page.html", "--force")
    assert done.exit_code == 0, done.output
    return data_of((tmp_path / "page.html").read_text())


def test_the_page_has_the_weights_of_the_model(folder: Path, tmp_path: Path) -> None:
    data = page_of(folder, tmp_path, "--node", "7")
    shown = data["attention"]
    subject = shown["subject"]
    assert data["title"] == "Node 7 and its neighbors"
    assert data["graph"] is data["plan"] is None
    assert subject["classes"] == sorted(CLASSES)
    assert sorted(subject["numbers"]) == list(range(SIZE))
    assert subject["numbers"][shown["start"]] == 7
    assert shown["heads"] == [8, 1]

    trained_run, model = saved_run(folder)
    graph: Any = trained_run.graph  # type: ignore[attr-defined]
    x = trained_run.nodes.data.x  # type: ignore[attr-defined]
    exact = torch.zeros(9, SIZE, SIZE)
    src, dst = graph.edge_index
    exact[:, dst, src] = torch.cat(attention_weights(model, x, graph), 1).T
    order = subject["numbers"]
    found = weights_of(shown, shown["graphs"][0])
    assert np.abs(np.sqrt(found) - np.sqrt(exact[:, order][:, :, order].numpy())).max() <= 0.5 / 255 + 1e-6
    with torch.no_grad():
        assert subject["predicted"] == model(x, graph).argmax(-1)[order].tolist()


def test_nodes_with_ids_and_classes_with_names(tmp_path: Path) -> None:
    people = ["id,age,job", *(f"p{k},{k % 3},{'cook' if k % 2 else 'baker'}" for k in range(10))]
    (tmp_path / "people.csv").write_text("\n".join(people))
    (tmp_path / "knows.csv").write_text("\n".join(["from,to", *(f"p{k},p{k - 1}" for k in range(1, 10))]))
    tables = ["--nodes", "people.csv", "--target", "job", "--edges", "knows.csv"]
    files = [str(tmp_path / one) if one.endswith(".csv") else one for one in tables]
    done = CliRunner().invoke(app, ["train", *files, "--steps", "2", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    data = page_of(tmp_path / "run", tmp_path, "--node", "p4")
    subject = data["attention"]["subject"]
    assert data["title"] == "Node p4 and its neighbors"
    assert str(tmp_path) not in data["subtitle"], "no folders of this machine"
    assert subject["names"][data["attention"]["start"]] == "p4"
    assert subject["class_names"] == ["baker", "cook"]
    assert [name for name, kind in zip(subject["names"], subject["classes"], strict=True) if kind] == [
        *("p1", "p3", "p5", "p7", "p9")
    ]
    refused = run(tmp_path / "run", "--node", "p44", "-o", tmp_path / "other.html")
    assert refused.exit_code == 2
    assert "there is no such id (did you mean p4?)" in refused.stderr


def test_two_graphs_and_the_nearest_nodes_of_a_large_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_nodes, "_MAX_NODES", 5)
    data = page_of(folder, tmp_path, "--node", "0", "--graph", "", "--graph", "identity")
    assert sorted(data["attention"]["subject"]["numbers"]) == [0, 1, 2, 28, 29]
    assert "The page has the 5 of 30 nodes that are nearest to it." in data["subtitle"]
    assert [(graph["name"], graph["edges"]) for graph in data["attention"]["graphs"]] == [
        ("edges", 13),
        ("identity", 5),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--node", "30"), "the nodes of this run are 0 to 29"),
        (("--text", "a"), "is a run on nodes, which takes --node; leave out --text"),
        (("--graph", "grid(4, 4)"), "grid"),
    ],
    ids=str,
)
def test_refusals(folder: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = run(folder, *arguments, "-o", tmp_path / "page.html")
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    done = run(trained(tmp_path, "--model", "gnn"), "-o", tmp_path / "page.html")
    assert done.exit_code == 2, done.output
    assert "has no attention" in done.stderr
