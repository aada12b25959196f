"""Graphs from files of one's own: what is read, how it is split, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mpnn.data import DamagedFile, node_tables


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A path of ten nodes; the class of the last is unknown."""
    np.save(tmp_path / "x.npy", np.eye(10))
    (tmp_path / "y.txt").write_text("# class\n" + "0\n1\n" * 4 + "1\n-1\n")
    (tmp_path / "e.csv").write_text("".join(f"{i},{i + 1}\n" for i in range(9)) + "1,0\n")
    return {"features": tmp_path / "x.npy", "labels": tmp_path / "y.txt", "edges": tmp_path / "e.csv"}


def test_tables_become_a_graph_with_a_split_of_its_labeled_nodes(files: dict[str, Path]) -> None:
    data = node_tables(**files)
    assert torch.equal(data.x, torch.eye(10))
    assert data.edge_index.shape == (2, 18)  # nine links in both directions, one of them listed twice
    parts = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert parts.sum(1).tolist() == [5, 2, 2]
    assert parts.sum(0).tolist() == [1] * 9 + [0]
    assert torch.equal(data.train_mask, node_tables(**files).train_mask)
    assert node_tables(files["features"], files["labels"]).edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("edges", "0,1\n3,10\n", r"row 2 of .*e.csv links 3 and 10, but .*x.npy has 10 nodes, numbered from 0"),
        ("edges", "a,b\n1,x\n", r"line 2 of .*e.csv has 'x' in place of a number"),
        ("labels", "10\n" * 10, "has class 10 but no class 0; number the classes 0, 1, 2, ... without gaps"),
        ("labels", "0\n1\n\n" + "0\n" * 7, r"line 3 of .*y.txt is empty"),
        ("labels", "0\n1\n0\n" + "-1\n" * 7, "has 3 labeled nodes; training, validation and test need 4 at least"),
        ("labels", "0\n1\n", r"must have one label for each of the 10 rows"),
        ("labels", "0.5\n" * 10, r"row 1 of .*y.txt must have whole numbers below 2\^53; got \[0.5\]"),
        ("labels", "-1\n" * 10, "must have classes from 0"),
    ],
)
def test_tables_that_do_not_fit_are_refused(files: dict[str, Path], name: str, text: str, why: str) -> None:
    files[name].write_text(text)
    with pytest.raises(DamagedFile, match=why):
        node_tables(**files)


def test_features_that_are_not_finite_are_refused(files: dict[str, Path]) -> None:
    x = np.eye(10)
    x[3, 2] = np.nan
    np.save(files["features"], x)
    with pytest.raises(DamagedFile, match=r"row 4 of .* has a number that is NaN"):
        node_tables(**files)


def test_features_beyond_float32_are_refused(files: dict[str, Path]) -> None:
    np.save(files["features"], np.eye(10) * 1e300)
    with pytest.raises(DamagedFile, match=r"row 1 of .* too large for float32"):
        node_tables(**files)


def test_columns_of_edges_are_named(files: dict[str, Path]) -> None:
    files["edges"].write_text("id,src,dst\n7,0,1\n8,1,2\n")
    assert node_tables(**files, columns=("src", "dst")).edge_index.shape == (2, 4)


def test_arrays_of_python_objects_are_refused(files: dict[str, Path]) -> None:
    np.save(files["features"], np.array([[print]], dtype=object), allow_pickle=True)
    with pytest.raises(DamagedFile, match="not a table of numbers"):
        node_tables(**files)
