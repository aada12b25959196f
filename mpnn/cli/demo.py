"""`mpnn demo`: one model over three graphs, a graph network on digits, and a page that shows what came of it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer

from mpnn.checkpoint import Checkpoint, CheckpointError
from mpnn.cli import page, pictures, tasks
from mpnn.cli.console import console, fail, failing, folder, refuse, refusing, warn
from mpnn.cli.measure import attention_weights, machine, one_thread, versions
from mpnn.cli.page import Chapter, Picture
from mpnn.cli.stop import Stopped
from mpnn.cli.tasks import Corpus, NodeRun, Nodes, Run, TextRun, TextSettings, Trained
from mpnn.files import write_atomically
from mpnn.models import GPT
from mpnn.train import TrainingDiverged

TOPOLOGIES = {
    "causal": "Every character hears itself and all that came before it: GPT.",
    "causal & window(8)": (
        "Every character hears itself and the eight before it: a sliding window. News travels eight characters a "
        "layer, so two layers hear no further back than sixteen."
    ),
    "strided(8)": (
        "Every character hears the last eight, itself among them, and every eighth one before those (the Sparse "
        "Transformer). Far fewer edges than causal, and still two layers carry news from each character to all later "
        "ones."
    ),
}
ALONE = "identity"
EPOCHS = 100
PROMPT = "If the "
SAMPLE = 280


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures and the page.", file_okay=False)] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="Training steps of each character model.")] = TextSettings().steps,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
) -> None:
    """Train one character model over three graphs and a GAT on digits, and draw what they learned.

    Nothing to download: the text is Python's own manual, the digits come with scikit-learn. Two minutes on two cores.
    Prints a table, and writes every picture and a page that shows them, index.html. After Ctrl-C or a crash the same
    command continues where it was.
    \b
    Examples:
      mpnn demo
      mpnn demo --steps 100 --out /tmp/quick
    """
    began = perf_counter()
    if steps < 1:
        refuse(f"--steps must be at least 1; got {steps}")
    settings = replace(TextSettings(), steps=steps)
    with folder(out):
        with refusing():
            corpus = Corpus.of("text", tasks.manual(), settings.context)
            nodes = Nodes.digits()
        checkpoints = [Checkpoint(out / f"checkpoint-{k}.pt") for k in range(len(TOPOLOGIES) + 2)]
        with one_thread():
            results = _train(corpus, nodes, settings, seed, checkpoints)
            texts, with_graph = results[:-2], results[-2]
            with console.status("drawing"), failing():
                chapters = [_chapter(trained, corpus, out, seed) for trained in texts]
                curves = _curves(texts, out)
                digits = _digits(with_graph, nodes, out)
            where = machine()
        index = out / "index.html"
        footer = [
            ("command", shlex.join(["mpnn", *sys.argv[1:]])),
            ("machine", where),
            ("versions", versions()),
            ("time", f"{perf_counter() - began:.0f} s in all, {steps} steps, seed {seed}"),
        ]
        html = _page(results, chapters, curves, digits, settings, footer)
        with failing():
            write_atomically(index, lambda path: path.write_text(html, encoding="utf-8"))
            for checkpoint in checkpoints:
                checkpoint.delete()
    console.print("", tasks.table(results), "", tasks.legend(), "", sep="\n")
    console.print(f"see {index}, written after {perf_counter() - began:.0f} s", soft_wrap=True)


def _train(
    corpus: Corpus, nodes: Nodes, settings: TextSettings, seed: int, checkpoints: list[Checkpoint]
) -> list[Trained]:
    """From their checkpoints; those of a demo with other settings are deleted, as nothing in them took long."""
    runs: list[Run] = [TextRun(name, corpus, settings, seed) for name in TOPOLOGIES]
    runs += [NodeRun(name, nodes, min(EPOCHS, settings.steps), seed) for name in (nodes.own_graph, ALONE)]
    for run, checkpoint in zip(runs, checkpoints, strict=True):
        checkpoint.run = run.settings
    try:
        with failing():
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
    written = _sample(model, corpus, seed)
    edges = Picture(
        out / f"{file}.png",
        f"Adjacency of {trained.expression}",
        f"Who hears whom among {model.context} characters: a row is one that hears, a column one that is heard.",
    )
    attention = Picture(
        out / f"{file}-attention.png",
        f"Attention over {trained.expression} after training",
        f"The same edges after training, on {model.context} characters that the model was not trained on: the darker a "
        "cell, the more its row listens to its column. Each row's weights add up to one; grey pairs are no edges.",
    )
    return Chapter(trained.expression, TOPOLOGIES[trained.expression], [edges, attention], PROMPT, written)


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
        "Loss on the last tenth of the text, which no model was trained on, in nats a character: lower is better. All "
        "three began with the same weights and saw the same batches.",
    )


def _digits(trained: Trained, nodes: Nodes, out: Path) -> list[Picture]:
    found, graph = nodes.data, trained.graph
    trained.model.eval()
    with torch.no_grad():
        predicted = trained.model(found.x, graph).argmax(1)
    weights = attention_weights(trained.model, found.x, graph)[0].mean(1)
    tested = found.test_mask.nonzero().squeeze(1)
    examples = [int(tested[found.y[tested] == digit][0]) for digit in (3, 5, 8, 9)]
    pictures.points(graph, found.x, predicted, out / "digits-graph.png")
    pictures.neighbours(graph, weights, found.x, found.y, examples, out / "digits-attention.png")
    return [
        Picture(
            out / "digits-graph.png",
            "The nearest-neighbour graph of the digits",
            "Each dot is an image, coloured by the digit that the GAT takes it for, and tied to the images it hears: "
            f"{graph.num_edges:,} edges, found by distance between pixels alone. Dots stand where ties pull them.",
        ),
        Picture(
            out / "digits-attention.png",
            "Four test images with the neighbours they listen to",
            "Four test images (left), and the neighbours that the GAT's first layer listens to, the loudest first, "
            "with the mean weight over its heads. Names are the true digits.",
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
    with_graph, alone = (result.result for result in results[-2:])
    parts = [
        page.paragraph(
            "A network layer is one round of message passing over a graph, and the choice of graph is the choice of "
            "model. Below, one small character model was trained three times on Python's manual (without its tables); "
            "only the graph that says which character hears which differs. Then a graph attention network was trained "
            "on handwritten digits, over a graph of nearest neighbours and, for comparison, with every image hearing "
            "itself alone."
        ),
        page.table(tasks.HEADINGS, [result.row for result in results]),
        page.legend(tasks.LEGEND),
        "<h2>Text: one model, three graphs</h2>",
        page.paragraph(
            f"A transformer of {settings.layers} layers, {settings.heads} heads and width {settings.dim} reads "
            f"{settings.context} characters at a time and learns to tell the next one. After {settings.steps} steps "
            "each has written a few lines of manual; its prompt is set in bold."
        ),
        *(chapter.html() for chapter in chapters),
        "<h3>How fast they learned</h3>",
        page.narrow(curves),
        "<h2>Digits: neighbours worth listening to</h2>",
        page.paragraph(
            "Of 1,797 images 200 carry a label. The GAT hears each image's nearest neighbours and gets "
            f"{with_graph} of those it is tested on right; the same network, with each image hearing itself alone, "
            f"{alone}."
        ),
        *(page.narrow(picture) for picture in digits),
    ]
    return page.page("One model, three graphs", parts, footer)
