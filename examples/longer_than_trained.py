"""Which positions work beyond the length of training? One causal transformer, seven ways to say where a token is.

The task is the same at every length: say the token that followed the latest earlier copy of the current one, in a
sequence of random tokens (induction, Olsson et al. 2022). It needs "the one before me" and "the nearest of these". In a
long sequence the copy is 16 tokens away on average, and one in eight more than 32. Training is on sequences of 32
tokens. The figure has the accuracy by position in sequences 8 times as long. Over a causal graph a token at position p
attends to p + 1 tokens, so this is the accuracy by length.

    python examples/longer_than_trained.py                            eight minutes on an idle core
    python examples/longer_than_trained.py --seeds 1 --steps 2        a quick test
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.models.layers.positions import sinusoidal
from mpnn.position import T5, ALiBi, Position, Rotary, Shaw
from mpnn.update import FeedForward, PreNorm

NAME = "longer_than_trained"
TOKENS, LENGTH, TIMES = 16, 32, 8
WIDTH, HEADS, LAYERS, BATCH = 64, 4, 2, 32

KINDS: dict[str, Callable[[], Position | None]] = {
    "ALiBi": lambda: ALiBi(HEADS),
    "T5": lambda: T5(HEADS, buckets=32, max_distance=LENGTH, bidirectional=False),
    "Shaw": lambda: Shaw(WIDTH // HEADS, max_distance=LENGTH // 2),
    "rotary": lambda: Rotary(WIDTH // HEADS),
    "none": lambda: None,
    "sinusoid": lambda: None,
    "learned": lambda: None,
}
"""The relative position of each attention layer; sinusoids and learned vectors are added to the tokens instead."""


class Network(nn.Module):
    """A causal transformer, [B, N] tokens -> [B, N, TOKENS] logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        vectors = torch.zeros(TIMES * LENGTH, WIDTH)
        if kind == "sinusoid":
            vectors = sinusoidal(TIMES * LENGTH, WIDTH)
        elif kind == "learned":
            vectors = torch.randn(TIMES * LENGTH, WIDTH)
        self.position = nn.Parameter(vectors, requires_grad=kind == "learned")
        self.layers = nn.Sequential(
            *(
                MessagePassing(
                    graphs.causal(),
                    "sum",
                    PreNorm(WIDTH, FeedForward(WIDTH)),
                    DotProduct(WIDTH, HEADS, position=KINDS[kind]()),
                )
                for _ in range(LAYERS)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.layers(x))


def sequences(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens [count, length], and the token after the latest earlier copy of each; -100 where there is none."""
    tokens = torch.randint(TOKENS, (count, length))
    answer = torch.full_like(tokens, -100)
    following = torch.full((count, TOKENS), -100)
    rows = torch.arange(count)
    for k in range(length):
        answer[:, k] = following[rows, tokens[:, k]]
        if k + 1 < length:
            following[rows, tokens[:, k]] = tokens[:, k + 1]
    return tokens, answer


def train(kind: str, seed: int, steps: int) -> list[float]:
    """The accuracy at positions 0 to LENGTH - 1, LENGTH to 2 LENGTH - 1, ... of new sequences, after training."""
    torch.manual_seed(seed)
    model = Network(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 2))
    for _ in range(steps):
        tokens, answer = sequences(BATCH, LENGTH)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), answer.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.inference_mode():
        tokens, answer = sequences(200, TIMES * LENGTH)
        right = model(tokens).argmax(-1) == answer
    known = answer >= 0
    return [float(r[k].double().mean()) for r, k in zip(right.split(LENGTH, 1), known.split(LENGTH, 1), strict=True)]


def draw(found: dict[str, Tensor]) -> plt.Figure:
    figure, ax = plt.subplots(figsize=(8, 4.8), layout="constrained")
    ax.axvspan(0, 1, color="lightgrey", alpha=0.6)
    ax.text(0.5, 3, "trained", ha="center", color="dimgrey")
    x = torch.arange(TIMES) + 0.5
    ordered = sorted(found.items(), key=lambda item: -float(item[1][:, -1].mean()))  # the legend, as the lines end
    for color, (kind, accuracy) in enumerate(ordered):
        mean = 100 * accuracy.mean(0)
        ax.plot(x, mean, "o-", color=f"C{color}", markersize=4, label=kind)
        ax.fill_between(x, 100 * accuracy.amin(0), 100 * accuracy.amax(0), color=f"C{color}", alpha=0.12)
    ax.axhline(100 / TOKENS, color="grey", linestyle=":", linewidth=1)
    ax.text(TIMES - 0.05, 2, "a guess", ha="right", fontsize=9, color="grey")
    ax.set(xlabel="position, in lengths of training (32 tokens)", ylabel="right answers, %", xlim=(0, TIMES))
    ax.set(ylim=(0, 102))
    ax.set_title("Beyond the length of training only ALiBi holds; Shaw fades, the others fall to a guess", fontsize=12)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title="positions")
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--steps", type=int, default=500, help="training steps of each network")
    command.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of positions")
    options = command.parse_args()
    runs = [(kind, seed) for seed in range(options.seeds) for kind in options.kinds]
    jobs = {f"{kind}, seed {seed}": partial(train, kind, seed, options.steps) for kind, seed in runs}
    values = dict(zip(runs, measure(NAME, jobs, options, {"steps": options.steps}).values(), strict=True))
    found = {k: torch.tensor([values[k, seed] for seed in range(options.seeds)]) for k in options.kinds}
    for kind, accuracy in found.items():
        text = " ".join(f"{value:.0%}" for value in accuracy.mean(0).tolist())
        console.print(f"{kind}: {text} at 1 to {TIMES} lengths; {len(accuracy)} seeds", soft_wrap=True)
    save(draw(found), NAME, options)


if __name__ == "__main__":
    main()
