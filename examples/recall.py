"""Which recurrence recalls what it read? Multi-query associative recall (Arora et al. 2023) by the size of the state.

A text names 16 pairs of a key and a value, and then asks for the values of 16 keys. What a causal model knows of the
pairs when it is asked is its state: the keys and values of a window, or the matrices of a recurrence. The figure has
the accuracy by the number of numbers in this state. In the first task each pair has a key of its own. In the second
one, 8 keys are named twice with different values, and the last value counts, so a model has to replace the first.

All models are a short convolution and one layer of the same width. Only the graph and the attention differ.

    python examples/recall.py                            six minutes of processor time
    python examples/recall.py --steps 2                  a quick test
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import MessagePassing, Topology
from mpnn.attention import Attention, DeltaRule, DotProduct, Retention, ShortConvolution, StateSpace
from mpnn.graphs import causal, window
from mpnn.position import ALiBi
from mpnn.update import FeedForward, PreNorm

NAME = "recall"
PAIRS, QUERIES, KEYS, VALUES = 16, 16, 32, 16
WIDTH, HEADS, BATCH = 64, 2, 32
HEAD = WIDTH // HEADS
TASKS = {"each key is named once": PAIRS, "keys are named twice": PAIRS // 2}
"""The number of different keys in a text, by task."""


def near(radius: int) -> tuple[Topology, Attention]:
    return causal() & window(radius), DotProduct(WIDTH, HEADS, position=ALiBi(HEADS))


def retention(keys: int) -> tuple[Topology, Attention]:
    return causal(), Retention(WIDTH, HEADS, head_dim=keys, value_dim=HEAD)


def state_space(keys: int) -> tuple[Topology, Attention]:
    return causal(), StateSpace(WIDTH, HEADS, state=keys)


def delta_rule(keys: int) -> tuple[Topology, Attention]:
    return causal(), DeltaRule(WIDTH, HEADS, head_dim=keys, value_dim=HEAD)


class Kind(NamedTuple):
    """A graph and an attention of a size, the sizes, and the numbers in the state for a size of 1."""

    make: Callable[[int], tuple[Topology, Attention]]
    sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    numbers: int = WIDTH


KINDS = {
    "softmax over a window": Kind(near, (4, 8, 16, 32, 47), 2 * WIDTH),  # 47 is all of a text
    "retention: a constant decay": Kind(retention),
    "state space: a decay by token": Kind(state_space),
    "gated delta rule": Kind(delta_rule),
}


class Network(nn.Module):
    """Tokens [B, N] -> logits of values [B, N, VALUES]."""

    def __init__(self, graph: Topology, attention: Attention, keys: int = KEYS) -> None:
        super().__init__()
        self.token = nn.Embedding(keys + VALUES, WIDTH)
        # a value sees its key
        self.pair = MessagePassing(causal() & window(1), "sum", None, ShortConvolution(WIDTH, 2))
        self.layer = MessagePassing(graph, "sum", PreNorm(WIDTH, FeedForward(WIDTH, WIDTH)), attention)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.pair(self.token(tokens))))


def texts(count: int, different: int) -> tuple[Tensor, Tensor]:
    """Tokens [count, 2 * PAIRS + QUERIES], and the values asked for [count, QUERIES]."""
    chosen = torch.rand(count, KEYS).argsort(-1)[:, :different]
    orders = [torch.rand(count, different).argsort(-1) for _ in range(PAIRS // different)]
    keys = torch.cat([chosen.gather(1, order) for order in orders], 1)
    values = torch.randint(VALUES, (count, PAIRS))
    asked = torch.randint(PAIRS - different, PAIRS, (count, QUERIES))  # a pair after which its key is not named again
    pairs = torch.stack([keys, KEYS + values], -1).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked)


def train(kind: Kind, size: int, different: int, steps: int, rate: float) -> float:
    """The accuracy on new texts, after training."""
    torch.manual_seed(0)
    model = Network(*kind.make(size))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2))
    for _ in range(steps):
        tokens, values = texts(BATCH, different)
        loss = F.cross_entropy(model(tokens)[:, -QUERIES:].flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        tokens, values = texts(1000, different)
        return float((model(tokens)[:, -QUERIES:].argmax(-1) == values).double().mean())


def draw(found: dict[tuple[str, str], list[float]]) -> plt.Figure:
    """`found`: accuracies by task and kind, one for each size."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(10, 4.6), sharey=True, layout="constrained")
    figure.suptitle(
        "What a state recalls: a window until the pair leaves it, a matrix as many keys as fit", fontsize=13
    )
    for ax, task in zip(axes, TASKS, strict=True):
        for name, kind in KINDS.items():
            accuracy = [100 * a for a in found[task, name]]
            ax.plot([size * kind.numbers for size in kind.sizes], accuracy, "o-", label=name)
        ax.axhline(100 / VALUES, color="grey", linestyle=":", linewidth=1)
        ax.set(xscale="log", xlabel="numbers in the state", ylim=(0, 103))
        ax.minorticks_off()
        ax.set_xticks([256, 512, 1024, 2048, 4096], ["256", "512", "1,024", "2,048", "4,096"])
        ax.set_title(f"{PAIRS} pairs, {task}")
    axes[0].set_ylabel("right answers, %")
    axes[0].text(256, 100 / VALUES + 1, "a guess", fontsize=9, color="grey")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=300, help="training steps of each network")
    command.add_argument("--rate", type=float, default=1e-2, help="largest learning rate")
    options = command.parse_args()
    runs = [(task, name, size) for task in TASKS for name, kind in KINDS.items() for size in kind.sizes]
    jobs = {
        f"{task}, {name}, size {size}": partial(train, KINDS[name], size, TASKS[task], options.steps, options.rate)
        for task, name, size in runs
    }
    settings = {"steps": options.steps, "rate": options.rate}
    values = dict(zip(runs, measure(NAME, jobs, options, settings).values(), strict=True))
    found = {
        (task, name): [values[task, name, size] for size in kind.sizes]
        for task in TASKS
        for name, kind in KINDS.items()
    }
    for (task, name), accuracy in found.items():
        numbers = [size * KINDS[name].numbers for size in KINDS[name].sizes]
        text = ", ".join(f"{n:,}: {a:.0%}" for n, a in zip(numbers, accuracy, strict=True))
        console.print(f"{task}, {name}, by numbers in the state: {text}", soft_wrap=True)
    save(draw(found), NAME, options)


if __name__ == "__main__":
    main()
