"""A custom topology: one function that returns runs. It composes, binds to any length and trains like built-in ones.

In `landmarks(8)`, each node attends to every eighth node before it. Its union with a narrow causal window connects each
node to the whole past in two layers, with a third of the edges of `causal()`. The task: predict the first token at
every position.

    python examples/custom_topology.py               half a minute
    python examples/custom_topology.py --steps 5     a quick test
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mpnn import Topology
from mpnn.graphs import causal, window
from mpnn.models import GPT

LENGTH, SYMBOLS, LAYERS = 64, 8, 2


def landmarks(every: int) -> Topology:
    """i attends to every `every`-th node up to itself.

    ::

        landmarks(2)   #...
                       #...
                       #.#.
                       #.#.
    """
    return Topology.of(_landmarks, every)


def _landmarks(i: NDArray[np.int64], num_src: int, every: int) -> Iterable[tuple[object, object]]:
    """For each landmark, a run of sources for every destination i: the landmark if it is not after i, else empty."""
    return [(mark, np.where(mark <= i, mark + 1, mark)) for mark in range(0, num_src, every)]


def draw(topology: Topology, length: int) -> str:
    return "\n".join("".join(".#"[int(edge)] for edge in row) for row in topology.bind(length).dense())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    near = causal() & window(7)
    console = Console()
    console.print(f"{near | landmarks(8)}, 24 nodes:", highlight=False)
    console.print(draw(near | landmarks(8), 24), markup=False, highlight=False)

    titles = ("topology", "edges", f"reach of {LAYERS} layers", "recall")
    table = Table(*titles, title=f"{LENGTH} nodes")
    for topology in (near, near | landmarks(8), causal()):
        graph = topology.bind(LENGTH)
        recall = f"{recall_accuracy(topology, options.steps):.0%}"
        table.add_row(str(topology), f"{graph.num_edges:,}", f"{graph.reach(LAYERS):.0%}", recall)
    console.print(table)


def recall_accuracy(topology: Topology, steps: int) -> float:
    """Trains a tiny GPT to predict the first token. Returns its accuracy at the positions of the second half."""
    torch.manual_seed(0)
    model = GPT(SYMBOLS, dim=32, heads=2, layers=LAYERS, graph=topology, context=LENGTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = torch.randint(SYMBOLS, (32, LENGTH))
        loss = model.loss(tokens, tokens[:, :1].expand_as(tokens))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens = torch.randint(SYMBOLS, (64, LENGTH))
    with torch.no_grad():
        predictions = model(tokens)[:, LENGTH // 2 :].argmax(-1)
    return (predictions == tokens[:, :1]).float().mean().item()


if __name__ == "__main__":
    main()
