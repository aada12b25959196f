"""One character model over three graphs, at equal steps and at equal time: only the graph changes.

The model and its training are nanoGPT's for a CPU: 4 layers of width 128, context 64, batches of 12, 2,000 steps. All
graphs start with the same weights and see the same batches. "Equal time" trains over each sparse graph as many steps as
take as long as those over causal(). It reads Shakespeare if `mpnn.data` finds it, else the Python manual. It prints the
number of edges, the reach (the share of all pairs that the layers connect) and a text sample of each, and draws the
attention of the last layer over characters of the validation text.

    python examples/char_lm.py                                  an hour on two cores
    python examples/char_lm.py --seeds 1 --steps 5 --dim 32     a quick test
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
from experiment import Outcome, Row, console, measure, parser
from rich.table import Table
from torch import Tensor

from mpnn.data import Characters, DatasetNotFound, pydoc_topics, tinyshakespeare
from mpnn.graphs import parse
from mpnn.message_passing import MessagePassing
from mpnn.models import GPT
from mpnn.train.language_model import fit_language_model

GRAPHS = {"causal": "causal", "window": "causal & window(16)", "strided": "strided(8)"}
CONTEXT, HEADS, LAYERS = 64, 4, 4
PUBLISHED = "1.88", "nanoGPT, README: on a CPU"


def main() -> None:
    options = parser(__doc__, 3, GRAPHS)
    options.add_argument("--dim", type=int, default=128, help=f"width, a multiple of {HEADS} (the number of heads)")
    options.add_argument("--context", type=int, default=CONTEXT, help="characters that the model reads at a time")
    options = options.parse_args()
    corpus, text = read()
    characters = Characters(text)
    tokens = characters.encode(text)
    train_tokens, val_tokens = tokens.split([int(0.9 * len(tokens)), len(tokens) - int(0.9 * len(tokens))])
    steps = options.steps or 2000
    milliseconds: dict[str, float] = {}
    models: dict[str, GPT] = {}
    table = Table("graph", "edges", "reach", "ms/step", "steps at equal time")
    for equal in ("steps", "time"):
        for name in options.models:
            if equal == "time" and (name == "causal" or "causal" not in milliseconds):
                continue
            count = steps
            if equal == "time":
                count = max(round(steps * milliseconds["causal"] / milliseconds[name]), 1)
            sizes = {"steps": count, "dim": options.dim, "context": options.context, "corpus": corpus}
            run = partial(train, name, models, len(characters), train_tokens, val_tokens, sizes)
            published, source = PUBLISHED if (name, corpus) == ("causal", "tinyshakespeare") else ("none", "")
            suffix = "" if equal == "steps" else ", equal time"
            row = Row(
                f"char-lm-{name}{suffix.replace(', ', '-').replace(' ', '-')}",
                f"characters of {corpus}",
                f"GPT over {GRAPHS[name]}{suffix}",
                "nats a character",
                published,
                source,
            )
            # The number of steps at equal time is itself measured, so it is not compared with an earlier record.
            record = measure(row, run, options, sizes if equal == "steps" else sizes | {"steps": "equal time"})
            if equal == "steps":
                milliseconds[name] = median(seed["ms_per_step"] for seed in record["seeds"].values())
                graph = parse(GRAPHS[name]).bind(options.context)
                reach = f"{graph.reach(LAYERS):.0%}"
                more = f"{round(steps * milliseconds.get('causal', milliseconds[name]) / milliseconds[name]):,}"
                table.add_row(GRAPHS[name], f"{graph.num_edges:,}", reach, f"{milliseconds[name]:.1f}", more)
    console.print(table)
    line = val_tokens[: min(40, options.context)]
    for name, model in models.items():
        sample = characters.decode(model.generate(characters.encode("\n")[None], 150, 0.8)[0])
        console.rule(GRAPHS[name])
        console.print(sample.strip(), markup=False)
        draw_attention(model, line, characters.decode(line), options.out / f"char-lm-{name}-attention.png")


def train(
    name: str,
    models: dict[str, GPT],
    vocabulary: int,
    train: Tensor,
    val: Tensor,
    sizes: dict[str, Any],
    seed: int,
    progress: Any,
    checkpoint: Any,
) -> Outcome:
    model = GPT(vocabulary, sizes["dim"], HEADS, LAYERS, parse(GRAPHS[name]), context=sizes["context"])
    torch.manual_seed(seed)  # all graphs see the same batches
    options = {"validate_every": max(sizes["steps"] // 10, 1), "progress": progress, "checkpoint": checkpoint}
    history = fit_language_model(model, train, val, sizes["steps"], **options)
    models.setdefault(name, model)
    return Outcome(history, history.val_loss[-1])


@torch.no_grad()
def draw_attention(model: GPT, tokens: Tensor, text: str, path: Path) -> None:
    """Draws the attention weights of the last layer, the mean over its heads, between the characters of a text."""
    layer = model.layers[-1]
    assert isinstance(layer, MessagePassing)
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.eval()(tokens[None])
    handle.remove()
    _, weights = layer(inputs[0], return_weights=True)
    src, dst = layer.graph.bind(len(tokens)).edge_index
    matrix = torch.zeros(len(tokens), len(tokens))
    matrix[dst, src] = weights[0].mean(-1)
    figure, ax = plt.subplots(figsize=(8, 8), layout="constrained")
    ax.imshow(matrix.numpy(), cmap="Greys", vmin=0)
    labels = [repr(character)[1:-1] for character in text]
    ax.set_xticks(range(len(labels)), labels, fontsize=7)
    ax.set_yticks(range(len(labels)), labels, fontsize=7)
    ax.set(title="A row is a character, and what it attends to in the last layer")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read() -> tuple[str, str]:
    try:
        return "tinyshakespeare", tinyshakespeare()
    except DatasetNotFound:
        return "pydoc topics", pydoc_topics()


if __name__ == "__main__":
    main()
