"""One GPT on long documents over five graphs: loss against time and memory, the picture that shows which to choose.

A byte model of 2 layers reads 4,096 to 32,768 bytes of Python's manual at a time (Shakespeare with `--text`). At each
length, all graphs start with the same weights, see the same crops and train for the same number of steps. It records
the validation loss, and draws it over the time of the training steps; the area of a point is the memory that a step
saves for its backward pass.

    python examples/long_documents.py                                       4,096 and 8,192 bytes, a quarter of an hour
    python examples/long_documents.py --lengths 4096 8192 16384 32768       hours on one core
    python examples/long_documents.py --lengths 64 --steps 2                a quick test
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
from experiment import Outcome, Row, console, measure, parser, summary, values
from rich.table import Table
from torch import Tensor

from mpnn.cli.measure import bytes_for_backward
from mpnn.data import pydoc_topics, tinyshakespeare
from mpnn.graphs import parse
from mpnn.models import GPT
from mpnn.train.language_model import fit_language_model

GRAPHS = {
    "causal": "causal",
    "window": "causal & window(256)",
    "strided": "strided(64)",
    "hubs": "causal & longformer(256, globals=32)",
    "BigBird": "causal & bigbird(64)",
}
TEXTS = {"manual": pydoc_topics, "shakespeare": tinyshakespeare}
VALIDATION = 131_072  # bytes


def build(name: str, length: int) -> GPT:
    """The same model over each graph."""
    return GPT(256, 64, 4, 2, parse(GRAPHS[name]), context=length)


def train(name: str, length: int, steps: int, text: Tensor, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    model = build(name, length)
    torch.manual_seed(seed)  # all graphs see the same crops
    held_out = max(min(VALIDATION, len(text) // 3), length + 1)
    options = {"batch": 1, "lr": 3e-3, "validate_every": max(steps // 4, 1)}
    history = fit_language_model(
        model, text[:-held_out], text[-held_out:], steps, **options, progress=progress, checkpoint=checkpoint
    )
    return Outcome(history, history.val_loss[-1])


def megabytes(name: str, length: int, text: Tensor) -> float:
    """Returns the megabytes that a step saves for its backward pass, without parameters."""
    model, crop = build(name, length), text[None, : length + 1]
    return bytes_for_backward(model, lambda: model.loss(crop[:, :-1], crop[:, 1:])) / 1e6


def draw(points: dict[str, tuple[float, float, float]], length: int, path: Path) -> None:
    """Draws for each graph the loss over the minutes of training; the area of a point is its memory."""
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    most = max(memory for _, _, memory in points.values())
    for name, (minutes, loss, memory) in points.items():
        ax.scatter(minutes, loss, s=400 * memory / most, alpha=0.6)
        ax.annotate(f"{name}, {memory:.0f} MB", (minutes, loss), textcoords="offset points", xytext=(8, 8), fontsize=8)
    ax.set(xlabel="minutes of training", ylabel="validation loss (nats a byte)", title=f"{length:,} bytes at a time")
    ax.margins(0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__, 1, GRAPHS)
    options.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="bytes that the model reads")
    options.add_argument("--text", choices=list(TEXTS), default="manual", help="what it reads")
    options = options.parse_args()
    text = torch.frombuffer(bytearray(TEXTS[options.text](), "utf-8"), dtype=torch.uint8).long()
    steps = options.steps or 200
    for length in options.lengths:
        table = Table("graph", "edges", "nats a byte", "ms/step", "saved MB", title=f"{length:,} bytes at a time")
        points: dict[str, tuple[float, float, float]] = {}
        for name in options.models:
            row = Row(
                f"long-documents-{length}-{name.lower()}",
                f"{length:,} bytes of {options.text}",
                f"GPT over {GRAPHS[name]}",
                "nats a byte",
                "none",
                "",
            )
            memory = megabytes(name, length, text)
            settings = {"steps": steps, "length": length, "text": options.text}
            record = measure(row, partial(train, name, length, steps, text), options, settings)
            speed = mean(seed["ms_per_step"] for seed in record["seeds"].values())
            points[name] = speed * steps / 60e3, mean(values(record)), memory
            edges = f"{parse(GRAPHS[name]).bind(length).num_edges:,}"
            table.add_row(GRAPHS[name], edges, summary(record), f"{speed:.0f}", f"{memory:.0f}")
        console.print(table)
        draw(points, length, options.out / f"long-documents-{length}-loss.png")


if __name__ == "__main__":
    main()
