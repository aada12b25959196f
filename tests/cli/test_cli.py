"""The command line, as somebody at a terminal meets it: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import mpnn.cli
from mpnn import graphs, models
from mpnn.cli import app as commands, data, demo, drawing, graph_run, pictures, recall, tasks
from mpnn.cli.app import app, load, paragraphs
from mpnn.cli.console import console, memory
from mpnn.cli.link_run import LinkSettings
from mpnn.cli.measure import backends, bytes_for_backward, estimates
from mpnn.cli.tasks import Nodes, TextSettings
from mpnn.data import SOURCES, Characters
from mpnn.data.locate import find
from mpnn.distributed import Part
from mpnn.graph.registry import install
from mpnn.train import loop

COMMANDS = [
    "demo",
    "graph",
    "graph convert",
    "graph cut",
    "explain",
    "view",
    "train",
    "generate",
    "eval",
    "predict",
    "data",
    "data get",
    "data list",
    "tune",
]
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refusal(*arguments: str | Path) -> str:
    """The one sentence on stderr of a command that must fail with exit code 2."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert not isinstance(result.exception, Exception), result.exception
    assert result.stderr.startswith("mpnn: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"mpnn {command}" in result.output or command == "data"


def test_the_help_of_mpnn_lists_every_command_by_its_first_sentence() -> None:
    for name, summary in commands.COMMANDS.items():
        loaded = " ".join(commands.load(name).help.split("\n\n")[0].split())
        assert loaded == summary
        assert summary in run("--help").output


@pytest.mark.slow
def test_the_help_of_train_states_defaults_that_depend_on_the_data() -> None:
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", run("train", "--help").stdout).split())
    assert "for tables the links of --edges, or knn(8) for nodes without --edges" in text
    nodes, cora = Nodes.digits().lr, Nodes.cora().lr
    assert cora == graph_run._RATE
    assert f"The default is {nodes} for nodes, and {cora} for cora and for --graph-table." in text
    assert f"({TextSettings().lr} for text; {LinkSettings().lr} for links)" in text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (12_345, "12 kB"), (1_249_000, "1.2 MB"), (3.21e9, "3.2 GB")]
)
def test_memory_has_a_unit_that_fits(size: float, text: str) -> None:
    assert memory(size) == text


def test_help_imports_no_extras() -> None:
    script = "import runpy, sys; sys.argv = ['mpnn', '--help']\n" + (
        "try: runpy.run_module('mpnn', run_name='__main__')\n"
        "finally: print({'transformers', 'matplotlib', 'sklearn'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "set()\n"
    assert "demo" in done.stdout


def test_examples_in_the_help_of_graph_can_be_typed() -> None:
    examples = re.findall(r'^\s*mpnn graph (?:"([^"]+)"|(\w+))(?: --n (\d+))?', run("graph", "--help").output, re.M)
    assert len(examples) == 4
    for quoted, bare, n in examples:
        graphs.parse(quoted or bare).bind(int(n or 64), 77 if bare else None)


def test_without_a_command_there_is_help() -> None:
    assert "demo" in run().output


# ------------------------------------------------------------------------------------------------------------- graph


def test_graph_counts_and_draws() -> None:
    """causal & window(1) over 4 nodes: 7 edges; news travels one node a layer, and never backwards."""
    result = run("graph", "causal & window(1)", "--n", "4")
    assert result.exit_code == 0
    facts = re.sub(r" +", " ", result.output)
    assert "edges 7\n" in re.sub(r" +\n", "\n", facts)
    assert "density 43.75% of 16 pairs" in facts
    assert "degree 1 least, 1.8 mean, 2 most" in facts
    assert "reach after 1 layer 43.8% of all pairs, each node with itself included" in facts
    assert "reach after 2 layers 56.2%" in facts
    assert "reach after 4 layers 62.5%" in facts
    assert "diameter 3 layers connect each node with all earlier ones" in facts
    assert "│████████                        │" in result.output


def test_graph_convert_writes_a_folder_that_open_csr_maps(tmp_path: Path) -> None:
    edges, folder = tmp_path / "edges.csv", tmp_path / "graph"
    edges.write_text("source,destination\n3,0\n1,2\n0,2\n# the end\n")
    result = run("graph", "convert", edges, folder)
    assert result.exit_code == 0, result.output
    assert f"4 nodes, 3 edges: 52 bytes in {folder}" in result.output
    assert [graphs.open_csr(folder).in_neighbors(node).tolist() for node in range(4)] == [[3], [], [0, 1], []]
    np.save(tmp_path / "edges.npy", np.array([[5, 1], [0, 1]]))
    result = run(
        "graph", "convert", tmp_path / "edges.npy", tmp_path / "pairs", "--n", "2", "--num-src", "6", "--edge-ids"
    )
    assert "2 destinations, 6 sources, 2 edges" in result.output
    assert graphs.open_csr(tmp_path / "pairs").edge_ids.tolist() == [0, 1]


def test_graph_cut_writes_parts_that_processes_map(tmp_path: Path) -> None:
    edges, x, owners = tmp_path / "edges.csv", tmp_path / "x.npy", tmp_path / "edges.part.2"
    edges.write_text("".join(f"{i},{(i + 1) % 6}\n" for i in range(6)))
    owners.write_text("0\n0\n0\n1\n1\n1\n")
    np.save(x, np.arange(6.0))
    run("graph", "convert", edges, tmp_path / "ring")
    cut = ("graph", "cut", tmp_path / "ring", tmp_path / "parts", "--ranks", "2")
    result = run(*cut, "--owners", owners, "--data", f"x={x}")
    assert result.exit_code == 0, result.output
    assert "the busiest rank fetches 1 of 6 nodes in a layer" in result.stdout
    part = Part.open(tmp_path / "parts", 1)
    assert part.data["x"].tolist() == [3, 4, 5]
    assert part.sources.tolist() == [3, 4, 5, 2]
    assert "holds another cut" in refusal(*cut, "--owners", owners, "--data", f"x={x}", "--data", f"y={x}")
    assert "--data takes NAME=FILE.npy, a file that exists" in refusal(*cut, "--data", "x=nowhere.npy")
    assert "write it with edge_ids" in refusal(*cut, "--data", f"edge_attr={x}")
    run("graph", "convert", edges, tmp_path / "numbered", "--edge-ids")
    result = run("graph", "cut", tmp_path / "numbered", tmp_path / "data", "--ranks", "2", "--data", f"edge_attr={x}")
    assert result.exit_code == 0, result.output
    attributes = [Part.open(tmp_path / "data", rank).graph.edge_attr for rank in range(2)]
    assert sorted(torch.cat(attributes).tolist()) == [0, 1, 2, 3, 4, 5]
    owners.write_text("0\n0\n0\n1\n1\n2\n")
    assert "the rank of each of the 6 nodes, below 2" in refusal(*cut, "--owners", owners)


def test_graph_convert_numbers_names(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("from,to\nann,bob\nbob,cem\n")
    result = run("graph", "convert", tmp_path / "e.csv", tmp_path / "graph", "--names", "one")
    assert "the names of the nodes are in" in result.stdout
    assert graphs.open_csr(tmp_path / "graph").names[0] == ["ann", "bob", "cem"]
    said = refusal("graph", "convert", tmp_path / "e.csv", tmp_path / "other")
    assert "has 'ann' in place of a number in column 'from'; number the nodes from 0 first, or let names" in said


def test_graph_convert_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    edges = tmp_path / "edges.csv"
    assert f"there is no file {edges}" in refusal("graph", "convert", edges, tmp_path / "graph")
    edges.write_text("0,7\n")
    assert f"{tmp_path} exists" in refusal("graph", "convert", edges, tmp_path)
    where = ("graph", "convert", edges, tmp_path / "graph")
    assert "edge 0 (0 -> 7) has destination 7, but there are 5 destinations" in refusal(*where, "--n", "5")
    assert "--num-src needs --n" in refusal(*where, "--num-src", "5")
    edges.write_text("0,1\n1\n")
    assert f"line 2 of {edges} has 1 columns, and the first row has 2" in refusal(*where)
    edges.write_text("id,src,dst\n0,5,7\n1,8,2\n")
    assert "has 3 columns ('id', 'src', 'dst')" in refusal(*where)
    assert "no edge of" in refusal(*where, "--columns", "src,dst")
    assert "got ('src', 'dest')" in refusal(*where, "--columns", "src,dest")
    assert [path.name for path in tmp_path.iterdir()] == ["edges.csv"]


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("window(1)", "199 layers connect all pairs"),
        ("complete()", "1 layer connects all pairs"),
        ("causal & window(16)", "13 layers connect each node with all earlier ones"),
        ("identity", "no number of layers connects each node with all earlier ones"),
    ],
)
def test_the_command_and_the_notebook_say_what_diameter_returns(
    expression: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The browser's answer is compared in tests/view/test_algebra.py."""
    monkeypatch.setattr("mpnn.graph.html._SECONDS", 60.0)  # other programs may run
    assert sentence in run("graph", expression, "--n", "200").output
    graph = graphs.parse(expression).bind(200)
    assert sentence in graph._repr_html_()
    assert sentence.split()[0] == str(graph.diameter() or "no")


def test_graph_says_so_if_the_reach_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpnn.cli.graph._TIME_LIMIT", -1.0)
    output = run("graph", "causal", "--n", "20").output
    assert "not known: stopped" in output
    assert "reach after" not in output


def test_graph_counts_what_is_too_large_to_draw() -> None:
    output = re.sub(r" +", " ", run("graph", "causal", "--n", "34000000").output)
    assert "edges 578,000,017,000,000" in output
    assert "degree 1 least, 17,000,000.5 mean, 34,000,000 most" in output
    assert "not drawn: more than 33,554,432 runs" in output


def test_graph_of_two_kinds_of_nodes() -> None:
    result = run("graph", "complete", "--n", "10", "--num-src", "77")
    assert result.exit_code == 0
    assert "10 destinations, 77 sources" in result.output
    assert "reach" not in result.output


@pytest.mark.parametrize("n", ["0", "1"])
def test_graph_of_hardly_any_nodes(n: str) -> None:
    assert run("graph", "causal", "--n", n).exit_code == 0


def test_a_picture_without_an_ending_is_a_png_and_says_so(tmp_path: Path) -> None:
    assert f"saved to {tmp_path / 'band.png'}" in run("graph", "causal", "--n", "4", "-o", tmp_path / "band").output
    assert (tmp_path / "band.png").read_bytes().startswith(PNG)


def test_a_picture_replaces_a_file_only_by_force(tmp_path: Path) -> None:
    file = tmp_path / "band.png"
    file.write_text("mine")
    assert f"{file} exists" in refusal("graph", "causal", "--n", "4", "-o", file)
    assert file.read_text() == "mine"
    assert run("graph", "causal", "--n", "4", "-o", file, "--force").exit_code == 0
    assert file.read_bytes().startswith(PNG)


@pytest.mark.parametrize("width", [30, 200])
def test_a_drawing_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("graph", "longformer(64, globals=4)", "--n", "4096").output.splitlines()
    widths = {len(line) for line in lines if line.startswith(("┌", "│", "└"))}
    assert widths == {min(width, 66)}


def test_without_colors_cells_differ_by_their_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR on a terminal that has colors."""
    monkeypatch.setattr(console, "no_color", True)
    monkeypatch.setattr(type(console), "color_system", "truecolor")
    output = run("graph", "causal", "--n", "64").output
    assert "│█▄ " in output
    assert "a filled cell is an edge" in output


def test_a_drawing_has_the_edges_of_the_graph() -> None:
    graph = (graphs.causal() & graphs.window(3)).bind(64)
    lines = str(drawing.matrix(graph.runs, plain=True)).splitlines()[1:-1]
    halves = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}
    cells = np.array([[halves[c] for c in line.strip("│")] for line in lines])
    np.testing.assert_array_equal(cells.transpose(0, 2, 1).reshape(64, 64), graph.dense().numpy())


def test_a_colored_drawing_has_two_rows_to_a_line() -> None:
    text = drawing.matrix(graphs.causal().bind(64).runs, plain=False)
    assert [len(line) for line in str(text).splitlines()] == [64] * 32


# ----------------------------------------------------------------------------------------------------------- explain


def test_explain_prints_the_plan() -> None:
    result = run("explain", "causal & window(16)", "--n", "512", "--heads", "4", "--dim", "32", "--batch", "3")
    assert result.exit_code == 0
    assert "dot-product attention, softmax, 4 x 32, batch 3, float32 on cpu, with gradients" in result.output
    assert "edge_list" in result.output


def test_explain_as_json() -> None:
    done = run("explain", "causal", "--n", "64", "--json")
    found = json.loads(done.stdout)
    assert found["backend"] in {c["name"] for c in found["candidates"] if c["seconds"] is not None}
    assert all((c["reason"] is None) == (c["seconds"] is not None) for c in found["candidates"])


def test_explain_plans_for_a_gpu_that_is_not_there() -> None:
    result = run("explain", "causal & window(64)", "--n", "2048", "--device", "cuda")
    assert "float32 on cuda" in result.stdout
    assert "not measured" in result.stdout
    found = json.loads(run("explain", "random(3)", "--n", "64", "--device", "cuda", "--no-grad", "--json").stdout)
    named = {candidate["name"]: candidate for candidate in found["candidates"]}
    assert named["dense"]["seconds"] > 0
    assert named["scan"]["reason"]
    assert "not measured" in found["note"]
    assert "note" not in json.loads(run("explain", "causal", "--n", "64", "--json").stdout)


# -------------------------------------------------------------------------------------------------------------- data


def test_data_list_says_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPNN_DATA", str(tmp_path))
    (tmp_path / "tu" / "MUTAG").mkdir(parents=True)
    (tmp_path / "tu" / "MUTAG" / "MUTAG.txt").write_text("0\n")
    lines = {line.split()[0]: line for line in run("data", "list").output.splitlines() if line.strip()}
    assert str(tmp_path / "tu" / "MUTAG") in lines["MUTAG"]
    assert "comes with scikit-learn" in lines["digits"]
    assert {"cora", "tinyshakespeare", "multi30k", "PROTEINS", "pydoc"} <= set(lines)


def test_data_get_prints_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "locate", lambda name: tmp_path / name)
    result = run("data", "get", "cora")
    assert result.exit_code == 0
    assert result.output.splitlines()[0] == str(tmp_path / "cora")
    assert "license: MIT" in result.output


def test_data_get_of_what_needs_no_fetching() -> None:
    assert "nothing to download" in run("data", "get", "digits").output


# ---------------------------------------------------------------------------------------------------- train and demo


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with coarse pictures and few steps."""
    monkeypatch.setattr(pictures, "_DPI", 30)
    monkeypatch.setattr(demo, "LENGTHS", [16, 32, 64])
    monkeypatch.setattr(demo, "ATTENTION_LENGTH", 64)


def test_demo_trains_and_writes_its_page(tmp_path: Path, quick: None) -> None:
    result = run("demo", "--steps", "2", "--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "demo" / "index.html").read_text(encoding="utf-8")
    drawn = sorted(path.name for path in (tmp_path / "demo").glob("*.png"))
    assert drawn == ["step-times.png"]
    assert page.count('src="data:image/png;base64,') == len(drawn)
    shown = [json.loads(data)["attention"] for data in re.findall(r'class="mpnn-data">(.*?)</script>', page)]
    assert [(one["subject"]["kind"], len(one["graphs"])) for one in shown] == [("tokens", 2), ("nodes", 1)]
    assert 'src="http' not in page  # it stands alone
    for text in (result.output, page.replace("&amp;", "&")):
        for expression in ("causal & window(7) | landmarks(8)", "knn(8)", "identity"):
            assert expression in text
    assert "torch " + torch.__version__ in page
    assert "a training step on 64 characters is" in result.output
    assert "holds a finished demo" in refusal("demo", "--steps", "2", "--out", tmp_path / "demo")


def test_landmarks_carry_a_letter_that_a_window_loses() -> None:
    """By what the graphs connect in two layers: the second half of the places needs a landmark."""
    reached = {name: torch.linalg.matrix_power(t.bind(48).dense().float(), 2)[24:, 3] > 0
               for name, t in recall.TOPOLOGIES.items()}  # fmt: skip
    assert {name: bool(places.all()) for name, places in reached.items()} == {
        "causal & window(7)": False,
        "causal & window(7) | landmarks(8)": True,
        "causal": True,
    }
    assert not reached["causal & window(7)"].any()
    edges = [t.bind(48).num_edges for t in recall.TOPOLOGIES.values()]
    assert edges == [356, 476, 1176]


@pytest.mark.slow
def test_recall_is_learned_where_the_graph_carries_it() -> None:
    accuracies = [recall.RecallRun(name, recall.STEPS, 0).train().history.test_accuracy for name in recall.TOPOLOGIES]
    assert accuracies[0] < 0.3
    assert accuracies[1] > 0.9
    assert accuracies[2] > 0.9


SHAPE = ["--context", "16", "--dim", "8", "--heads", "2", "--layers", "1", "--batch", "4"]


@pytest.fixture
def verses(tmp_path: Path) -> Path:
    text = tmp_path / "verses.txt"
    text.write_text("so much depends upon a red wheel barrow\n" * 30, encoding="utf-8")
    return text


def test_train_on_text_of_one_s_own(tmp_path: Path, verses: Path) -> None:
    result = run("train", "--graph", "strided(4)", "--file", verses, "--steps", "2", "--out", tmp_path / "out", *SHAPE)
    assert result.exit_code == 0, result.output
    assert "verses.txt" in result.output
    assert re.search(r"loss +nats per character", result.output)
    assert "accuracy" not in result.output, "of other tasks"
    written = {"curves.png", "graph.png", "run.json", "config.json", "model.safetensors", "characters.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == written
    assert f"mpnn.models.GPT.from_pretrained('{tmp_path / 'out'}')" in result.output
    model = models.GPT.from_pretrained(tmp_path / "out")
    characters = Characters((tmp_path / "out" / "characters.txt").read_text(encoding="utf-8"))
    prompt = characters.encode("so much depends ")
    assert model(prompt[None]).shape == (1, 16, len(characters))


def test_train_in_mixed_precision(tmp_path: Path, verses: Path) -> None:
    """Steps compute in bfloat16; the weights stay in float32."""
    weights = {}
    for precision in ("float32", "bf16"):
        out, options = tmp_path / precision, ["--graph", "causal & window(4)", "--precision", precision]
        result = run("train", "--file", verses, *SHAPE, "--steps", "2", *options, "--out", out)
        assert result.exit_code == 0, result.output
        written = json.loads((out / "run.json").read_text())
        assert written["options"]["precision"] == written["settings"]["precision"]
        model = models.GPT.from_pretrained(out)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        weights[precision] = model.token.weight.detach()
    assert not torch.equal(weights["float32"], weights["bf16"])
    torch.testing.assert_close(weights["float32"], weights["bf16"], rtol=0, atol=0.02)
    assert "--precision fp16 needs a GPU" in refusal("train", "--precision", "fp16", "--out", tmp_path / "half")


@pytest.fixture
def trained(tmp_path: Path, verses: Path) -> Path:
    """The folder of a tiny model of text."""
    options = ["--attention", "additive", "--aggregate", "mean"]
    result = run("train", "--file", verses, "--steps", "2", "--out", tmp_path / "out", *SHAPE, *options)
    assert result.exit_code == 0, result.output
    return tmp_path / "out"


def test_generate_continues_a_prompt(trained: Path) -> None:
    result = run("generate", trained, "--prompt", "so much", "--length", "5")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("so much")
    assert len(result.output) >= len("so much") + 5
    assert run("generate", trained, "--prompt", "so much", "--length", "5").output == result.output
    assert "the character 'X' at position 1 is not among the" in refusal("generate", trained, "--prompt", "sX")
    assert "has no config.json: name a folder" in refusal("generate", trained.parent)
    (trained / "characters.txt").unlink()
    assert "and its GPT has 17 symbols, not 256 bytes" in refusal("generate", trained)


def test_generate_reads_what_save_pretrained_wrote(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models.GPT(256, 8, 2, 1, context=16).save_pretrained(tmp_path / "bytes")
    result = run("generate", tmp_path / "bytes", "--prompt", "über", "--length", "3")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("über")
    models.GCN(3, 2).save_pretrained(tmp_path / "gcn")
    assert "holds a GCN; only a GPT continues a text" in refusal("generate", tmp_path / "gcn")


def test_generate_reads_a_decoder_of_transformers_over_its_graph(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hf = pytest.importorskip("mpnn.hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=5, max_position_embeddings=32, **sizes))
    hf.use(model, "causal & window(1)")
    model.save_pretrained(tmp_path)
    assert "has no tokenizer" in refusal("generate", tmp_path)
    assert "has no tokenizer" in refusal("compare", "--hf", tmp_path, "--file", __file__, "--out", tmp_path / "out")
    gpt2 = transformers.GPT2Config(vocab_size=5, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    assert "has no tokenizer" in refusal("generate", tmp_path / "gpt2")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    result = run("generate", tmp_path, "--prompt", "to be or", "--length", "4", "--temperature", "0")
    assert result.exit_code == 0, result.output
    expected = model.eval().generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)[0]
    assert result.output.split() == words.decode(expected.tolist()).split()


def test_eval_measures_what_train_reported(trained: Path) -> None:
    written = json.loads((trained / "run.json").read_text())
    result = run("eval", trained)
    assert result.exit_code == 0, result.output
    said = f"loss {written['result']} nats per character on the last tenth of verses.txt; "
    assert re.fullmatch(re.escape(said) + r"\d\.\d{3} by the frequency of characters alone\n", result.output)
    (trained.parent / "verses.txt").write_text("another text of the same alphabet\n" * 40)
    assert "changed since its training: data was verses.txt (" in refusal("eval", trained)
    (trained / "run.json").write_text("{}")
    assert "run.json is damaged or of another version" in refusal("eval", trained)


@pytest.mark.slow
def test_train_on_a_graph_of_one_s_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    y = torch.arange(30) % 3
    np.save(tmp_path / "x.npy", torch.eye(3)[y].numpy())
    (tmp_path / "y.txt").write_text("\n".join(map(str, y.tolist())))
    (tmp_path / "e.csv").write_text("\n".join(f"{i},{i + 3}" for i in range(27)))
    files = ["--features", tmp_path / "x.npy", "--labels", tmp_path / "y.txt"]
    edges = ["--edges", tmp_path / "e.csv"]
    for model in ("gat", "gatv2", "transformer", "gcn", "gnn", "sage", "gin"):
        options = ["--model", model, "--steps", "40", "--out", tmp_path / model]
        result = run("train", *files, *edges, *options)
        assert result.exit_code == 0, result.output
        assert re.search(r"\b30 +84\b", result.output)  # 30 nodes; 27 links in both directions and 30 self-loops
        written = json.loads((tmp_path / model / "run.json").read_text())["options"]
        assert (written["task"], written["model"], written["dim"]) == ("edges", model, None)
        measured = run("eval", tmp_path / model).output
        assert json.loads((tmp_path / model / "run.json").read_text())["result"] in measured
        assert "on 6 test nodes" in measured
    (tmp_path / "e.csv").write_text("0,1\n")
    assert "changed since its training: data was " in refusal("eval", tmp_path / "gcn")
    (tmp_path / "e.csv").write_text("id,src,dst\n7,0,1\n")
    assert "has 3 columns ('id', 'src', 'dst')" in refusal("train", *files, *edges, "--out", tmp_path / "three")
    named = ["--columns", "src,dst", "--steps", "1", "--out", tmp_path / "three"]
    assert run("train", *files, *edges, *named).exit_code == 0
    assert "on 6 test nodes" in run("eval", tmp_path / "three").output
    options = ["--model", "gnn", "--aggregate", "max", "--graph", "knn(4)", "--steps", "2"]
    assert run("train", *files, *options, "--out", tmp_path / "max").exit_code == 0


def test_train_on_cora(tmp_path: Path) -> None:
    if "cora" not in _here():
        pytest.skip("needs Cora: set MPNN_DATA to the folder that holds planetoid/")
    result = run("train", "--task", "cora", "--steps", "1", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"2,708 +13,264", result.output
    )  # nodes and edges: 10,556 citations, both ways counted, and 2,708 self-loops


def _here() -> set[str]:
    """The datasets that are on this machine."""
    return {name for name in SOURCES if find(name) is not None}


# --------------------------------------------------------------------------------------------------------- measuring


def test_bytes_for_backward_are_those_that_autograd_saves() -> None:
    """x is saved for the weight's gradient and the square for its own; the weight itself does not count."""
    linear, x = torch.nn.Linear(3, 5, bias=False), torch.randn(7, 3)
    assert bytes_for_backward(linear, lambda: (linear(x) ** 2).sum()) == (7 * 3 + 7 * 5) * 4


def test_measuring_a_model_leaves_its_statistics_as_they_were() -> None:
    """Passes in training move the means of batch normalization, and the measured model is then saved."""
    graph, x = graphs.window(2).bind(9), torch.randn(9, 4)
    model = models.GIN(4, 2, graph=graph)
    before = deepcopy(model.state_dict())
    assert bytes_for_backward(model, lambda: model(x).sum()) > 0
    assert backends(model, x)
    assert estimates(model, x)[0] > 0
    for name, value in model.state_dict().items():
        assert value.equal(before[name]), name


def test_the_same_seed_gives_every_graph_the_same_start() -> None:
    corpus = tasks.Corpus.of("text", "hello, world. " * 40, context=8)
    settings = tasks.TextSettings(context=8, dim=8, heads=2, layers=1, batch=2, steps=1)
    first, second = (tasks.TextRun(graph, corpus, settings, seed=3) for graph in ("causal", "strided(2)"))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["graph", "causl & window(4)"], "there is no topology 'causl' (did you mean causal?); there are"),
        (["graph", "edges | window(4)"], "edges is a graph of data, which mpnn train and mpnn compare build"),
        (["explain", "causal", "--n", "-3"], "--n must be at least 0; got -3"),
        (["graph", "complete", "--num-src", "-3"], "--num-src must be at least 0; got -3"),
        (["graph", "grid(3, 4)", "--n", "10"], "use --n 12"),
        (["graph", "causal & "], "cannot read"),
        (["graph", "__import__('os')"], "__import__"),
        (["graph", "causal", "--n", "-3"], "--n must be at least 0; got -3"),
        (["graph", "documents([3, 4])", "--n", "8"], "add up to 7, but the graph has 8 nodes"),
        (["graph", "causal", "-o", "no/such/folder/x.png"], "there is no folder no/such/folder"),
        (["train", "--out", "/dev/null/runs"], "cannot read or write /dev/null/runs: Not a directory"),
        (["graph", "causal", "-o", "x.docx"], "pictures are .png, .svg"),
        (["explain", "window(-1)"], "radius must be at least 0; got -1"),
        (["explain", "causal", "--heads", "0"], "--heads must be at least 1 and less than 2**31; got 0"),
        (["explain", "causal", "--heads", "9" * 22], "--heads must be at least 1 and less than 2**31; got 999"),
        (["graph", "window(4, dilaton=2)"], "window takes radius, dilation; got dilaton (did you mean dilation?)"),
        (["graph", "causal and window(4)"], "write & for and, | for or"),
        (["data", "get", "cor"], "there is no dataset 'cor' (did you mean cora?); there are"),
        (["data", "get", "imagenet"], "there is no dataset 'imagenet'"),
        (["demo", "--steps", "0"], "--steps must be at least 1; got 0"),
        (["train", "--graph", "window(4)"], "must not attend to the tokens that it predicts"),
        (["train", "--dim", "10", "--heads", "4"], "4 heads do not divide a width of 10"),
        (["train", "--steps", "0"], "--steps must be more than 0; got 0"),
        (["train", "--context", "1000000"], "a context of 1000000 needs about"),
        (["train", "--file", "nowhere.txt"], "nowhere.txt"),
        (["train", "--task", "digits", "--graph", "knn(5000)"], "k must be less than the number of nodes, 1797"),
        (["train", "--task", "digits", "--graph", "cora"], "there is no topology 'cora'"),
        (["train", "--device", "abacus"], "there is no device 'abacus' here"),
        (["train", "--seed", "9" * 30], "--seed must fit into 64 bits"),
        (["train", "--graph", ""], "--graph is empty"),
        (["train", "--task", "digits", "--file", "my.txt"], "--file does not apply to --task digits, only to"),
        (
            ["train", "--task", "cora", "--context", "32"],
            "--context does not apply to --task cora, only to",
        ),
        (["train", "--dropout", "0.1"], "--dropout does not apply to --task text, only to"),
        (["train", "--task", "digits", "--dropout", "1"], "--dropout must be at least 0 and less than 1; got 1.0"),
        (["train", "--task", "digits", "--dim", "30"], "8 heads do not divide a width of 30"),
        (["train", "--task", "digits", "--model", "sage", "--heads", "2"], "sage has no --heads; choose --model gat,"),
        (["train", "--nodes", "x.csv", "--target", "y", "--directed"], "--directed is about --edges, which is missing"),
        (["predict", "."], "has no run.json: name a folder"),
        (["predict", ".", "-o", "p.npy"], "predictions are a table of text; name it p.csv"),
        (["train", "--task", "text", "--edges", "e.csv"], "--edges does not apply to --task text, only to a graph of"),
        (["train", "--file", "my.txt", "--data", "pydoc"], "--data names another; leave one of them out"),
        (["train", "--dim", str(10**15)], "this does not fit into memory"),
        (["train", "--attention", "degree"], "there is no attention of GPT 'degree'; there are dot, additive, linear"),
        (
            ["train", "--task", "digits", "--attention", "linear"],
            "--attention does not apply to --task digits, only",
        ),
        (["train", "--task", "digits", "--aggregate", "max"], "gat has no --aggregate; choose --model sage, gnn"),
        (["train", "--aggregate", "maximum"], "maximum"),
        (["train", "--edges", "e.csv"], "a graph of your own needs --nodes with --target or"),
        (["train", "--features", "x.npy", "--labels", "y.npy"], "x.npy: No such file or directory"),
        (["eval", "."], "has no run.json: name a folder that mpnn train saved a finished run in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in refusal(*arguments)


@pytest.mark.parametrize("command", [["demo"], ["generate", "."]], ids=" ".join)
def test_a_seed_beyond_64_bits_is_refused_by_its_name(command: list[str]) -> None:
    result = run(*command, "--seed", "9" * 30)
    assert result.exit_code == 2
    assert "--seed" in result.stderr


def test_a_step_that_does_not_fit_into_memory_fails_with_one_sentence(tmp_path: Path) -> None:
    result = run("train", "--batch", str(10**16), "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "this does not fit into memory" in result.stderr
    assert "nothing was saved" in result.stderr


@pytest.mark.parametrize("command", ["demo", "train"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # as for whoever may not write there
    assert f"cannot write into {tmp_path}: permission denied" in refusal(command, "--out", tmp_path)


@pytest.mark.parametrize("command", ["demo", "train"])
def test_without_accelerate_a_sentence_says_how_to_get_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "find_spec", lambda name: None)
    said = refusal(command, "--out", tmp_path / "out")
    assert said == f"mpnn: training needs accelerate, which is not installed; run: {install('train')}\n"
    assert not (tmp_path / "out").exists()


def test_text_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.txt").write_bytes(b"abc\xff")
    assert "not UTF-8 text" in refusal("train", "--file", tmp_path / "noise.txt", "--out", tmp_path)


def test_missing_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPNN_DATA", str(tmp_path))
    monkeypatch.setenv("MPNN_CACHE", str(tmp_path))
    assert "unpack dataset/MUTAG/MUTAG.txt" in refusal("data", "get", "MUTAG")


def test_without_the_extra_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match="2"):
        mpnn.cli.main()
    assert capsys.readouterr().err == f"the mpnn command needs typer; run: {install('cli')}\n"


@pytest.mark.parametrize(
    ("encoding", "arguments"),
    [
        ("ascii", ["graph", "causal", "--n", "8"]),
        pytest.param("ascii", ["explain", "causal", "--n", "64"], marks=pytest.mark.slow),
        pytest.param("ascii", ["-h"], marks=pytest.mark.slow),
        pytest.param("latin-1", ["graph", "causal", "--n", "8"], marks=pytest.mark.slow),
    ],
)
def test_a_terminal_without_block_characters_gets_ascii(encoding: str, arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-m", "mpnn", *arguments], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode(encoding)
    text = done.stdout.decode(encoding)
    assert "?" not in text.replace("?name", ""), text
    if arguments[0] == "graph":
        assert "|####" in text


def test_version() -> None:
    assert re.fullmatch(r"mpnn \d+\.\d+\.\d+\n", run("--version").output)


def test_tune_keeps_prices_for_these_threads_and_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mpnn.engine.tune.SECONDS", 0.0)
    result = run("tune", "--threads", "1")
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "cache").iterdir()
    assert str(file) in result.output
    assert "csr" in file.read_text()
    assert run("tune", "--threads", "1", "--forget").exit_code == 0
    assert not list((tmp_path / "cache").iterdir())


def test_tune_refuses_a_folder_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MPNN_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("mpnn.engine.tune.SECONDS", 0.0)
    assert "MPNN_CACHE" in refusal("tune", "--threads", "1")
    assert "--threads must be 0 to" in refusal("tune", "--threads", "-1")


OWN = """
import numpy as np
from mpnn import Topology, graphs

@graphs.register
def {name}(size: int) -> Topology:
    return Topology.of(_{name}, size)

def _{name}(i, num_src, size):
    return [(np.maximum(i - i % size, 0), i + 1)]
"""


@pytest.mark.slow
def test_a_topology_of_one_s_own_is_imported(tmp_path: Path, verses: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every command that reads an expression or a model that has one, as the same edges."""
    monkeypatch.setattr(sys.modules["mpnn.graphs.parse"], "_REGISTERED", {})
    file, name = tmp_path / "my_graphs.py", "cells"
    file.write_text(OWN.format(name=name))
    imported = ["--import", file]
    drawn = run("graph", "cells(4)", "--n", "8", *imported)
    assert drawn.exit_code == 0, drawn.output
    assert re.search(r"edges +20\b", drawn.output), "two triangles of 4 rows"
    assert run("explain", "cells(4)", *imported).exit_code == 0
    out, sizes = tmp_path / "out", ["--context", "16", "--dim", "8", "--heads", "1", "--layers", "1", "--batch", "4"]
    trained = run("train", "--file", verses, "--graph", "cells(4)", "--steps", "2", "--out", out, *sizes, *imported)
    assert trained.exit_code == 0, trained.output
    assert "import my_graphs" in trained.output
    assert run("eval", out, *imported).exit_code == 0
    assert run("generate", out, "--length", "3", *imported).exit_code == 0
    compared = ["--graphs", "cells(2..4)", "--budget", "2s", "--seeds", "1", "--out", tmp_path / "compared"]
    result = run("compare", "--file", verses, *compared, *sizes, *imported)
    assert result.exit_code == 0, result.output
    (command,) = re.findall(r"^ +mpnn (train .*)", result.output, re.M)
    assert re.search(r'--graph "cells\([24]\)" .*--lr \S+', command)
    assert f"--import {file}" in command


def test_what_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("from mpnn import graphs\n\ngraphs.windo(3)\n")
    assert f"--import {file}: line 3 raises AttributeError" in refusal("graph", "causal", "--import", file)
    file.write_text("x = (\n")
    said = refusal("graph", "causal", "--import", file)
    assert f"--import {file}: SyntaxError: '(' was never closed (broken.py, line 1)" in said
    missing = tmp_path / "missing.py"
    assert f"got {missing}, which does not exist" in refusal("graph", "causal", "--import", missing)
    file = tmp_path / "graphs.txt"
    file.write_text("")
    assert f"--import takes a Python file (.py); got {file}" in refusal("graph", "causal", "--import", file)


def test_options_of_completion_are_those_of_mpnn_alone() -> None:
    assert "--install-completion" in run("--help").output
    assert not [name for name in commands.COMMANDS if "--install-completion" in run(name, "--help").output]


@pytest.mark.slow
def test_shells_complete_the_commands() -> None:
    environment = os.environ | {"_MPNN_COMPLETE": "complete_bash", "COMP_WORDS": "mpnn exp", "COMP_CWORD": "1"}
    command = Path(sys.executable).with_name("mpnn")
    if not command.exists():
        pytest.skip("the package is not installed here")
    done = subprocess.run([command], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["explain"]


# ------------------------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("command", sorted(commands.COMMANDS))
def test_help_has_no_types_of_flags_and_no_breaks_inside_sentences(command: str) -> None:
    context = load(command).make_context(command, [], resilient_parsing=True)
    output = run(command, "--help").output
    assert "<bool>" not in output
    assert "9223372036854775808" not in output
    for part in (context.command.help or "").split("\n\n"):
        assert "\n" not in part or "\b" in part or "\n  " in part, part


def test_paragraphs_fill_the_terminal_and_examples_stay() -> None:
    text = "One\n    line.\n\n    Two\n    lines.\n\n    Examples:\n    \b\n      mpnn a\n      mpnn b"
    assert paragraphs(text) == "One line.\n\nTwo lines.\n\n\b\nExamples:\n  mpnn a\n  mpnn b"


def test_view_says_that_there_is_no_folder_before_it_asks_a_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpnn.cli.view._page_of_model", lambda *_: pytest.fail("it asks"))
    (tmp_path / "models").mkdir()
    for name in ("runs/none", "./none", "models/none"):
        assert f"there is no folder {name}" in refusal("view", name)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_that_torch_does_not_take_is_refused(seed: int) -> None:
    assert "--seed must be from -2**63 to 2**63 - 1" in refusal("demo", "--seed", str(seed))


def test_one_graph_is_no_comparison(tmp_path: Path) -> None:
    assert "one is not a comparison" in refusal("compare", "--graphs", "causal", "--out", str(tmp_path / "out"))


def test_view_says_that_a_folder_holds_no_finished_run(tmp_path: Path) -> None:
    assert f"{tmp_path} has no run.json: name a folder" in refusal("view", str(tmp_path))
    (tmp_path / "checkpoint.pt").touch()
    assert "holds a run that has not finished: mpnn train continues it with --resume" in refusal("view", str(tmp_path))
