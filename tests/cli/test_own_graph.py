"""How-to pages, run from their own words: from tables to predictions, and a topology of one's own; and what else
`mpnn predict` writes."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from real_data import real
from typer.testing import CliRunner

from mpnn.cli.app import app
from mpnn.cli.tasks import said_of_test
from mpnn.data import tu
from mpnn.data.tables import Outputs

HOWTO = Path(__file__).resolve().parents[2] / "docs/howto"


def run(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    return result.output


def refusal(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    return result.stderr


def paste(number: int, page: str = "own_graph.md", **instead: str) -> str:
    """Runs a block of commands of a page, as somebody who pastes it into a terminal; `mpnn` in this process, with other
    values of some options."""
    output = ""
    block = re.findall(r"```sh\n(.*?)```", (HOWTO / page).read_text(), re.S)[number]
    for statement in re.findall(r"cat > .*?\nEND\n|mpnn .*?[^\\]\n", block, re.S):
        if statement.startswith("mpnn "):
            command = statement.replace("\\\n", " ").removeprefix("mpnn ")
            for option, value in instead.items():
                command = re.sub(rf"--{option} \S+", f"--{option} {value}", command)
            output += run(command)
        else:
            subprocess.run(["bash", "-ec", statement], check=True)
    return output


def rows(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


@pytest.fixture
def clubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The run of the page; the folder of the test is the current one. Returns what the commands printed."""
    monkeypatch.chdir(tmp_path)
    return paste(0)


def test_the_page_leads_from_tables_to_predictions(clubs: str) -> None:
    assert "accuracy 100.0%, loss" in clubs
    said = re.findall(r"```text\n(.*?)```", (HOWTO / "own_graph.md").read_text(), re.S)[0]
    assert " ".join(clubs.split()).startswith(" ".join(said.split()))
    assert "12 predictions in predictions.csv" in clubs
    table = {row["id"]: row for row in rows("predictions.csv")}
    assert [*table["fay"]] == ["id", "class", "p_chess", "p_dance"]
    assert (table["fay"]["class"], table["lea"]["class"]) == ("chess", "dance")
    assert float(table["fay"]["p_chess"]) + float(table["fay"]["p_dance"]) == pytest.approx(1, abs=1e-5)
    saved = json.loads(Path("runs/clubs/nodes.json").read_text())
    assert saved["ids"][:2] == ["ann", "bob"]
    assert [*saved["columns"]["nodes"]] == ["age", "hours_online"]
    assert "2 predictions in new_predictions.csv" in paste(1)
    assert [row["id"] for row in rows("new_predictions.csv")] == ["max", "nia"]
    assert "predictions.csv exists: name another file" in refusal("predict runs/clubs -o predictions.csv")
    bad = "predict runs/clubs --nodes new_knows.csv -o p.csv"
    assert "new_knows.csv has no column 'age'; it has 'from', 'to', 'days'" in refusal(bad)
    assert "new_people.csv has the node 'max', which is new to runs/clubs; name the edges" in refusal(
        bad.replace("new_knows", "new_people")
    )
    assert not Path("p.csv").exists()
    header, *people = Path("people.csv").read_text().splitlines()
    Path("later.csv").write_text("\n".join([header, *reversed(people)]).replace("14,2.5", "20,9.5"))
    run("predict runs/clubs --nodes later.csv -o later_predictions.csv")
    later = {row["id"]: row for row in rows("later_predictions.csv")}
    moved = {name for name in table if later[name] != table[name]}
    assert "ann" in moved <= {"ann", "bob", "cem", "dan", "eve", "fay"}, "the others do not receive from ann"
    Path("people.csv").write_text(Path("people.csv").read_text().replace("14,2.5", "14,2.6"))
    assert "changed since its training: data was" in refusal("predict runs/clubs -o p.csv")
    Path("runs/clubs/nodes.json").write_text("{}")
    assert "nodes.json is damaged or of another version" in refusal("predict runs/clubs -o p.csv")


def test_the_page_of_tables_leads_from_an_export_to_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = paste(0, "tables.md")
    said = re.findall(r"```text\n(.*?)```", (HOWTO / "tables.md").read_text(), re.S)[0]
    assert " ".join(done.split()).startswith(" ".join(said.split()))
    assert "accuracy" in run("eval runs/teams")
    run("predict runs/teams -o teams.csv")
    teams = {row["id"]: row["class"] for row in rows("teams.csv")}
    assert (teams["cem\njunior"], teams["kim"]) == ("sales", "lab")
    assert "1 predictions in joiner_team.csv" in paste(1, "tables.md")
    assert rows("joiner_team.csv")[0]["class"] == "lab"
    Path("latin.csv").write_bytes("id,joined,remote,city,hours\nZoë,2011-01-01,False,Oslo,20\n".encode("latin-1"))
    latin = "predict runs/teams --nodes latin.csv --edges nobody.csv -o latin_team.csv"
    assert "it is not UTF-8 text; save it as UTF-8, or name its encoding" in refusal(latin)
    run(f"{latin} --encoding latin-1")
    assert [row["id"] for row in rows("latin_team.csv")] == ["Zoë"]
    Path("signed.csv").write_text("from,to,w\nann,bob,-1\neve,bob,1\ngil,hal,2\nida,gil,-0.5\n")
    common = "train --nodes staff.csv --target team --categories city --missing mean --edges signed.csv --steps 3 "
    run(f"{common} --columns from,to --weights w --model gcn --out runs/signed")
    run(f"{common} --columns from,to --edge-features w --model gin --out runs/gin")
    run("predict runs/gin -o gin.csv")
    assert "--repeats is about --edges, which is missing" in refusal(
        "train --nodes staff.csv --target team --repeats sum --graph identity --out x"
    )
    assert "named 'town', which --categories names" in refusal(
        "train --nodes staff.csv --target team --categories town --edges mails.csv --out x"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_graphs_of_tables_are_compared(clubs: str) -> None:
    command = re.findall(r"^ +mpnn (train .*)", paste(2, budget="2s"), re.M)[0]
    assert run(f"{command} --steps 2 --out runs/winner"), "it is complete"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_a_topology_of_one_s_own_goes_into_a_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = paste(0, "own_topology.md")
    assert re.search(r"edges +108\b", drawn), "32 rows with 1 to 4 landmarks, 28 of them with themselves besides"
    done = paste(1, "own_topology.md", steps="2", budget="4s")
    assert "mpnn.models.GPT.from_pretrained" in done
    assert "landmarks(16)" in done
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_graphs", raising=False)
    names: dict[str, Any] = {}
    exec(re.findall(r"```py\n(.*?)```", (HOWTO / "own_topology.md").read_text(), re.S)[0], names)
    assert str(names["model"].layers[0].graph) == "(causal() & window(4)) | landmarks(8)"


@pytest.mark.slow
def test_labels_and_numbers_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in their own units: y = 1000 + 10 x, which the model sees standardized."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{k / 10 - 1},{1000 + 10 * (k / 10 - 1)},{int(k < 10)},{k % 2}" for k in range(20)]
    Path("t.csv").write_text("x,y,low,odd\n" + "\n".join(lines))
    common = "train --nodes t.csv --graph identity --model gnn --dim 32 --lr 0.01 --steps 80 --dropout 0"
    run(f"{common} --target y --ignore low,odd --problem regression --out numbers")
    run("predict numbers -o numbers.csv")
    numbers = rows("numbers.csv")
    assert [*numbers[0]] == ["id", "y"]
    assert float(numbers[7]["y"]) == pytest.approx(997, abs=1.5)
    assert re.match(r"R2 (99\.\d|100\.0)%, root mean squared error \S+ \(y\), on 4 test nodes", run("eval numbers"))
    run(f"{common} --target low,odd --ignore y --problem multilabel --out labels")
    run("predict labels -o labels.csv")
    first, *_, last = rows("labels.csv")
    assert [*first] == ["id", "low", "odd", "p_low", "p_odd"]
    assert (first["low"], last["low"]) == ("1", "0")
    assert "F1 " in run("eval labels")
    other = f"{common} --target odd --ignore y,low --problem multilabel --out labels --resume"
    assert "other settings: data was" in refusal(other), "the files are the same, and what is learned is not"
    assert "classes of nodes, and labels has multilabel" in refusal("view labels --node 1 -o page.html")


@pytest.fixture
def molecules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """MUTAG as three tables, without its damaged first graph, in the current folder. Returns the ids."""
    monkeypatch.chdir(tmp_path)
    found = [*enumerate(real(tu, "MUTAG").graphs)][1:]
    lines = {"molecules": ["id,mutagenic,atoms"], "atoms": ["graph,id,element"], "bonds": ["graph,from,to"]}
    for k, one in found:
        lines["molecules"].append(f"m{k},{one.label},{one.num_nodes}")
        lines["atoms"] += [f"m{k},a{i},{tag}" for i, tag in enumerate(one.tags.tolist())]
        lines["bonds"] += [f"m{k},a{i},a{j}" for i, j in one.edge_index.T.tolist()]
    for name, text in lines.items():
        Path(f"{name}.csv").write_text("\n".join(text))
    return [f"m{k}" for k, _ in found]


def test_the_page_leads_from_three_tables_to_predictions_of_graphs(molecules: list[str]) -> None:
    page = (HOWTO / "own_graph.md").read_text()
    for name in ("molecules", "atoms", "bonds"):
        assert all(f"| `{line}` |" in page for line in Path(f"{name}.csv").read_text().split()[:3]), name
    done = paste(3, steps="12")
    assert "atoms.csv 3,348 nodes, 10 to 28 a graph" in " ".join(done.split())
    assert "element (6 categories)" in " ".join(done.split())
    assert "3,694 rows of the other direction left out" in " ".join(done.split())
    assert "rows with a category of element that no row for training has (0): zeros" in " ".join(done.split())
    assert "187 predictions in mutagenic.csv" in done
    assert [row["id"] for row in rows("mutagenic.csv")] == molecules
    score = re.findall(r"\ngraphs .* (\S+)%\n", done)
    said = re.findall(r"accuracy (\S+)%, loss \S+ nats, on \d+ test graphs", done)
    assert said == [*score, *score], "of train, and of eval, which measures the saved model"
    run("predict runs/mutagenic --graph-table molecules.csv --nodes atoms.csv --edges bonds.csv -o again.csv")
    assert Path("again.csv").read_text() == Path("mutagenic.csv").read_text()
    Path("one.csv").write_text("id\nm7\n")
    Path("its.csv").write_text("".join(line for line in Path("atoms.csv").read_text().splitlines(True)
                                       if line.startswith(("graph", "m7,"))))  # fmt: skip
    links = [line for line in Path("bonds.csv").read_text().splitlines(True) if line.startswith(("graph", "m7,"))]
    Path("bound.csv").write_text("".join(links))
    run("predict runs/mutagenic --graph-table one.csv --nodes its.csv --edges bound.csv -o one_out.csv")
    (one,) = rows("one_out.csv")
    (same,) = [row for row in rows("mutagenic.csv") if row["id"] == "m7"]
    assert one["class"] == same["class"]
    assert float(one["p_0"]) == pytest.approx(float(same["p_0"]), abs=1e-4)
    assert "needs --graph-table, --nodes and --edges for other graphs" in refusal(
        "predict runs/mutagenic --nodes atoms.csv -o x.csv"
    )
    assert "was trained on many graphs" in refusal("view runs/mutagenic --node 1 -o page.html")
    assert "the readout of gin is a sum" in refusal(
        "train --graph-table molecules.csv --target mutagenic --nodes atoms.csv --edges bonds.csv --readout max --out y"
    )


@pytest.mark.slow
def test_numbers_of_graphs_are_learned_in_their_units(molecules: list[str]) -> None:
    """The number of atoms, in its own units."""
    common = "train --graph-table molecules.csv --target atoms --ignore mutagenic --problem regression "
    common += "--nodes atoms.csv --categories element,order"
    edges = "--edges bonds.csv --columns from,to"
    bonds = Path("bonds.csv").read_text().splitlines()
    orders = ["order", *(str(1 + line.count("0") % 3) for line in bonds[1:])]
    Path("bonds.csv").write_text("\n".join(f"{line},{order}" for line, order in zip(bonds, orders, strict=True)))
    for name, options in {
        "gat": f"{edges} --edge-features order --model gat",
        "gin": f"{edges} --edge-features order --model gin",
        "complete": "--graph complete --model gnn --aggregate mean --categories element",
    }.items():
        options += " --steps 400" if name == "gin" else " --steps 150 --readout sum"
        done = run(f"{common} {options} --dim 16 --lr 0.01 --out {name}")
        score = re.findall(r"\ngraphs .* (\S+)%\n", done)
        assert float(score[0]) > 25, f"{name}; the mean of the targets scores 0"  # by processor 38 to over 50
        assert f"R2 {score[0]}%, root mean squared error" in run(f"eval {name}")
    table = {row["id"]: row for row in rows("molecules.csv")}
    run("predict gat -o atoms_of.csv")
    wrong = [abs(float(row["atoms"]) - float(table[row["id"]]["atoms"])) for row in rows("atoms_of.csv")]
    assert sum(wrong) / len(wrong) < 3


def test_a_result_is_compared_with_an_answer_that_reads_nothing() -> None:
    """Two of three for training are of class b; of the labels, the first is mostly 1; the mean of the numbers is 0."""
    train, test = torch.tensor([True, True, True, False, False]), torch.tensor([False, False, False, True, True])
    y = torch.tensor([0, 1, 1, 1, 0])
    said = said_of_test(torch.tensor([[0.0, 1], [1, 0]]), y, train, test, Outputs("classes", ("a", "b")), "nodes")
    assert said == ("accuracy 100.0%, loss 0.313 nats, on 2 test nodes; 50.0% by always b, the most frequent class")
    labels = torch.tensor([[1, 0], [1, 0], [0, 0], [1, 1], [1, 0]]).bool()
    said = said_of_test(torch.ones(2, 2), labels, train, test, Outputs("multilabel", ("p", "q")), "graphs")
    assert said.endswith("on 2 test graphs; 80.0% by the more frequent value of each label"), "2 * 2 of 2 + 3"
    numbers = torch.tensor([[-1.0], [0], [1], [2], [4]])
    outputs = Outputs("regression", ("y",), mean=(0.0,), std=(1.0,))
    said = said_of_test(numbers[3:], numbers, train, test, outputs, "nodes")
    assert said.endswith("on 2 test nodes; -900.0% by always the mean"), "1 - (4 + 16) / 2"
