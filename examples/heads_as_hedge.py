"""Do heads hedge bad initialization? One layer of attention, 1 to 16 heads of the same total width.

Each of 16 nodes has a name, a symbol, and the name of another node, whose symbol it must say. Each sequence has new
names and symbols. One head is enough for this, so more heads are only more attempts, each in a narrower
space. The initial maps of queries and keys are as usual, or 6 times as large ("bad"): a head then attends to one wrong
node from the start, and hardly learns from others. The figure has the accuracy of four aggregators by the number of
heads: the mean over seeds, and the best and the worst.

    python examples/heads_as_hedge.py                            seven minutes on an idle core
    python examples/heads_as_hedge.py --seeds 1 --steps 2        a quick test
"""

from __future__ import annotations

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.aggregate import PNA
from mpnn.attention import DotProduct
from mpnn.update import FeedForward, PreNorm

NAME = "heads_as_hedge"
NODES, SYMBOLS, WIDTH, BATCH = 16, 4, 64, 32
HEADS = (1, 2, 4, 8, 16)
SCALES = {"usual": 1.0, "bad": 6.0}
AGGREGATES: dict[str, tuple[Any, int]] = {
    "sum": ("sum", 1),
    "mean": ("mean", 1),
    "max": ("max", 1),
    "PNA": (PNA(("mean", "max", "min", "std"), ("identity",)), 4),
}
"""Aggregators of weighted messages, and how many numbers they give for each feature. PNA is without scalers of degrees,
because all degrees are the same."""


class Attention(DotProduct):
    """`DotProduct` with larger initial maps of queries and keys, for aggregators that give several numbers."""

    def __init__(self, heads: int, scale: float, numbers: int) -> None:
        super().__init__(WIDTH, heads)
        self.to_out = nn.Linear(numbers * WIDTH, WIDTH)
        with torch.no_grad():
            for each in (self.to_query, self.to_key):
                each.weight *= scale

    def merge(self, out: Tensor) -> Tensor:
        return self.to_out(out.flatten(-2))


class Network(nn.Module):
    """Names, symbols and the names asked for, [B, N] each -> logits [B, N, SYMBOLS]."""

    def __init__(self, heads: int, aggregate: str, scale: float) -> None:
        super().__init__()
        reduce, numbers = AGGREGATES[aggregate]
        self.embed = nn.Linear(2 * NODES + SYMBOLS, WIDTH)
        attention = Attention(heads, scale, numbers)
        self.layer = MessagePassing(graphs.complete(), reduce, PreNorm(WIDTH, FeedForward(WIDTH)), attention)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    def forward(self, name: Tensor, symbol: Tensor, asked: Tensor) -> Tensor:
        parts = F.one_hot(name, NODES), F.one_hot(symbol, SYMBOLS), F.one_hot(asked, NODES)
        return self.head(self.layer(self.embed(torch.cat(parts, -1).float())))


def questions(count: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Names, symbols and the names asked for, and the symbols of the nodes that have these names."""
    name, asked = (torch.rand(count, NODES).argsort(-1) for _ in range(2))
    symbol = torch.randint(SYMBOLS, (count, NODES))
    return (name, symbol, asked), symbol.gather(1, name.argsort(-1).gather(1, asked))


def train(heads: int, aggregate: str, scale: float, seed: int, steps: int) -> float:
    """The accuracy on new questions, after training."""
    torch.manual_seed(seed)
    model = Network(heads, aggregate, scale)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 2))
    for _ in range(steps):
        asked, answer = questions(BATCH)
        loss = F.cross_entropy(model(*asked).flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.inference_mode():
        asked, answer = questions(500)
        return float((model(*asked).argmax(-1) == answer).double().mean())


def draw(found: dict[tuple[str, str], Tensor]) -> plt.Figure:
    """`found`: accuracies by initialization and aggregator, [heads, seeds]."""
    figure, axes = plt.subplots(1, len(SCALES), figsize=(10, 4.6), sharey=True, layout="constrained")
    figure.suptitle("Several heads hedge a bad initialization, as long as they are not too narrow", fontsize=13)
    x = range(len(HEADS))
    for ax, (name, scale) in zip(axes, SCALES.items(), strict=True):
        for color, aggregate in enumerate(AGGREGATES):
            accuracy = 100 * found[name, aggregate]
            shifted = [k + 0.1 * (color - 1.5) for k in x]
            mean, low, high = accuracy.mean(1), accuracy.amin(1), accuracy.amax(1)
            ax.errorbar(shifted, mean, [mean - low, high - mean], fmt="o-", color=f"C{color}", label=aggregate)
        ax.axhline(100 / SYMBOLS, color="grey", linestyle=":", linewidth=1)
        ax.set(xlabel="heads (64 numbers in all)", xticks=x, xticklabels=HEADS, ylim=(20, 103))
        ax.set_title("usual initialization" if scale == 1 else f"queries and keys {scale:g} times as large")
    axes[0].set_ylabel("right answers, %: mean, worst and best seed")
    axes[0].text(len(HEADS) - 0.8, 100 / SYMBOLS + 1, "a guess", ha="right", fontsize=9, color="grey")
    axes[0].legend(loc="center left", title="aggregate")
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--steps", type=int, default=150, help="training steps of each network")
    options = command.parse_args()
    runs = [
        (name, aggregate, heads, seed)
        for seed in range(options.seeds)
        for name in SCALES
        for aggregate in AGGREGATES
        for heads in HEADS
    ]
    jobs = {
        f"{name}, {aggregate}, heads {heads}, seed {seed}": partial(
            train, heads, aggregate, SCALES[name], seed, options.steps
        )
        for name, aggregate, heads, seed in runs
    }
    values = dict(zip(runs, measure(NAME, jobs, options, {"steps": options.steps}).values(), strict=True))
    found = {
        (name, aggregate): torch.tensor(
            [[values[name, aggregate, heads, seed] for seed in range(options.seeds)] for heads in HEADS]
        )
        for name in SCALES
        for aggregate in AGGREGATES
    }
    for (name, aggregate), accuracy in found.items():
        text = "; ".join(
            f"{heads}: {row.mean():.0%} ({row.min():.0%} to {row.max():.0%})"
            for heads, row in zip(HEADS, accuracy, strict=True)
        )
        console.print(f"{name} initialization, {aggregate}, by heads: {text}", soft_wrap=True)
    save(draw(found), NAME, options)


if __name__ == "__main__":
    main()
