"""One character model over several graphs: full context and two sliding windows, by changing one argument.

Trains the same GPT (same initial weights, same batches) over each graph, and prints the number of edges, the reach (the
share of all pairs that its layers connect), the time per step, the validation loss, and a text sample. It reads
Shakespeare if `mpnn.data` finds it, else the Python manual.

    python examples/char_lm.py                                     a few minutes on two cores
    python examples/char_lm.py --steps 5 --context 32 --dim 32     a quick test
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mpnn.data import Characters, DatasetNotFound, pydoc_topics, tinyshakespeare
from mpnn.graphs import causal, window
from mpnn.models import GPT
from mpnn.train.language_model import fit_language_model

GRAPHS = (causal(), causal() & window(64), causal() & window(16))


def main() -> None:
    options = arguments()
    name, text = corpus()
    characters = Characters(text)
    tokens = characters.encode(text)
    train, val = tokens.split([int(0.9 * len(tokens)), len(tokens) - int(0.9 * len(tokens))])

    console = Console()
    title = f"{name}: {options.layers} layers of {options.dim}, context {options.context}, {options.steps} steps"
    table = Table("graph", "edges", "reach", "ms/step", "val loss", title=title)
    samples = []
    with Progress(console=console, transient=True) as bar:
        for graph in GRAPHS:
            torch.manual_seed(0)
            model = GPT(len(characters), options.dim, 4, options.layers, graph, context=options.context)
            task = bar.add_task(str(graph), total=options.steps)
            history = fit_language_model(
                model, train, val, options.steps, progress=lambda step, _, task=task: bar.update(task, completed=step)
            )
            bound = graph.bind(options.context)
            table.add_row(
                str(graph),
                f"{bound.num_edges:,}",
                f"{bound.reach(options.layers):.0%}",
                f"{1e3 * history.seconds_per_step:.0f}",
                f"{history.val_loss[-1]:.3f}",
            )
            samples.append(characters.decode(model.generate(characters.encode("\n")[None], 150, 0.8)[0]))
    console.print(table)
    for graph, sample in zip(GRAPHS, samples, strict=True):
        console.rule(str(graph))
        console.print(sample.strip(), markup=False, highlight=False)


def corpus() -> tuple[str, str]:
    try:
        return "tinyshakespeare", tinyshakespeare()
    except DatasetNotFound:
        return "pydoc topics", pydoc_topics()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--context", type=int, default=128, help="number of characters that the model reads at a time")
    parser.add_argument("--dim", type=int, default=128, help="width, a multiple of 4 (the number of heads)")
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
