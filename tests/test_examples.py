"""Every example runs by itself, as a reader would run it, with settings small enough for a test."""

import json
from pathlib import Path

import forked
import pytest
from real_data import real

from mpnn.data import locate

EXAMPLES = Path(__file__).parents[1] / "examples"

# file: arguments, and words that its output must have
RUNS: dict[str, tuple[str, list[str]]] = {
    "semantic_search.py": (
        "--limit 20 --top 2 --windows 4",
        ["20 sentences", "largest difference to Hugging Face", "How do I leave a loop early?", "window(4)", "100%"],
    ),
    "char_lm.py": (
        "--seeds 1 --steps 3 --context 32 --dim 16",
        ["GPT over causal: ", "nats a character (1 seeds; ", "equal time", "causal & window(16)", "408", "reach"],
    ),
    "images.py": (
        "--seeds 1 --steps 2",
        ["digits, ViT: ", "% test accuracy (1 seeds; ", "ViT over neighbors", "Swin", "convolution"],
    ),
    "images_few_labels.py": (
        "--seeds 1 --steps 2",
        ["digits, 5 labels a class, ViT from scratch: ", "MAE, then ViT: ", "% test accuracy (1 seeds; "],
    ),
    "listops.py": (
        "--seeds 1 --steps 2 --longest 24 --count 90",
        ["ListOps, at most 24 tokens, Linformer: ", "published 36.37 at 2,000 tokens", "Performer", "BigBird"],
    ),
    "long_documents.py": (
        "--lengths 64 --seeds 1 --steps 2",
        ["64 bytes of manual, GPT over causal & bigbird(64): ", "nats a byte (1 seeds; ", "2,080", "saved MB"],
    ),
    "masked_lm.py": (
        "--seeds 1 --steps 2",
        ["passages, ", "BERT from scratch: ", "RoBERTa's objective, then BERT: ", "% test accuracy (1 seeds; "],
    ),
    "recommendation.py": (
        "--seeds 1 --steps 2",
        [
            "ratings of MovieLens 100k, LightGCN: ",
            "nDCG at 10 (1 seeds; published 0.420",
            "factors",
            "popularity: 0.252",
        ],
    ),
    "knowledge_graph.py": (
        "--data umls --seeds 1 --steps 2",
        ["triples of UMLS, R-GCN, ComplEx: ", "MRR (1 seeds; published 0.94 for ConvE)", "DistMult"],
    ),
    "links_from_files.py": (
        "--seeds 1 --steps 2",
        [
            "links from files: MovieLens 100k at random, LightGCN: ",
            "links from files: MovieLens 100k by time, popularity: 0.82",
            "links from files: UMLS, R-GCN: ",
            "MRR (1 seeds; published 0.94 for ConvE)",
            "DistMult",
            "popularity: 0.661",
        ],
    ),
    "tsp_reinforce.py": (
        "--steps 2 --instances 3 --dim 16",
        ["mean length of greedy tours", "% over optimal, greedy (1 seeds; published 0.34)"],
    ),
    "waves.py": (
        "--steps 2 --ponds 2 --spacing 0.2",
        ["persistence: error ", "MeshGraphNet: error ", "% after 1 step, ", "GNN: error ", "waves.webp"],
    ),
    "lennard_jones.py": (
        "--steps 2 --states 40 --moves 3",
        ["PaiNN: force error ", "SchNet: force error ", "3 steps of dynamics", "total energy varies by"],
    ),
    "equivariant.py": (
        "--steps 1 --states 40",
        ["force error on new clusters 3", "states turn with it to", "forces to"],
    ),
    "arrival_times.py": (
        "--trips 40 --epochs 1",
        ["three new days", "times at free speed", "a linear model of each segment", "ArrivalTimes"],
    ),
    "packed_documents.py": (
        "--steps 2 --context 300",
        ["300 packed tokens", "transformers, sdpa", "causal() & window(256)"],
    ),
    "rollouts.py": (
        "--steps 1 --prompt 9 --answers 3 --length 4",
        ["GRPO, 1 steps: mean reward", "DPO, 1 steps: loss 0.693", "separate texts", "one tree"],
    ),
    "speculative.py": (
        "--train 2 --tokens 12",
        ["a tree of drafts, [3, 2, 1, 1]: 12 tokens in ", "passes of the large model, the same tokens as greedy"],
    ),
    "longer_encoder.py": (
        "--steps 1 --context 600",
        ["MiniLM on 600 tokens", "transformers, sdpa", "longformer(256, globals=1)"],
    ),
    "second_derivatives.py": ("--steps 2", ["forces     error on new", "adaptation loss at unseen", "influence  corr"]),
    "custom_aggregator.py": ("--epochs 2", ["one in five broken", "trimmed mean (a function)"]),
    "depth_and_diameter.py": (
        "--steps 3 --deepest 1",
        ["path: window(1), diameter 10: ", "hub: global_nodes(1), diameter 2", "trained and predicted"],
    ),
    "chosen_edges.py": ("--steps 2", ["all tokens before, 144 edges: ", "chosen blocks of 4, 16 edges: "]),
    "claims.py": (
        "--steps 2 --lengths 32 64 --passages 160",
        [
            "attention, distance 50: ",
            "GIN: 0",
            "right in both: 7",
            "random weights: ",
            "random walks: 0.25",
            "identity: river, money: 1",
            "LSTM, N = 64: ",
        ],
    ),
    "claims_trained.py": (
        "--steps 2",
        ["h^T W h: ", "one-hot, N = 48: ", "LSTM, nats: ", "states of edges: ", "ring of 2: path length: 4.267"],
    ),
    "heads_as_hedge.py": (
        "--seeds 1 --steps 2",
        ["usual initialization, sum, by heads: 1: ", "bad initialization, PNA, by heads: 1: "],
    ),
    "longer_than_trained.py": (
        "--seeds 1 --steps 2 --kinds T5 learned",
        ["T5: ", "learned: ", " at 1 to 8 lengths; 1 seeds"],
    ),
    "recall.py": (
        "--steps 2",
        [
            "each key is named once, softmax over a window, by numbers in the state: 512: ",
            "keys are named twice, gated",
        ],
    ),
    "sparse_or_dense.py": (
        "--nodes 128 --seconds 0",
        ["128 nodes, window: faster than dense ", "power law", "the plan chose the fastest in "],
    ),
    "trained_attention.py": (
        "--passages 2",
        [
            "2 passages of ",
            "80% of the attention is on",
            "complete (edges, cosine, same in the first 3): 100% 1.00 100%",
        ],
    ),
    "custom_topology.py": ("--steps 2", ["#.......#....########...", "2,080", "51%"]),
    "pyg_one_line.py": (
        "--nodes 200 --steps 1",
        ["convs.0 (GATConv): replaced", "200 nodes", "times as fast", "largest difference"],
    ),
    "explain_plan.py": (
        "--longest 1024",
        ["bigbird(), 1,024 nodes", "chosen", "backend 'dense' cannot run this: it does not compute additive scores"],
    ),
    "depth_and_smoothing.py": (
        "--depths 2 --epochs 1",
        ["GCN, accuracy and energy by layers: 2: ", "MAGNA", "Graph-BERT", "GPS", "depth_and_smoothing.png"],
    ),
    "graph_classification.py": (
        "--data MUTAG --seeds 1 --steps 2",
        ["MUTAG, GIN: ", "(1 seeds; published 89.4 ± 5.6)", "PNA", "Graphormer"],
    ),
    "events.py": (
        "--seeds 1 --steps 1",
        ["generated events, TGN: ", "TGAT", "embeddings", "popularity", "group of the last event"],
    ),
    "links.py": (
        "--seeds 1 --steps 2",
        ["links of Cora, GAE: ", "AUC (1 seeds; published 0.910", "GraphSAGE", "popularity"],
    ),
}

PACKAGES = {"equivariant.py": "e3nn"}
DATA = {
    "depth_and_smoothing.py": "cora",
    "graph_classification.py": "MUTAG",
    "knowledge_graph.py": "umls",
    "links.py": "cora",
    "links_from_files.py": "movielens-100k",
    "recommendation.py": "movielens-100k",
}

# The default suite runs those that take a few seconds, the slow one all.
QUICK = ("custom_aggregator.py", "explain_plan.py")


@pytest.mark.parametrize(
    "file", [file if file in QUICK else pytest.param(file, marks=pytest.mark.slow) for file in RUNS]
)
def test_runs_by_itself(file, tmp_path):
    if file in DATA:
        real(locate, DATA[file])
    if file in PACKAGES:
        pytest.importorskip(PACKAGES[file])
    runs(file, *RUNS[file], tmp_path)


def runs(file, arguments, words, tmp_path):
    done = run_example(file, arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout


def run_example(file, arguments, tmp_path):
    """In `tmp_path`, because an example must not depend on where it is started."""
    path = str(EXAMPLES.parent)
    return forked.run(EXAMPLES / file, *arguments.split(), folder=tmp_path, PYTHONPATH=path, COLUMNS="120")


def test_links_from_files_on_the_first_rows(tmp_path):
    real(locate, "movielens-100k")
    real(locate, "umls")
    words = ["MovieLens 100k by time, LightGCN: 0.", "UMLS, DistMult: 0.", "UMLS, popularity: 0.233 MRR"]
    arguments = "--data time umls --models LightGCN DistMult popularity --seeds 1 --steps 2 --rows 1000"
    runs("links_from_files.py", arguments, words, tmp_path)


@pytest.mark.slow
def test_cora_runs_by_itself(tmp_path):
    real(locate, "cora")
    words = ["Cora, GCN: ", "% test accuracy (1 seeds; published 83.0 ± 0.7); ", "Graph-BERT", "graph transformer"]
    runs("cora.py", "--seeds 1 --steps 2", words, tmp_path)
    record = json.loads((tmp_path / "results" / "cora-gat.json").read_text())
    assert record["settings"]["epochs"] == record["seeds"]["0"]["steps"] == 2
    assert (tmp_path / "results" / "cora-gat.png").stat().st_size > 5_000
    assert not list((tmp_path / "results").glob("*.pt"))
    # A second seed is added to the record; the first is not trained again.
    words = ["GCN", "(2 seeds; published 81.5)"]
    runs("cora.py", "--models GCN --seeds 2 --steps 2", words, tmp_path)
    done = run_example("cora.py", "--models GCN --seeds 2 --steps 3", tmp_path)
    assert done.returncode == 1
    assert "cora-gcn.json records other settings: epochs was 2 and is 3 now; --force replaces it" in done.stderr


def test_a_demonstration_that_is_killed_goes_on(tmp_path, monkeypatch):
    """Recorded points are not measured again, and a record with other settings is not overwritten."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demonstration

    options = demonstration.parser(None).parse_args(["--out", str(tmp_path)])
    measured = []

    def point(value):
        def measure():
            if value == 3 and not measured[2:]:
                measured.append("killed")
                raise KeyboardInterrupt
            measured.append(value)
            return value

        return measure

    points = {f"point {value}": point(value) for value in (1, 2, 3)}
    with pytest.raises(SystemExit):
        demonstration.measure("x", points, options, {"steps": 5})
    assert demonstration.measure("x", points, options, {"steps": 5}) == {"point 1": 1, "point 2": 2, "point 3": 3}
    assert measured == [1, 2, "killed", 3]
    before = (tmp_path / "x.json").read_text()
    with pytest.raises(SystemExit, match="steps was 5 and is 6 now; --force replaces it"):
        demonstration.measure("x", points, options, {"steps": 6})
    assert (tmp_path / "x.json").read_text() == before


@pytest.mark.slow
def test_translation_runs_by_itself(tmp_path):
    real(locate, "multi30k")
    arguments = "--seeds 1 --steps 2 --limit 40 --longest 12"
    words = [
        "RNN without attention: ",
        "BLEU, test_2016_flickr (1 seeds; published 38 to 41)",
        "window(2)",
        "11-14 words",
    ]
    runs("translation.py", arguments, words, tmp_path)
    assert len(list((tmp_path / "results").glob("*-alignment.png"))) == 6


@pytest.mark.slow
def test_tsp_runs_by_itself(tmp_path):
    real(locate, "tsp")
    words = ["20 instances of 20 cities", "nearest neighbor", "attention, best of 5", "is drawn in tsp.png"]
    runs("tsp.py", "--instances 20 --draws 5", words, tmp_path)
    assert (tmp_path / "tsp.png").stat().st_size > 10_000


def test_a_script_that_diverges_ends_in_one_sentence(tmp_path):
    """And leaves no record: no number is written that was not reached."""
    script = tmp_path / "diverging.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import math, torch\n"
        "from experiment import Outcome, Row, measure, parser\n"
        "from mpnn.train.loop import Settings, fit\n"
        "model = torch.nn.Linear(1, 1)\n"
        "def train(seed, progress, checkpoint):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    fit(model, optimizer, lambda k: model(torch.ones(1)).sum() * math.nan, Settings(3))\n"
        "measure(Row('x', 'task', 'model', '%', 'none', ''), train, parser(None, 1, ['m']).parse_args(), {})\n"
    )
    done = run_example(script, "", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("x, seed 0: the loss of step 1 is nan")
    assert not list(tmp_path.rglob("*.json"))
