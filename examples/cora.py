"""GCN and GAT on Cora, as published: the same operator over the same graph, with different attention.

Trains each model with several random seeds and the settings of its paper, and prints the accuracy on the 1,000 test
nodes next to the published one.

    python examples/cora.py                          ten seeds, about ten minutes on two cores
    python examples/cora.py --seeds 1 --epochs 5     a quick test
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean, pstdev

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mpnn import graphs
from mpnn.data import cora, row_normalize
from mpnn.models import GAT, GCN
from mpnn.train.loop import History
from mpnn.train.node_classifier import fit_node_classifier


@dataclass(frozen=True)
class Paper:
    """A model, its training settings, and its published accuracy in percent."""

    model: Callable[[int, int], GCN | GAT]
    epochs: int
    patience: int | None
    published: str


PAPERS = {
    "GCN": Paper(GCN, epochs=200, patience=None, published="81.5"),
    "GAT": Paper(GAT, epochs=100_000, patience=100, published="83.0 ± 0.7"),
}


def main() -> None:
    options = arguments()
    data = cora()
    data = replace(data, x=row_normalize(data.x).to_sparse())  # both papers normalise rows; 99% of x is zero
    graph = graphs.from_edges(data.edge_index, data.num_nodes).with_self_loops()

    table = Table("model", "test accuracy", "published", "epochs", "ms/epoch", title=f"Cora, {options.seeds} seeds")
    with Progress(transient=True) as bar:
        for name, paper in PAPERS.items():
            task = bar.add_task(name, total=options.seeds)
            runs: list[History] = []
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                model = paper.model(data.x.shape[1], data.num_classes)
                epochs = min(paper.epochs, options.epochs or paper.epochs)
                runs.append(
                    fit_node_classifier(model, graph, data, model.optimizer(), epochs=epochs, patience=paper.patience)
                )
                bar.update(task, advance=1, description=f"{name} {accuracy(runs)}")
            epochs_run = mean(len(run.train_loss) for run in runs)
            milliseconds = 1e3 * mean(run.seconds_per_step for run in runs)
            table.add_row(name, accuracy(runs), paper.published, f"{epochs_run:.0f}", f"{milliseconds:.1f}")
    Console().print(table)


def accuracy(runs: list[History]) -> str:
    percent = [100 * run.test_accuracy for run in runs if run.test_accuracy is not None]
    return f"{mean(percent):.1f} ± {pstdev(percent):.1f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="number of random seeds for each model")
    parser.add_argument("--epochs", type=int, help="maximum number of epochs; default: as published")
    return parser.parse_args()


if __name__ == "__main__":
    main()
