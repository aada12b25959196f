"""Do chosen blocks recall what a window of as many edges has lost? Multi-query associative recall (Arora et al. 2023).

A text names 64 pairs of a key and a value, and then asks for the values of 16 keys. One network is trained over
`causal()`: a short convolution and a layer of attention. Then it answers, without further training, over fewer edges: a
window of the last tokens, or the blocks whose mean keys a query likes most (MoBA, Lu et al. 2025; Quest, Tang et al.
2024). The figure has the accuracy by edges of a query.

    python examples/chosen_edges.py                      a minute of processor time
    python examples/chosen_edges.py --steps 2            a quick test
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from recall import BATCH, HEADS, QUERIES, VALUES, WIDTH, Network
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Topology
from mpnn.attention import Attention, BlockTopK, DotProduct
from mpnn.graphs import causal, window

NAME = "chosen_edges"
PAIRS, KEYS = 64, 128
LENGTH = 2 * PAIRS + QUERIES


def near(edges: int) -> tuple[Topology, Attention]:
    return causal() & window(edges - 1), DotProduct(WIDTH, HEADS)


def blocks(size: int, edges: int) -> tuple[Topology, Attention]:
    return causal(), BlockTopK(WIDTH, HEADS, size, edges // size)


KINDS: dict[str, Callable[[int], tuple[Topology, Attention]]] = {
    "the last tokens: a window": near,
    "chosen blocks of 8": partial(blocks, 8),
    "chosen blocks of 4": partial(blocks, 4),
}
EDGES = (16, 32, 48, 64, 96, 128)


def texts(count: int) -> tuple[Tensor, Tensor]:
    """Tokens [count, LENGTH], and the values asked for [count, QUERIES]."""
    keys, values = torch.rand(count, KEYS).argsort(-1)[:, :PAIRS], torch.randint(VALUES, (count, PAIRS))
    asked = torch.randint(PAIRS, (count, QUERIES))
    pairs = torch.stack([keys, KEYS + values], -1).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked)


@cache
def trained(steps: int, rate: float) -> Network:
    """The network over all tokens before, trained."""
    torch.manual_seed(0)
    model = Network(causal(), DotProduct(WIDTH, HEADS), KEYS)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2))
    for _ in range(steps):
        tokens, values = texts(BATCH)
        loss = F.cross_entropy(model(tokens)[:, -QUERIES:].flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def accuracy(kind: str | None, edges: int, steps: int, rate: float) -> float:
    """The accuracy on new texts with this many edges of a query, chosen by `kind`; None: all tokens before."""
    model = trained(steps, rate)
    if kind is not None:
        restricted = Network(*KINDS[kind](edges), KEYS)
        restricted.load_state_dict(model.state_dict())
        model = restricted
    torch.manual_seed(1)
    tokens, values = texts(1000)
    with torch.no_grad():
        return float((model(tokens)[:, -QUERIES:].argmax(-1) == values).double().mean())


def draw(found: dict[str, list[float]], whole: float) -> plt.Figure:
    """`found`: accuracies by kind, one for each of EDGES; `whole`: that over all tokens before."""
    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    ax.axhline(100 * whole, color="grey", linestyle="--", linewidth=1, label="all tokens before: causal")
    for name in reversed(KINDS):
        ax.plot(EDGES, [100 * a for a in found[name]], "o-", label=name)
    ax.axhline(100 / VALUES, color="grey", linestyle=":", linewidth=1)
    ax.text(100, 100 / VALUES + 1, "a guess", fontsize=9, color="grey")
    ax.set(xlabel=f"edges of a query, of {LENGTH} tokens", ylabel="right answers, %", ylim=(0, 103))
    ax.set_xticks(EDGES)
    ax.set_title(f"{PAIRS} pairs: chosen blocks recall what a window has lost", fontsize=12)
    ax.legend(loc="center right")
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=400, help="training steps")
    command.add_argument("--rate", type=float, default=1e-2, help="largest learning rate")
    options = command.parse_args()
    runs = [(None, LENGTH), *((kind, edges) for kind in KINDS for edges in EDGES)]
    jobs = {
        f"{kind or 'all tokens before'}, {edges} edges": partial(accuracy, kind, edges, options.steps, options.rate)
        for kind, edges in runs
    }
    settings = {"steps": options.steps, "rate": options.rate}
    values = measure(NAME, jobs, options, settings)
    for name, right in values.items():
        console.print(f"{name}: {right:.1%}", soft_wrap=True)
    by_run = dict(zip(runs, values.values(), strict=True))
    save(draw({kind: [by_run[kind, edges] for edges in EDGES] for kind in KINDS}, by_run[None, LENGTH]), NAME, options)


if __name__ == "__main__":
    main()
