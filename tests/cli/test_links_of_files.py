"""`mpnn train --task links`, `eval` and `predict --pairs`: the how-to page, real data, and what is refused."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from real_data import real
from typer.testing import CliRunner

from mpnn.cli.app import app
from mpnn.data import locate
from mpnn.models import LinkRanker
from mpnn.train.link_predictor import auc

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/links.md"
MEASURES = ["AUC", "average", "precision", "MRR", "Hits@1", "Hits@3", "Hits@10"]


def run(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    return result.output


def refusal(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    return result.stderr


def paste(number: int, *options: str) -> str:
    """Runs a block of commands of the page, `mpnn` in this process; `options` are added to its training."""
    output = ""
    block = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)[number]
    for statement in re.findall(r"cat > .*?\nEND\n|mpnn .*?[^\\]\n|.*?\n", block, re.S):
        if not statement.startswith("mpnn "):
            subprocess.run(["bash", "-ec", statement], check=True)
            continue
        command = statement.replace("\\\n", " ").removeprefix("mpnn ").strip()
        output += run(" ".join([command, *options]) if command.startswith("train") else command)
    return output


def rows(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def measured(folder: str) -> dict[str, dict[str, float]]:
    return json.loads(Path(folder, "run.json").read_text())["measured"]


@pytest.fixture
def loans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return paste(0)


def test_the_page_leads_from_links_to_scores(loans: str) -> None:
    text = " ".join(loans.split())
    assert "24 links, header found, commas, reader to book: 8 reader, 6 book (two sets: no name is in both" in text
    assert "21 train, 1 val, 2 test (by time, column day)" in text
    assert text.count("2 test links, each compared with an absent pair with another destination") == 2, (
        "of train and of eval"
    )
    tables = re.findall(r"^ +AUC .*\n(lightgcn .*)\n(popularity .*)", loans, re.M)
    assert len(tables) == 2
    assert tables[0] == tables[1], "the saved model's"
    found = rows("scores.csv")
    assert [*found[0]] == ["reader", "book", "score", "p", "rank", "known"]
    assert [(row["reader"], row["book"], row["known"]) for row in found] == [
        ("bob", "emma", ""),
        ("ann", "middlemarch", ""),
        ("hal", "dune", "test"),
    ]
    assert all(0 < float(row["p"]) < 1 for row in found)
    assert all(1 <= float(row["rank"]) <= 6 for row in found)
    saved = json.loads(Path("runs/loans/nodes.json").read_text())
    assert saved["ids"] == ["ann", "bob", "cem", "dan", "eve", "fay", "gil", "hal"]
    assert saved["dst_ids"] == ["dune", "emma", "middlemarch", "persuasion", "solaris", "ubik"]
    assert LinkRanker.from_pretrained("runs/loans").form == "two sets"
    assert {path.name for path in Path("runs/loans").iterdir()} >= {"graph.png", "curves.png", "model.safetensors"}


def test_pairs_that_cannot_be_scored_are_refused(loans: str) -> None:
    Path("new.csv").write_text("reader,book\nzoe,dune\n")
    assert "has the node 'zoe' in column 'reader', which no link of loans.csv has" in refusal(
        "predict runs/loans --pairs new.csv -o x.csv"
    )
    assert "runs/loans has a model of links: name the --pairs to score" in refusal("predict runs/loans -o x.csv")
    assert "scores --pairs of its own nodes; leave --nodes" in refusal(
        "predict runs/loans --pairs pairs.csv --nodes pairs.csv -o x.csv"
    )
    Path("other.csv").write_text("a,b\nann,dune\n")
    assert "pairs have the columns of loans.csv, reader, book" in refusal(
        "predict runs/loans --pairs other.csv -o x.csv"
    )
    assert not Path("x.csv").exists()
    assert "was trained on links" in refusal("view runs/loans --node 1 -o page.html")
    Path("loans.csv").write_text(Path("loans.csv").read_text().replace("2026-01-05", "2026-01-06"))
    assert "changed since its training" in refusal("eval runs/loans")
    assert "changed since its training" in refusal("predict runs/loans --pairs pairs.csv -o x.csv")


def test_options_that_do_not_fit_are_refused(loans: str) -> None:
    train = "train --task links --edges loans.csv --out runs/x"
    assert "links need --edges" in refusal("train --task links --out runs/x")
    assert "loans.csv has 3 columns" in refusal(train)
    assert "has no column 'kind'" in refusal(f"{train} --relation kind")
    assert "has 'ann' in place of a number in column 'reader'; a time is a number" in refusal(
        f"{train} --time reader --columns reader,book"
    )
    day = f"{train} --time day"
    assert "embeddings pass no messages, so they have no --layers" in refusal(f"{day} --model embeddings --layers 2")
    assert "there is no model of links 'gat'; there are lightgcn, rgcn, embeddings" in refusal(f"{day} --model gat")
    assert "--graph does not apply to --task links" in refusal(f"{day} --graph causal")
    assert "--relation does not apply to" in refusal("train --task cora --relation x")
    assert "mpnn compare has text, cora, digits" in refusal("compare --task links --out runs/y")
    kinds = [f"{'ab'[k % 2]}{k},{k % 3},{'ab'[k % 2]}{k + 2}" for k in range(60)]
    Path("kinds.csv").write_text("head,kind,tail\n" + "\n".join(kinds))
    typed = "train --task links --edges kinds.csv --relation kind --out runs/x"
    assert "lightgcn does not distinguish 3 relations; choose --model rgcn or embeddings" in refusal(
        f"{typed} --model lightgcn"
    )
    assert "inner does not distinguish 3 relations; choose --decoder distmult or complex" in refusal(
        f"{typed} --decoder inner"
    )
    assert not Path("runs/x").exists()


def test_the_same_options_are_the_same_run(loans: str) -> None:
    train = "train --task links --edges loans.csv --time day --steps 6 --out"
    run(f"{train} runs/a")
    run(f"{train} runs/b")
    assert measured("runs/a") == measured("runs/b")
    again = run(f"{train} runs/a --resume")
    assert "is finished; there is nothing to continue" in again
    assert "other settings: lr was" in refusal(f"{train} runs/a --resume --lr 0.5")


def test_neighbors_are_sampled_around_links(loans: str) -> None:
    train = "train --task links --edges loans.csv --time day --steps 6"
    run(f"{train} --fanouts 2,2,2 --out runs/a")
    run(f"{train} --fanouts 2,2,2 --out runs/b")
    run(f"{train} --out runs/c")
    of_sample, again, of_all = (Path("runs", name, "model.safetensors").read_bytes() for name in "abc")
    assert of_sample == again
    assert of_sample != of_all
    assert "each of the 3 layers of the encoder; got 2" in refusal(f"{train} --fanouts 2,2 --out runs/d")
    assert "--fanouts are whole numbers, one for each layer, such as 15,10; got 'many'" in refusal(
        f"{train} --fanouts many --out runs/d"
    )
    assert "this model passes none" in refusal(f"{train} --model embeddings --fanouts 2 --out runs/d")
    assert "--fanouts does not apply to --task cora" in refusal("train --task cora --fanouts 2")


def test_links_of_one_set_and_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of friends whose features say the group."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    pairs = torch.combinations(torch.arange(40)).tolist()
    kept = [(i, j) for i, j in pairs if i % 2 == j % 2 and torch.rand((), generator=generator) < 0.5]
    Path("friends.csv").write_text("from,to\n" + "\n".join(f"p{i},p{j}" for i, j in kept))
    Path("people.csv").write_text("id,group\n" + "\n".join(f"p{k},{'ab'[k % 2]}" for k in range(41)))
    said = run(
        "train --task links --edges friends.csv --nodes people.csv --categories group --steps 40 --dim 16 --out runs/f"
    )
    assert "each compared with an absent pair drawn at random" in said
    assert measured("runs/f")["lightgcn"]["AUC"] > 0.75 > measured("runs/f")["popularity"]["AUC"]
    others = [(i, j) for i, j in pairs if (i, j) not in {*kept}]
    Path("p.csv").write_text("to,from\n" + "\n".join(f"p{i},p{j}" for i, j in [(0, 40), *others]))
    run("predict runs/f --pairs p.csv -o o.csv")
    found = rows("o.csv")
    assert [*found[0]] == ["from", "to", "score", "p", "rank", "known"]
    assert found[0]["from"] == "p40", "a node without a link, known by its features"
    same = torch.tensor([int(row["from"][1:]) % 2 == int(row["to"][1:]) % 2 for row in found])
    scores = torch.tensor([float(row["score"]) for row in found])
    assert auc(scores[same], scores[~same]) > 0.8


def test_two_sets_with_features_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers take the books of their genre, which the tables of both say; new nodes are scored by them."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    taken = [(i, j) for i in range(30) for j in range(30) if i % 2 == j % 2]
    taken = [pair for pair in taken if torch.rand((), generator=generator) < 0.5]
    Path("loans.csv").write_text("reader,book\n" + "\n".join(f"r{i},b{j}" for i, j in taken))
    for name in ("reader", "book"):
        lines = [f"{name[0]}{k},{'ab'[k % 2]}" for k in range(32)]
        Path(f"{name}s.csv").write_text("id,genre\n" + "\n".join(lines))
    run(
        "train --task links --edges loans.csv --columns reader,book --nodes readers.csv --dst-nodes books.csv "
        "--categories genre --steps 40 --dim 16 --out runs/l"
    )
    assert measured("runs/l")["lightgcn"]["AUC"] > 0.75 > measured("runs/l")["popularity"]["AUC"]
    Path("p.csv").write_text("reader,book\nr30,b30\nr30,b31\n")
    run("predict runs/l --pairs p.csv -o o.csv")
    same, other = rows("o.csv")
    assert float(same["score"]) > float(other["score"])
    Path("books.csv").write_text(Path("books.csv").read_text().replace("b3,b", "b3,a"))
    assert "changed since its training" in refusal("predict runs/l --pairs p.csv -o x.csv")
    assert "--dst-nodes does not apply to" in refusal("train --task cora --dst-nodes books.csv")


def copied(name: str, *files: str) -> None:
    folder = real(locate, name)
    for file in files:
        Path(file).write_bytes((folder / file).read_bytes())


def test_movielens_by_time_as_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copied("movielens-100k", "ml-100k.inter")
    said = " ".join(paste(1, "--steps", "2").split())
    assert "943 user_id:token, 1,682 item_id:token (two sets, as the columns are named" in said
    assert "85,000 train, 5,000 val, 10,000 test (by time, column timestamp:float)" in said
    found = measured("runs/films")
    assert found["popularity"]["AUC"] == pytest.approx(0.824, abs=0.01)
    assert found["lightgcn"]["AUC"] > found["popularity"]["AUC"] - 0.02, "it begins as popularity"
    Path("pairs.csv").write_text("user_id:token,item_id:token\n196,242\n196,1682\n")
    run("predict runs/films --pairs pairs.csv -o scores.csv")
    assert [row["known"] for row in rows("scores.csv")] == ["train", ""]


def test_umls_as_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copied("umls", "train.txt", "valid.txt", "test.txt")
    said = " ".join(paste(2, "--steps", "60").split())
    assert "5,216 train, 652 val, 661 test (as stated)" in said
    assert "column relation has 46 relations" in said
    found = measured("runs/umls")
    assert found["popularity"]["MRR"] == pytest.approx(0.661, abs=0.001)
    assert found["rgcn"]["MRR"] > 0.85
    assert found["rgcn"]["AUC"] > 0.97
    Path("pairs.tsv").write_text("head\trelation\ttail\nalga\tisa\tentity\nalga\tisa\tbird\n")
    run("predict runs/umls --pairs pairs.tsv -o scores.csv")
    known, absent = rows("scores.csv")
    assert [*known] == ["head", "tail", "relation", "score", "p", "rank", "known"]
    assert (known["known"], absent["known"]) == ("train", "")
    assert float(known["p"]) > float(absent["p"])
