"""How columns become features: gaps, scales, dates, categories; and rows that are one edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpnn.data import DamagedFile, graph_tables, node_tables
from mpnn.data.tables import EdgeFile, node_inputs
from mpnn.graphs.tables import edge_chunks

NODES = (
    "id,age,member,since,city,club,split\n"
    "ann,10,True,1970-01-02,Rome,a,train\n"
    "bob,30,False,1970-01-04,Oslo,b,train\n"
    "cem,,,,,a,train\n"
    "dan,20,True,1970-01-11,Bern,b,val\n"
    "eve,50,False,1970-01-21,Rome,a,test\n"
)


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    (tmp_path / "n.csv").write_text(NODES)
    return tmp_path / "n.csv"


def read(nodes: Path, **options: Any) -> Any:
    return node_tables(str(nodes), target="club", categories="city", **options)


def test_gaps_are_refused_by_default(nodes: Path) -> None:
    with pytest.raises(DamagedFile, match=r"line 4 of .* has no number in column 'age' .* let --missing mean or indi"):
        read(nodes)


def test_the_mean_of_rows_for_training_fills_gaps(nodes: Path) -> None:
    """Of true and false the share, of categories the share of each. A new category is a gap."""
    data = read(nodes, missing="mean")
    expected = [
        [10, 1, 1, 0, 1],
        [30, 0, 3, 1, 0],
        [20, 0.5, 2, 0.5, 0.5],
        [20, 1, 10, 0.5, 0.5],
        [50, 0, 20, 0, 1],
    ]
    assert data.x.tolist() == expected
    assert data.inputs == ("age", "member", "since", "city")
    said = data.understood[0][1]
    assert "member (true or false), since (days since 1970), city (2 categories)" in said
    assert "1 gaps of age filled with the mean" in said
    assert "1 gaps of city filled with the shares of its categories" in said
    assert "1 rows with a category of city that no row for training has (Bern): filled as gaps" in said
    assert node_inputs(nodes, None, data.columns).x.tolist() == expected


def test_an_indicator_says_where_gaps_are(nodes: Path) -> None:
    data = read(nodes, missing="indicator")
    gaps = [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]  # Bern is a gap
    assert data.x[:, [1, 3, 5, 8]].tolist() == gaps
    assert data.x[2].tolist() == [20, 1, 0.5, 1, 2, 1, 0.5, 0.5, 1]
    nodes.write_text(NODES.replace("cem,,,,,", "cem,40,True,1970-01-03,Oslo,"))
    again = node_inputs(nodes, None, data.columns)
    assert again.x[2].tolist() == [40, 0, 1, 0, 2, 0, 1, 0, 0]


def test_numbers_and_dates_are_scaled_by_rows_for_training(nodes: Path) -> None:
    nodes.write_text(NODES.replace("cem,,,,,", "cem,20,True,1970-01-03,Rome,").replace("Bern", "Oslo"))
    data = read(nodes, scale=True)
    for column in (0, 2):
        assert data.x[:3, column].mean().item() == pytest.approx(0, abs=1e-6)
        assert data.x[:3, column].std(correction=0).item() == pytest.approx(1)
    assert data.x[3, 0].item() == pytest.approx(0)
    assert data.x[4, 0].item() == pytest.approx(30 / (200 / 3) ** 0.5)
    assert data.x[:, 1].tolist() == [1, 0, 1, 1, 0]
    nodes.write_text("id,age,member,since,city\nfay,20,True,1970-01-03,Rome\n")
    assert torch.equal(node_inputs(nodes, None, data.columns).x, data.x[2:3])


def test_a_scale_saves_digits_that_float32_has_not(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text("id,t,club\n" + "".join(f"n{k},{1_700_000_000 + k},{'ab'[k % 2]}\n" for k in range(10)))
    with pytest.raises(DamagedFile, match=r"whose differences float32 rounds away; scale the features \(--scale\)"):
        node_tables(path, target=["club"])
    x = node_tables(path, target=["club"], scale=True).x[:, 0].double()
    torch.testing.assert_close(x.diff(), x.diff()[:1].expand(9), rtol=1e-5, atol=0)


def test_a_column_of_another_kind_than_in_training_is_refused(nodes: Path) -> None:
    data = read(nodes, missing="mean")
    nodes.write_text("id,age,member,since,city\nann,10,True,3,Rome\n")
    with pytest.raises(DamagedFile, match=r"column 'since' of .* holds numbers; in training it held dates"):
        node_inputs(nodes, None, data.columns)
    nodes.write_text("id,age,member,since,city\nann,10,True,,Rome\n")
    assert node_inputs(nodes, None, data.columns).x.tolist() == [[10, 1, 2, 0, 1]]


def test_a_model_without_gaps_refuses_them(nodes: Path) -> None:
    nodes.write_text(NODES.replace("cem,,,,,", "cem,20,True,1970-01-03,Rome,"))
    data = read(nodes)
    for line in ("ann,,True,1970-01-03,Rome", "ann,1,True,1970-01-03,"):
        nodes.write_text(f"id,age,member,since,city\n{line}\n")
        with pytest.raises(DamagedFile, match="fill it: the model was trained with --missing refuse"):
            node_inputs(nodes, None, data.columns)


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        ({"10,": ",", "30,": ","}, "column 'age' of .* has no value in a row for training; ignore it"),
        ({"Rome,a,train": ",a,train", "Oslo,": ","}, "column 'city' of .* has no category in a row for training"),
    ],
)
def test_a_column_that_no_row_for_training_has_is_refused(nodes: Path, gone: dict[str, str], why: str) -> None:
    text = NODES
    for old, new in gone.items():
        text = text.replace(old, new)
    nodes.write_text(text)
    with pytest.raises(DamagedFile, match=why):
        read(nodes, missing="mean")


def test_unknown_targets_are_no_target(nodes: Path) -> None:
    """-1 among classes, NaN among numbers; and such a row is in no part, which is said."""
    nodes.write_text(NODES.replace("a,test", ",test") + "fay,1,True,1970-01-02,Rome,a,test\n")
    data = read(nodes, missing="mean")
    assert data.y.tolist() == [0, 1, 0, 1, -1, 0]
    assert data.is_known.tolist() == [True] * 4 + [False, True]
    assert data.test_mask.tolist() == [False] * 5 + [True]
    said = "3 train, 1 val, 1 test (as stated), 1 not used (a split without a target)"
    assert data.understood[-1] == ("n.csv", said)
    assert data.num_classes == 2
    numbers = node_tables(nodes, target="age", problem="regression", ignore=["member", "since", "club"],
                          categories=["city"], missing="mean")  # fmt: skip
    assert numbers.y[:, 0].isnan().tolist() == [False, False, True, False, False, False]


def test_large_numbers_that_are_not_scaled_are_said(tmp_path: Path) -> None:
    rows = "".join(f"{k},{1990 + k},0.{k},{'ab'[k % 2]}\n" for k in range(9))
    (tmp_path / "n.csv").write_text(f"id,year,share,club\n{rows}")
    how = {scale: str(node_tables(tmp_path / "n.csv", target="club", scale=scale).understood) for scale in (0, 1)}
    assert "large numbers in year: --scale makes them about 1" in how[False]
    assert "large" not in how[True]


def test_true_and_false_are_labels(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("x,a,b\n" + "1,True,False\n2,False,True\n" * 3 + "3,,\n")
    data = node_tables(tmp_path / "n.csv", target=["a", "b"], problem="multilabel")
    assert data.y.tolist() == [[True, False], [False, True]] * 3 + [[False, False]]
    assert data.is_known.tolist() == [True] * 6 + [False]
    (tmp_path / "n.csv").write_text("x,a\n" + "1,yes\n1,1\n" * 4)
    with pytest.raises(
        DamagedFile, match="'yes' in place of a number in column 'a'; multilabel needs 0 and 1, or true"
    ):
        node_tables(tmp_path / "n.csv", target=["a"], problem="multilabel")


EDGES = "from,to,w\nann,bob,1\nbob,ann,2\nann,bob,4\ncem,dan,-8\ndan,dan,1\n"


@pytest.mark.parametrize(
    ("directed", "repeats", "weights", "said"),
    [
        (
            False,
            "first",
            {(0, 1): 1, (1, 0): 1, (2, 3): -8, (3, 2): -8},
            "1 repeats and 1 rows of the other direction left out",
        ),
        (
            False,
            "sum",
            {(0, 1): 7, (1, 0): 7, (2, 3): -8, (3, 2): -8},
            "1 repeats and 1 rows of the other direction added up",
        ),
        (True, "first", {(0, 1): 1, (1, 0): 2, (2, 3): -8}, "1 repeats left out"),
        (True, "sum", {(0, 1): 5, (1, 0): 2, (2, 3): -8}, "1 repeats added up"),
    ],
)
@pytest.mark.parametrize("as_features", [False, True])
def test_rows_that_are_one_edge(
    nodes: Path, directed: bool, repeats: Any, weights: dict[tuple[int, int], float], said: str, as_features: bool
) -> None:
    path = nodes.with_name("e.csv")
    path.write_text(EDGES)
    how: dict[str, Any] = {"features": ["w"]} if as_features else {"weights": "w"}
    edges = EdgeFile(path, ("from", "to"), directed=directed, repeats=repeats, **how)
    data = read(nodes, edges=edges, missing="mean")
    found = data.edge_features[:, 0] if as_features else data.edge_weight
    assert dict(zip(map(tuple, data.edge_index.T.tolist()), found.tolist(), strict=True)) == weights
    assert said in data.understood[1][1]
    with pytest.raises(DamagedFile, match=r"line [34] of .* repeats an edge with .*; keep the first \(--repeats first"):
        read(nodes, edges=EdgeFile(path, ("from", "to"), directed=directed, **how), missing="mean")


def test_rows_of_edges_without_weights_are_counted(nodes: Path) -> None:
    path = nodes.with_name("e.csv")
    path.write_text("from,to\nann,bob\nbob,ann\nann,bob\ncem,dan\n")
    data = read(nodes, edges=EdgeFile(path, repeats="sum"), missing="mean")
    assert data.edge_weight.tolist() == [3, 3, 1, 1]
    assert (
        "the weight of an edge is the number of its rows, 1 repeats and 1 rows of the other direction added up"
        in data.understood[1][1]
    )
    plain = read(nodes, edges=path, missing="mean")
    assert plain.edge_weight is None
    assert "1 repeats and 1 rows of the other direction left out" in plain.understood[1][1]


def test_a_header_alone_is_no_edges(nodes: Path) -> None:
    path = nodes.with_name("e.csv")
    path.write_text("from,to\n")
    data = read(nodes, edges=str(path), missing="mean")
    assert data.edge_index.shape == (2, 0)
    path.write_text("x y,z\n")
    with pytest.raises(DamagedFile, match=r"may be a header or an edge .* as in --columns 'x y,z', if it is a header"):
        read(nodes, edges=path, missing="mean")
    with pytest.raises(ValueError, match="may be a header or an edge of 'x y' and 'z'"):
        next(edge_chunks(path))
    data = read(nodes, edges=EdgeFile(path, columns=["x y", "z"]), missing="mean")
    assert data.edge_index.shape == (2, 0)


def test_graphs_for_training_decide_the_columns_of_their_nodes(tmp_path: Path) -> None:
    texts = {
        "g": "id,y,split\na,0,train\nb,1,train\nc,0,val\nd,1,test\n",
        "n": "graph,id,charge\na,1,2\na,2,4\nb,1,\nc,1,100\nd,1,\n",
        "e": "graph,from,to,kind\na,1,2,x\nc,1,1,y\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    edges = EdgeFile(tmp_path / "e.csv", ("from", "to"), features=("kind",))
    data = graph_tables(tmp_path / "g.csv", tmp_path / "n.csv", edges, target="y", categories=["kind"], missing="mean",
                        scale=True)  # fmt: skip
    assert data.x[:, 0].tolist() == [-1, 1, 0, 97, 0]
    assert data.columns["edges"]["kind"].values == ("x",)
