"""`mpnn demo`: trains one model over three graphs and a GAT on digits, and writes a page with the results."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer

from mpnn.cli import page, pictures, tasks
from mpnn.cli.console import console, exit_on_failure, exit_on_invalid_input, fail, folder, refuse, warn
from mpnn.cli.measure import attention_weights, machine, one_thread, versions
from mpnn.cli.page import Chapter, Picture
from mpnn.cli.stop import Stopped
from mpnn.cli.tasks import Corpus, NodeRun, Nodes, Run, TextRun, TextSettings, Trained
from mpnn.files import write_atomically
from mpnn.models import GPT
from mpnn.train.checkpoint import Checkpoint, CheckpointError
from mpnn.train.loop import TrainingDiverged, require_accelerate

TOPOLOGIES = {
    "causal": "Each character attends to itself and to all characters before it, as in GPT.",
    "causal & window(8)": (
        "Each character attends to itself and to the eight characters before it: a sliding window. Information travels "
        "eight characters per layer, so with two layers at most sixteen."
    ),
    "strided(8)": (
        "Each character attends to the last eight characters, itself included, and to every eighth character before "
        "them (Sparse Transformer). There are far fewer edges than in the causal graph, but two layers still carry "
        "information from each character to all later ones."
    ),
}
SELF_LOOPS_ONLY = "identity"
EPOCHS = 100
PROMPT = "If the "
SAMPLE = 280


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures and the page.", file_okay=False)] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="Training steps of each character model.")] = TextSettings().steps,
    seed: Annotated[int, typer.Option(help="Random seed of weights and batches.")] = 0,
) -> None:
    """Train one character model over three graphs and a GAT on digits, and draw what they learned.

    The demo downloads nothing: the text is Python's manual, and the digits
    are part of scikit-learn. It takes two minutes on two cores, prints a
    table, and writes pictures and a page that shows them, index.html. After
    Ctrl-C or a crash, the same command continues from its last checkpoint.
    \b
    Examples:
      mpnn demo
      mpnn demo --steps 100 --out /tmp/quick
    """
    start = perf_counter()
    with exit_on_invalid_input():
        require_accelerate()
    if steps < 1:
        refuse(f"--steps must be at least 1; got {steps}")
    settings = replace(TextSettings(), steps=steps)
    with folder(out):
        with exit_on_invalid_input():
            corpus = Corpus.of("text", tasks.manual(), settings.context)
            nodes = Nodes.digits()
        checkpoints = [Checkpoint(out / f"checkpoint-{k}.pt") for k in range(len(TOPOLOGIES) + 2)]
        with one_thread():
            results = _train(corpus, nodes, settings, seed, checkpoints)
            texts, with_graph = results[:-2], results[-2]
            with console.status("drawing"), exit_on_failure():
                chapters = [_chapter(trained, corpus, out, seed) for trained in texts]
                curves = _curves(texts, out)
                digits = _digits(with_graph, nodes, out)
            where = machine()
        index = out / "index.html"
        footer = [
            ("command", shlex.join(["mpnn", *sys.argv[1:]])),
            ("machine", where),
            ("versions", versions()),
            ("time", f"{perf_counter() - start:.0f} s in all, {steps} steps, seed {seed}"),
        ]
        html = _page(results, chapters, curves, digits, settings, footer)
        with exit_on_failure():
            write_atomically(index, lambda path: path.write_text(html, encoding="utf-8"))
            for checkpoint in checkpoints:
                checkpoint.delete()
    console.print("", tasks.table(results), "", tasks.legend(), "", sep="\n")
    console.print(f"see {index}, written after {perf_counter() - start:.0f} s", soft_wrap=True)


def _train(
    corpus: Corpus, nodes: Nodes, settings: TextSettings, seed: int, checkpoints: list[Checkpoint]
) -> list[Trained]:
    """Trains all runs, or resumes them from their checkpoints. Checkpoints with other settings are deleted."""
    runs: list[Run] = [TextRun(name, corpus, settings, seed) for name in TOPOLOGIES]
    runs += [NodeRun(name, nodes, min(EPOCHS, settings.steps), seed) for name in (nodes.own_graph, SELF_LOOPS_ONLY)]
    for run, checkpoint in zip(runs, checkpoints, strict=True):
        checkpoint.run = run.settings
    try:
        with exit_on_failure():
            return tasks.train_all(runs, checkpoints)
    except CheckpointError:
        for checkpoint in checkpoints:
            checkpoint.delete()
        return _train(corpus, nodes, settings, seed, checkpoints)
    except TrainingDiverged as error:
        fail(str(error))
    except Stopped as stop:
        warn("stopped; the same command continues the demo")
        raise typer.Exit(stop.exit_code) from None


def _chapter(trained: Trained, corpus: Corpus, out: Path, seed: int) -> Chapter:
    model = trained.model
    assert isinstance(model, GPT)
    file = "".join(c if c.isalnum() else "-" for c in trained.expression).strip("-").replace("---", "-")
    crop = corpus.val[: model.context][None]
    weights = [of_layer[0] for of_layer in attention_weights(model, crop)]
    pictures.topology(trained, out / f"{file}.png")
    pictures.heads(trained, weights, out / f"{file}-attention.png")
    sample = _sample(model, corpus, seed)
    edges = Picture(
        out / f"{file}.png",
        f"Adjacency of {trained.expression}",
        f"The graph over {model.context} characters: a row is a destination, a column a source, a cell an edge.",
    )
    attention = Picture(
        out / f"{file}-attention.png",
        f"Attention over {trained.expression} after training",
        f"Attention weights of these edges after training, on {model.context} characters of the validation text: the "
        "darker a cell, the larger its weight. The weights of each row add up to one; grey pairs are not edges.",
    )
    return Chapter(trained.expression, TOPOLOGIES[trained.expression], [edges, attention], PROMPT, sample)


def _sample(model: GPT, corpus: Corpus, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    prompt = corpus.characters.encode(PROMPT)[None]
    tokens = model.generate(prompt, SAMPLE, temperature=0.6, generator=generator)
    return corpus.characters.decode(tokens[0])[len(PROMPT) :].rstrip()


def _curves(texts: list[Trained], out: Path) -> Picture:
    pictures.losses(texts, out / "learning-curves.png")
    return Picture(
        out / "learning-curves.png",
        "Validation loss over the training steps",
        "Loss on the last tenth of the text, which is not used for training, in nats per character: lower is better. "
        "All three models start with the same weights and use the same batches.",
    )


def _digits(trained: Trained, nodes: Nodes, out: Path) -> list[Picture]:
    images, graph = nodes.data, trained.graph
    trained.model.eval()
    with torch.no_grad():
        predicted = trained.model(images.x, graph).argmax(1)
    weights = attention_weights(trained.model, images.x, graph)[0].mean(1)
    test_nodes = images.test_mask.nonzero().squeeze(1)
    examples = [int(test_nodes[images.y[test_nodes] == digit][0]) for digit in (3, 5, 8, 9)]
    pictures.points(graph, images.x, predicted, out / "digits-graph.png")
    pictures.neighbours(graph, weights, images.x, images.y, examples, out / "digits-attention.png")
    return [
        Picture(
            out / "digits-graph.png",
            "The nearest-neighbour graph of the digits",
            "Each dot is an image, coloured by the digit that the GAT predicts, with edges from its in-neighbors: "
            f"{graph.num_edges:,} edges, computed from distances between pixels only. The layout is force-directed.",
        ),
        Picture(
            out / "digits-attention.png",
            "Four test images with the neighbours they attend to",
            "Four test images (left) and their neighbours in the order of attention weight in the GAT's first layer "
            "(mean over heads). Names are the true digits.",
        ),
    ]


def _page(
    results: list[Trained],
    chapters: list[Chapter],
    curves: Picture,
    digits: list[Picture],
    settings: TextSettings,
    footer: list[tuple[str, str]],
) -> str:
    with_graph, without_graph = (result.result for result in results[-2:])
    parts = [
        page.paragraph(
            "A network layer is one round of message passing over a graph, and the choice of graph is the choice of "
            "model. Below, one small character model was trained three times on Python's manual (without its tables); "
            "the runs differ only in the graph, which defines which characters attend to which. Then a graph attention "
            "network was trained on handwritten digits, over a graph of nearest neighbours and, for comparison, over a "
            "graph of self-loops only."
        ),
        page.table(tasks.HEADINGS, [result.row for result in results]),
        page.legend(tasks.LEGEND),
        "<h2>Text: one model, three graphs</h2>",
        page.paragraph(
            f"A transformer of {settings.layers} layers, {settings.heads} heads and width {settings.dim} reads "
            f"{settings.context} characters at a time and learns to predict the next one. The samples below were "
            f"generated after {settings.steps} steps; the prompt is bold."
        ),
        *(chapter.html() for chapter in chapters),
        "<h3>Learning curves</h3>",
        page.narrow(curves),
        "<h2>Digits: attention to neighbours</h2>",
        page.paragraph(
            f"200 of the 1,797 images are labelled. With edges from neighbours, the GAT classifies {with_graph} "
            f"of the test images correctly; with self-loops only, {without_graph}."
        ),
        *(page.narrow(picture) for picture in digits),
    ]
    return page.page("One model, three graphs", parts, footer)
