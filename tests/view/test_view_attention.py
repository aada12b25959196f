"""What the page keeps of attention weights is what the model computed."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch
from viewer_page import data_of, run, weights_of

import mpnn
from mpnn import graphs
from mpnn.cli.tasks import CHARACTERS
from mpnn.view import attention
from mpnn.view.attention import Recording
from mpnn.view.subject import Tokens

hf = pytest.importorskip("transformers")
N, LAYERS, HEADS = 9, 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with a vocabulary of words."""
    place = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "bank", "by", "the", "river", "##s", "."]
    (place / "vocab.txt").write_text("\n".join(words))
    hf.BertTokenizerFast(str(place / "vocab.txt")).save_pretrained(place)
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 32}
    hf.BertModel(hf.BertConfig(vocab_size=len(words), max_position_embeddings=16, **sizes)).save_pretrained(place)
    return place


def test_a_page_of_a_model_has_the_weights_of_transformers(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(folder, "--text", "A bank by the rivers.", "-o", page)
    assert done.exit_code == 0, done.output
    data = data_of(page.read_text())["attention"]
    words = ["[CLS]", "A", "bank", "by", "the", "river", "s", ".", "[SEP]"]
    assert [token.strip() for token in data["subject"]["tokens"]] == words
    assert "".join(data["subject"]["tokens"][1:-1]) == "A bank by the rivers."
    assert data["subject"]["special"] == [0, 8]
    assert str(folder.parent) not in page.read_text(), "no folders of this machine"
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(**tokenizer("A bank by the rivers.", return_tensors="pt"), output_attentions=True).attentions
    own, window = data["graphs"]
    found = weights_of(data, own)
    exact = torch.cat(expected).flatten(0, 1).numpy()
    assert np.abs(np.sqrt(found) - np.sqrt(exact)).max() <= 0.5 / 255 + 1e-6  # roots are rounded to 255ths
    assert own["edges"] == N * N
    assert own["share"] == pytest.approx(1.0)
    assert window["name"] == "window(2)"
    outside = ~graphs.window(2).bind(N).dense().numpy()
    assert (weights_of(data, window)[:, outside] == 0).all()
    assert data_of(page.read_text())["graph"] == {"expression": "window(2)", "n": N, "num_src": None}


def test_a_model_is_shown_over_the_graph_that_it_was_saved_with(folder: Path, tmp_path: Path) -> None:
    model = hf.AutoModel.from_pretrained(folder)
    pytest.importorskip("mpnn.hf").use(model, "window(1)")
    model.save_pretrained(tmp_path / "bert")
    hf.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "bert")
    page = tmp_path / "page.html"
    assert run(tmp_path / "bert", "--text", "A bank by the rivers.", "-o", page).exit_code == 0
    own = data_of(page.read_text())["attention"]["graphs"][0]
    assert (own["name"], own["edges"]) == ("its own graph", 3 * N - 2)


def test_a_run_of_mpnn_train(tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    model = mpnn.models.GPT(6, 8, 2, 2, graphs.causal(), context=12)
    model.save_pretrained(folder)
    (folder / CHARACTERS).write_text("abc de")
    assert run(folder, "--text", "a bad ace", "-o", page).exit_code == 0
    data = data_of(page.read_text())["attention"]
    assert "".join(data["subject"]["tokens"]) == "a bad ace"
    assert [graph["name"] for graph in data["graphs"]] == ["causal()", "causal & window(2)"]
    refused = run(folder, "--text", "xyz", "-o", tmp_path / "other.html")
    assert refused.exit_code == 2
    assert "'x' at position 0" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--n", "8"), "--n and --num-src are for expressions"),
        (("--graph", "causal", "--graph", "complete", "--graph", "identity"), "up to two graphs side by side; got 3"),
        (("--graph", "cousal"), "did you mean causal"),
        (("--text", "a " * 40), "takes at most 16 tokens; the text has 42"),
    ],
    ids=str,
)
def test_refusals(folder: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = run(folder, *arguments, "-o", tmp_path / "page.html")
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_name_without_a_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name} is not there\nand more")

    monkeypatch.setattr(hf.AutoModel, "from_pretrained", load)
    done = run("no/such-model", "-o", tmp_path / "page.html")
    assert done.exit_code == 2
    assert done.stderr.startswith("mpnn: no/such-model is no expression, no folder of a model, and no name")
    assert done.stderr.endswith("no/such-model is not there\n")


def test_long_texts_keep_the_strongest_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BUDGET", 60 * 2 * 3 * 5)
    graph = graphs.window(10).bind(60)
    torch.manual_seed(0)
    weights = torch.rand(graph.num_edges, 2)
    recording = Recording("window(10)", 60, 1)
    recording.add(graph, weights)
    data = attention.attention(Tokens(["x"] * 60), [recording])
    (kept,) = data["graphs"]
    assert kept["top"] == 5
    full = torch.zeros(60, 60, 2)
    src, dst = graph.edge_index
    full[dst, src] = weights
    strongest = full.topk(5, dim=1)
    expected = torch.zeros_like(full).scatter(1, strongest.indices, strongest.values)
    found = weights_of(data, kept).transpose(1, 2, 0)
    assert np.abs(np.sqrt(found) - np.sqrt(expected.numpy())).max() <= 0.5 / 255 + 1e-6
    assert kept["share"] == pytest.approx(float(expected.sum() / full.sum()), rel=1e-5)


def test_thumbnails_are_means_of_cells() -> None:
    n = 100
    graph = graphs.complete().bind(n)
    torch.manual_seed(1)
    weights = torch.rand(n * n, 1)
    recording = Recording("complete", n, 1)
    recording.add(graph, weights)
    side = attention.cells(n)
    shown = np.frombuffer(b64decode(recording.data()["thumbnails"]), np.uint8).reshape(side, side)
    cell = np.arange(n) * side // n
    means = np.array(
        [[weights.view(n, n)[np.ix_(cell == a, cell == b)].mean() for b in range(side)] for a in range(side)]
    )
    assert np.abs(shown - 255 * np.sqrt(means / means.max())).max() <= 0.5 + 1e-3


def test_layers_that_do_not_fit_are_refused() -> None:
    recording = Recording("x", 4, 2)
    with pytest.raises(ValueError, match="layer 0 attends from 3 to 5 nodes, but the page shows 4"):
        recording.add(graphs.complete().bind(3, 5), torch.ones(15, 2))
    with pytest.raises(ValueError, match=r"layer 0 has weights \[3, 16, 2\] for 16 edges"):
        recording.add(graphs.complete().bind(4), torch.ones(3, 16, 2))
    recording.add(graphs.complete().bind(4), torch.ones(16, 2) / 4)
    with pytest.raises(ValueError, match="1 of 2 layers gave attention weights"):
        recording.data()


def test_layers_may_have_other_numbers_of_heads_but_graphs_may_not() -> None:
    """As in a GAT: eight heads, then one."""
    graph = graphs.window(1).bind(3)
    recording, other = Recording("x", 3, 2), Recording("y", 3, 2)
    for heads in (2, 1):
        recording.add(graph, torch.rand(graph.num_edges, heads))
        other.add(graph, torch.rand(graph.num_edges, 2))
    data = attention.attention(Tokens("abc"), [recording])
    assert data["heads"] == [2, 1]
    assert len(b64decode(data["graphs"][0]["weights"])) == 3 * 3 * 3  # heads, nodes, sources
    with pytest.raises(ValueError, match=r"\[2, 1\] heads over one graph and \[2, 2\] over another"):
        attention.attention(Tokens("abc"), [recording, other])


def test_nodes_are_shown_in_the_order_that_is_asked_for() -> None:
    """Edges of other nodes are left out."""
    graph = graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    recording = Recording("ring", 3, 1, order=np.array([3, 2, 0]))
    src, _ = graph.edge_index
    recording.add(graph, (src[:, None] + 1) / 4)
    data = attention.attention(Tokens("xyz"), [recording])
    weights = weights_of(data, data["graphs"][0])[0]
    assert data["graphs"][0]["edges"] == 2
    assert weights[0, 1] == pytest.approx(3 / 4, abs=0.01)  # node 3 attends to node 2
    assert weights[2, 0] == pytest.approx(1, abs=0.01)  # node 0 to node 3
    assert (weights > 0).sum() == 2


def test_plans_have_estimates_or_reasons_and_sizes() -> None:
    from mpnn.view.topology import plan_data

    data = json.loads(json.dumps(plan_data(graphs.parse("causal & window(16)"), 64), allow_nan=False))
    assert all((one["seconds"] is None) == (one["reason"] is not None) for one in data["candidates"])
    assert data["backend"] == data["candidates"][0]["name"]
    assert [size["n"] for size in data["sizes"]] == sorted(size["n"] for size in data["sizes"])
    assert len(data["sizes"]) > 5
    assert plan_data(graphs.grid(4, 4), 16)["sizes"] == []
