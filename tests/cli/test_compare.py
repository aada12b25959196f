"""`mpnn compare`: from graphs to a verdict, a page and a file of results."""

import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mpnn.cli import compare_hf, search
from mpnn.cli.app import app
from mpnn.cli.compare import expanded
from mpnn.cli.search import UnusableGraph, best_numbers, bounds
from mpnn.cli.tasks import Nodes
from mpnn.data.tables import EdgeFile
from mpnn.models import GAT, GCN
from mpnn.train.comparison import Comparison, Curve, Result

RUN = CliRunner()
compare, loop = import_module("mpnn.cli.compare"), import_module("mpnn.train.loop")


def test_ranges_stand_for_doubled_numbers() -> None:
    assert expanded("causal; causal & window(16..100)") == [
        *("causal", "causal & window(16)", "causal & window(32)", "causal & window(64)")
    ]
    assert expanded("bigbird(4, window=1..2, random=1..2)") == [
        f"bigbird(4, window={w}, random={r})" for w in (1, 2) for r in (1, 2)
    ]
    assert expanded("causal;;causal; ") == ["causal"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 0.5 s whenever it is read, so that times are counts of steps on every machine."""
    seconds = itertools.count(0.0, 0.5)
    for module in (loop, compare):
        monkeypatch.setattr(module, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(compare, "estimates", lambda model, *inputs: (0.0, 0.0))


@pytest.mark.usefixtures("clock")
def test_a_comparison_of_nodes_ends_in_a_verdict_and_a_page(tmp_path: Path) -> None:
    command = ["compare", "--task", "digits", "--graphs", "knn(4); identity; no_graph(3)"]
    done = RUN.invoke(app, [*command, "--budget", "60s", "--seeds", "2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "no_graph(3) is left out" in done.output
    assert "error: share of the validation nodes that the model gets wrong" in done.output
    lines = re.findall(r"^ +\d+ s  (\S+), rate \S+, seed \d: error \S+ after step [\d,]+$", done.output, re.M)
    assert len(lines) == 2 * 3 + 2 * 2, "one for each training: three rates, then two seeds, of two graphs"
    results = json.loads((tmp_path / "compare.json").read_text())
    by_graph = {one["graph"]: one for one in results["graphs"]}
    assert set(by_graph) == {"knn(4)", "identity"}
    command_of_winner = f'mpnn train --task digits --graph "knn(4)" --lr {by_graph["knn(4)"]["rate"]}'
    assert f"\n  {command_of_winner}\n" in done.output, "neighbors help"
    assert all(set(one["curves"]) == {"0", "1"} for one in by_graph.values())
    page = (tmp_path / "index.html").read_text()
    assert results["verdict"] in page.replace("&amp;", "&")
    assert {"curves.png", "costs.png"} <= {path.name for path in tmp_path.iterdir()}
    again = RUN.invoke(app, [*command, "--out", str(tmp_path)])
    assert again.exit_code == 2
    assert "holds a comparison" in again.output


@pytest.mark.usefixtures("clock")
def test_a_comparison_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("to be or not to be, that is the question. " * 60)
    sizes = ["--context", "16", "--dim", "8", "--heads", "1", "--layers", "1", "--batch", "4"]
    out = ["--budget", "20s", "--seeds", "2", "--out", str(tmp_path / "out")]
    done = RUN.invoke(app, ["compare", "--file", str(file), *sizes, *out, "--graphs", "causal; window(2)"])
    assert done.exit_code == 0, done.output
    assert "window(2) is left out" in done.output, "a later character must not be seen"
    assert "No other graph trained as long" in done.output
    (rate,) = (one["rate"] for one in json.loads((tmp_path / "out" / "compare.json").read_text())["graphs"])
    (command,) = re.findall(r"^  mpnn (train .*)$", done.output, re.M)
    assert command == (
        f"train --file {file} --graph causal --context 16 --dim 8 --heads 1 --layers 1 --batch 4 --lr {rate}"
    )
    trained = RUN.invoke(app, [*shlex.split(command), "--steps", "2", "--out", str(tmp_path / "winner")])
    assert trained.exit_code == 0, trained.output


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
def test_an_attention_stands_beside_a_graph(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("to be or not to be, that is the question. " * 60)
    sizes = ["--context", "16", "--dim", "8", "--heads", "1", "--layers", "1", "--batch", "4"]
    out = ["--budget", "30s", "--seeds", "1", "--out", str(tmp_path / "out")]
    graphs = "causal:retention; causal : delta; causal:soft; causal & window(2):gated"
    done = RUN.invoke(app, ["compare", "--file", str(file), *sizes, *out, "--graphs", graphs])
    assert done.exit_code == 0, done.output
    output = " ".join(done.output.split())
    assert "causal:soft is left out: there is no attention of GPT 'soft'" in output
    assert "window(2):gated is left out: log_gate, beta and states need causal()" in output
    kinds = {"causal:retention": "retention", "causal : delta": "delta"}
    results = json.loads((tmp_path / "out" / "compare.json").read_text())["graphs"]
    assert {one["graph"] for one in results} == set(kinds)
    assert results[0]["curves"]["0"]["errors"] != results[1]["curves"]["0"]["errors"]
    commands = [f" --attention {kind} " for kind in kinds.values()]
    assert sum(command in done.output for command in commands) == 1, "that of the winner"


@pytest.mark.parametrize(("rate", "which"), [(0.5, "smallest"), (1.0, None), (2.0, "largest")])
def test_the_best_graph_s_rate_is_cautioned_about_at_an_end_of_those_tried(rate: float, which: str | None) -> None:
    results = [
        Result(name, rate_of_graph, {0: Curve([1, 10], [1.0, 10.0], [error, error])})
        for name, error, rate_of_graph in (("a", 1.0, rate), ("b", 2.0, 1.0))
    ]
    contest = compare._Contest("", lambda graph, seed: None, 1.0, "", "", "", lambda graph, rate: "")
    options = compare.Options(task="digits")
    cautions = compare._cautions(Comparison(results), contest, options)
    said = (
        f"The best learning rate for a, {rate:g}, is the {which} of the three that were tried. "
        f"Try --lr {rate**2:g}: mpnn compare also tries half and twice this rate."
    )
    assert [caution for caution in cautions if "learning rate" in caution] == ([said] if which else [])
    tied = [replace(result, curves={0: Curve([1, 10], [1.0, 10.0], [1.0, 1.0])}) for result in results]
    assert not any("learning rate" in said for said in compare._cautions(Comparison(tied), contest, options))


@pytest.mark.parametrize("expression", ["edges | knn(2)", "knn(2) & identity", "~edges"])
def test_graphs_that_do_not_join_are_named(expression: str, tmp_path: Path) -> None:
    nodes, edges = tmp_path / "n.csv", tmp_path / "e.csv"
    nodes.write_text("id,size,club\n" + "".join(f"n{k},{k % 3},{'ab'[k % 2]}\n" for k in range(8)))
    edges.write_text("from,to\nn0,n1\nn1,n2\n")
    with pytest.raises(ValueError, match=r"^(edges|knn) is a graph of its own, which | & - ~ do not join"):
        Nodes.of_files(nodes, EdgeFile(edges), 0, target="club").graph(expression)


def test_a_model_of_nodes_stands_beside_a_graph() -> None:
    contest = compare._Contest.of(compare.Options(task="digits").resolved(compare.DEFAULTS))
    assert type(contest.make("knn(4):gcn", 0).model) is GCN
    assert type(contest.make("knn(4)", 0).model) is GAT
    assert contest.command("knn(4):gcn", 0.005) == 'mpnn train --task digits --graph "knn(4)" --model gcn --lr 0.005'


def test_the_command_of_the_winner_repeats_how_files_are_read() -> None:
    options = compare.Options(
        nodes="/my data/n.csv", edges="/e.csv", target="club", weights=None, edge_features="age", directed=True,
        model="gin", dim=32, dropout=0.25, scale=False,
    ).resolved(compare.DEFAULTS)  # fmt: skip
    assert compare._command(options, "model", "edges", 0.02) == (
        'mpnn train --nodes "/my data/n.csv" --target club --edges /e.csv --directed --edge-features age '
        "--graph edges --model gin --dim 32 --dropout 0.25 --lr 0.02"
    )
    own = compare.Options(text="tinyshakespeare").resolved(compare.DEFAULTS)
    assert compare._command(own, "attention", "causal & window(4):linear", 0.004) == (
        'mpnn train --data tinyshakespeare --graph "causal & window(4)" --attention linear --context 256 --batch 16 '
        "--lr 0.004"
    )


def test_a_published_model_reads_a_text_over_each_graph(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    text = "to be or not to be, that is the question. " * 30
    words = {c: k for k, c in enumerate(sorted(set(text)))}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "own.txt"
    file.write_text(text)
    options = ["--hf", str(tmp_path / "model"), "--file", str(file), "--out", str(tmp_path / "out")]
    done = RUN.invoke(app, ["compare", *options, "--context", "32", "--graphs", "causal; causal & window(4)"])
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM read 16 pieces of 32 tokens of own.txt" in done.output
    said = " ".join(done.output.split())
    assert "has the lowest perplexity, " in said
    assert "nats per token, may be chance." in said, "weights that were never trained prefer no graph"
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [one["graph"] for one in written["graphs"]] == ["the model's own masks = causal", "causal & window(4)"]
    assert "causal &amp; window(4)" in (tmp_path / "out" / "index.html").read_text()
    again = RUN.invoke(app, ["compare", *options])
    assert (again.exit_code, "replace it with --force" in again.output) == (2, True)
    acausal = RUN.invoke(app, ["compare", *options, "--force", "--graphs", "causal; window(4)"])
    assert acausal.exit_code == 2
    assert "use causal() & (window(4))" in " ".join(acausal.output.split())
    assert "causal=False" not in acausal.output, "an argument of Python, and none of the command"
    hf = pytest.importorskip("mpnn.hf")
    with_graph = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    hf.use(with_graph, "causal & window(2)")
    with_graph.save_pretrained(tmp_path / "windowed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "model" / name, tmp_path / "windowed" / name)
    kept, windowed = compare_hf.load(str(tmp_path / "windowed"), text, 32)
    first, *others = compare_hf.read(kept, windowed, ["causal", "causal & window(2)"])
    assert (first.graph, first.edges) == ("its own, causal & window(2)", 93)
    assert [one.graph for one in others] == ["causal"]
    assert first.losses != pytest.approx(others[0].losses, abs=1e-4)
    loaded, pieces = compare_hf.load(str(tmp_path / "model"), text, 32)
    full, near = compare_hf.read(loaded, pieces, ["causal", "causal & window(4)", "causal & window(4) & window(8)"])
    readings = [compare_hf.Reading("a", 9, [2.0, 2.1], 2.0), compare_hf.Reading("b", 5, [1.0, 1.11], 1.0)]
    assert compare_hf.verdict(readings) == (
        "b has the lowest perplexity, 2.872. Compared with a, b takes 0.50 of the time, and its loss is lower by 0.99 "
        "± 0.064 nats per token (95% interval over the same 2 pieces of text)."
    )
    own = [model(piece[None], labels=piece[None]).loss.item() for piece in pieces]
    assert full.losses == pytest.approx(own, abs=1e-5)
    assert near.losses != pytest.approx(own, abs=1e-5)
    assert (full.edges, near.edges) == (528, 150)
    assert compare_hf.load(str(tmp_path / "model"), text)[1].shape == (16, 64), "the model's context"
    new = ["--force", "--context"]
    assert "takes at most 64 tokens" in " ".join(RUN.invoke(app, ["compare", *options, *new, "128"]).output.split())
    other = RUN.invoke(app, ["compare", *options, *new, "32", "--graphs", "causal; causal:delta"])
    assert "a published model keeps its attention: write 'causal:delta' without" in " ".join(other.output.split())
    for graph in ("complete", "window(4)", "causal; window(4)"):
        acausal = RUN.invoke(app, ["compare", *options, *new, "32", "--graphs", graph])
        assert acausal.exit_code == 2
        assert "must not attend to the tokens that it predicts" in " ".join(acausal.output.split())
        assert "perplexity" not in acausal.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GPT2Model", "has no trained weights of GPT2LMHeadModel: 1 were newly initialised, such as lm_head.weight"),
        ("BertForMaskedLM", "BertLMHeadModel of .* is no decoder: it would read the tokens that it predicts"),
    ],
)
def test_models_that_are_no_trained_decoders_are_refused(name: str, message: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind(kind.config_class(**sizes, tie_word_embeddings=False)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        compare_hf.load(str(tmp_path), "a b a b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "soon"], "--budget must be a time such as 90s, 10m or 1h"),
        (["--graphs", ""], "there is no graph in --graphs"),
        (["--graphs", " ; "], "there is no graph in --graphs"),
        (["--graphs", "causal & window(8..4)"], "8..4 is an empty range"),
        (["--graphs", "window(3); window(5)"], "no graph is left to compare"),
        (["--task", "digits", "--context", "32"], "--context does not apply to --task digits"),
        (["--hf", "no/model", "--seeds", "2"], "--seeds is for training, and --hf trains nothing; leave it out"),
        (["--hf", "no/model", "--budget", "9s"], "--budget is for training"),
        (["--hf", "no/model", "--task", "cora"], "--task does not apply to --hf"),
        (["--hf", "no/model", "--layers", "3"], "--layers does not apply to --hf, only to --task text"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    done = RUN.invoke(app, ["compare", *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_search_finds_the_number_of_the_least_error() -> None:
    pytest.importorskip("optuna")
    asked: list[str] = []

    def error(graph: str) -> float:
        asked.append(graph)
        if graph == "window(1)":
            raise UnusableGraph("too narrow")
        return abs(int(graph.split("(")[1][:-1]) - 20) / 100

    best, least = best_numbers("window(1..64)", 30, error)
    assert abs(int(best.split("(")[1][:-1]) - 20) <= 3
    assert least == error(best)
    assert len(set(asked[:-1])) == len(asked[:-1]), "a graph is measured once"
    with pytest.raises(UnusableGraph, match=r"no trial of window\(1\.\.1\) ended with a finite error: too narrow"):
        best_numbers("window(1..1)", 2, error)


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_a_search_ends_in_a_comparison(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    command = ["compare", "--task", "digits", "--graphs", "knn(2..8); identity", "--search", "2", "--seeds", "1"]
    done = RUN.invoke(app, [*command, "--budget", "80s", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "knn(2..8): 2 trials of 10 s, best knn(" in done.output
    graphs = {one["graph"] for one in json.loads((tmp_path / "compare.json").read_text())["graphs"]}
    assert len(graphs) == 2
    assert "identity" in graphs


def test_search_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"9\.\.3 is an empty range"):
        bounds("window(9..3)")
    done = RUN.invoke(app, ["compare", "--search", "3", "--hf", "no/model", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "--hf trains nothing" in done.output
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    done = RUN.invoke(app, ["compare", "--search", "3", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert 'Optuna, which is not installed; run: pip install -c constraints.txt ".[search]"' in done.output
    assert not (tmp_path / "out").exists()
