"""`mpnn train`: one model, on one task, over one graph of the user's choice."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mpnn import data
from mpnn.cli import pictures, tasks
from mpnn.cli.console import console, folder, refuse, refusing
from mpnn.cli.tasks import Corpus, NodeRun, Nodes, Run, TextRun, TextSettings

_DEFAULT = TextSettings()
_EPOCHS = 200
_TEXT_ONLY = "Text only"


class Task(str, Enum):
    text = "text"
    cora = "cora"
    digits = "digits"


class TextName(str, Enum):
    pydoc = "pydoc"
    tinyshakespeare = "tinyshakespeare"


def train(
    task: Annotated[
        Task, typer.Option(help="A GPT on characters (text), or a GAT on nodes (cora, digits).")
    ] = Task.text,
    expression: Annotated[
        str | None,
        typer.Option(
            "--graph",
            metavar="EXPR",
            help="Who hears whom: a topology as in mpnn graph --help, or cora (its citations) or knn(k) (nearest by "
            "features), both with self-loops. Default: causal, cora or knn(8), as the task is.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help=f"Training steps; for nodes, epochs. Default: {_DEFAULT.steps}; {_EPOCHS}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the pictures and the checkpoint.", file_okay=False)
    ] = Path("runs/train"),
    text: Annotated[TextName, typer.Option("--data", help="Which text.", rich_help_panel=_TEXT_ONLY)] = TextName.pydoc,
    file: Annotated[
        Path | None,
        typer.Option(help="A text file of your own (UTF-8) in its place.", rich_help_panel=_TEXT_ONLY, dir_okay=False),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Characters the model reads at a time.", rich_help_panel=_TEXT_ONLY)
    ] = _DEFAULT.context,
    dim: Annotated[int, typer.Option(help="Width of the model.", rich_help_panel=_TEXT_ONLY)] = _DEFAULT.dim,
    heads: Annotated[int, typer.Option(help="Attention heads; they divide --dim.", rich_help_panel=_TEXT_ONLY)] = (
        _DEFAULT.heads
    ),
    layers: Annotated[int, typer.Option(help="Layers.", rich_help_panel=_TEXT_ONLY)] = _DEFAULT.layers,
    batch: Annotated[int, typer.Option(help="Crops of text in a step.", rich_help_panel=_TEXT_ONLY)] = _DEFAULT.batch,
    lr: Annotated[float, typer.Option(help="Highest learning rate.", rich_help_panel=_TEXT_ONLY)] = _DEFAULT.lr,
) -> None:
    """Train a model over a graph of your choice; print a table, and save curves and a checkpoint.

    Writes graph.png, curves.png and the model, config.json and model.safetensors, as save_pretrained does; of text also
    characters.txt, the model's characters in the order of their numbers.
    \b
    Examples:
      mpnn train --graph "causal & window(16)"
      mpnn train --file novel.txt --context 128 --layers 4 --lr 3e-3
      mpnn train --data tinyshakespeare --graph "strided(16)" --context 256
      mpnn train --task cora
      mpnn train --task digits --graph identity
    """
    settings = TextSettings(context, dim, heads, layers, batch, lr, _DEFAULT.steps if steps is None else steps)
    epochs = _EPOCHS if steps is None else steps
    for name, given in {**asdict(settings), "steps": epochs}.items():
        if given <= 0:
            refuse(f"--{name} must be more than 0; got {given}")
    folder(out)
    with refusing():
        run: Run
        if task is Task.text:
            corpus = _corpus(text, file, context)
            run = TextRun(expression or "causal", corpus, settings, seed)
        else:
            nodes = Nodes.cora() if task is Task.cora else Nodes.digits()
            run = NodeRun(expression or nodes.own_graph, nodes, epochs, seed)
    trained = tasks.train_all([run])[0]
    console.print("", tasks.table([trained]), "", tasks.legend(), "", sep="\n")
    pictures.topology(trained, out / "graph.png")
    pictures.losses([trained], out / "curves.png")
    trained.model.save_pretrained(out)
    if task is Task.text:
        (out / "characters.txt").write_text(corpus.characters.symbols, encoding="utf-8", newline="")
    console.print(f"saved graph.png, curves.png and the model in {out}; read it again in Python:", soft_wrap=True)
    console.print(f"  mpnn.models.{type(trained.model).__name__}.from_pretrained({str(out)!r})", soft_wrap=True)


def _corpus(text: TextName, file: Path | None, context: int) -> Corpus:
    if file is not None:
        try:
            return Corpus.of(file.name, file.read_text(encoding="utf-8"), context)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    found = tasks.manual() if text is TextName.pydoc else data.tinyshakespeare()
    return Corpus.of(text.value, found, context)
