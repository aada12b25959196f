"""ListOps by the rules of the Long Range Arena (Tay et al. 2021): five encoders evaluate nested lists of digits.

An expression such as [MAX 4 [MIN 2 9 ] [SM 7 8 ] ] is a tree of at most ten levels: a node is, with probability 1/4, an
operator (minimum, maximum, median, sum modulo ten) of two to ten nodes, else a digit. The class is its value. The arena
has 96,000 expressions of 500 to 2,000 tokens; here they have 50 to 200 (`--longest`), which one core trains on in
minutes, so the published accuracies are of another length and compare in their order only.

    python examples/listops.py                                        half an hour on one core
    python examples/listops.py --longest 2000 --count 96000           the arena's data
    python examples/listops.py --seeds 1 --steps 2 --longest 24 --count 90   a quick test
"""

from __future__ import annotations

from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
from experiment import Outcome, Row, console, measure, parser
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mpnn.graphs import window
from mpnn.models import (
    Bert,
    BertConfig,
    BigBird,
    LinformerConfig,
    LinformerEncoder,
    Longformer,
    PerformerEncoder,
    PerformerEncoderConfig,
    SentenceClassifier,
)
from mpnn.train.language_model import adamw
from mpnn.train.loop import Settings, fit, shuffled, warm_cosine

PUBLISHED = {"Transformer": 36.37, "Longformer": 35.63, "BigBird": 36.05, "Performer": 18.01, "Linformer": 35.70}
DEPTH, ARGUMENTS, OPERATOR = 10, 10, 0.25
OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
VOCABULARY = {word: k for k, word in enumerate(["PAD", "CLS", *OPERATORS, "]", *map(str, range(10))])}
BATCH = 32


def expression(random: Random, longest: int, depth: int = 1) -> tuple[list[str], int]:
    """A random expression, as words, and its value. It may end early, without a value, if it is longer than allowed."""
    if depth == DEPTH or random.random() > OPERATOR:
        digit = random.randrange(10)
        return [str(digit)], digit
    operator, values = random.choice(list(OPERATORS)), []
    words = [operator]
    for _ in range(random.randint(2, ARGUMENTS)):
        part, value = expression(random, longest, depth + 1)
        words += part
        values.append(value)
        if len(words) >= longest:
            return words + part, 0
    return [*words, "]"], OPERATORS[operator](values)


def expressions(count: int, longest: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Different expressions of a quarter of `longest` to `longest` words: tokens int64 [count, 1 + longest], after CLS
    and padded at the end, and values int64 [count]."""
    random = Random(seed)
    found: dict[tuple[str, ...], int] = {}
    while len(found) < count:
        words, value = expression(random, longest)
        if longest // 4 <= len(words) <= longest and words[-1] == "]":
            found[tuple(words)] = value
    rows = [torch.tensor([VOCABULARY[word] for word in ("CLS", *words)]) for words in found]
    tokens = pad_sequence([*rows, torch.zeros(1 + longest, dtype=torch.int64)], batch_first=True)[:-1]
    return tokens, torch.tensor(list(found.values()))


def build(name: str, length: int) -> SentenceClassifier:
    sizes = {"dim": 64, "layers": 2, "heads": 4, "hidden": 128, "context": length, "dropout": 0.0}
    options: dict[str, Any] = {"vocabulary": len(VOCABULARY), **sizes, "attention_dropout": 0.0}
    encoders = {
        "Transformer": lambda: Bert(BertConfig(**options)),
        "Longformer": lambda: Longformer(BertConfig(**options), window(16)),
        "BigBird": lambda: BigBird(BertConfig(**options), block=8, random=2, globals=1),
        "Performer": lambda: PerformerEncoder(PerformerEncoderConfig(**options, features=64)),
        "Linformer": lambda: LinformerEncoder(LinformerConfig(**options, landmarks=32)),
    }
    return SentenceClassifier(encoders[name](), 10)


def train(name: str, tokens: Tensor, values: Tensor, steps: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    """Trains on all but two ninths of the expressions, which are for validation and test."""
    model = build(name, tokens.shape[1])
    ninth = len(values) // 9
    train, val, test = torch.arange(len(values)).split([len(values) - 2 * ninth, ninth, ninth])

    def arguments(index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Linformer mixes positions, so that it reads the padding as tokens."""
        rows = tokens[index]
        if name == "Linformer":
            return rows, {}
        rows = rows[:, : int((rows > 0).sum(1).max())]
        return rows, {"padding_mask": rows == 0}

    def loss(k: int) -> Tensor:
        index = train[shuffled(len(train), BATCH, k, seed)]
        rows, options = arguments(index)
        return model.loss(rows, values[index], **options)

    @torch.no_grad()
    def accuracy(part: Tensor) -> float:
        model.eval()
        right = []
        for index in part.split(BATCH):
            rows, options = arguments(index)
            right.append(model(rows, **options).argmax(1) == values[index])
        return 100 * torch.cat(right).float().mean().item()

    history = fit(
        model,
        adamw(model, 1e-3),
        loss,
        Settings(steps, rate=warm_cosine(steps), clip=1.0, validate_every=min(200, steps), keep="best"),
        validate=lambda: {"accuracy": accuracy(val)},
        progress=progress,
        checkpoint=checkpoint,
    )
    return Outcome(history, accuracy(test))


def main() -> None:
    options = parser(__doc__, 1, PUBLISHED)
    options.add_argument("--longest", type=int, default=200, help="maximum number of tokens of an expression")
    options.add_argument("--count", type=int, default=18_000, help="number of expressions")
    options = options.parse_args()
    tokens, values = expressions(options.count, options.longest)
    share = 100 * values.bincount().max().item() / len(values)
    console.print(f"{len(values):,} expressions of {(tokens > 0).sum(1).float().mean() - 1:.0f} tokens on average")
    console.print(f"the most frequent value is that of {share:.1f}%")
    steps = options.steps or 2000
    for name in options.models:
        row = Row(
            f"listops-{name.lower()}",
            f"ListOps, at most {options.longest} tokens",
            name,
            "% test accuracy",
            f"{PUBLISHED[name]:.2f} at 2,000 tokens",
            "Tay et al. 2021, table 1",
        )
        settings = {"steps": steps, "longest": options.longest, "count": options.count}
        measure(row, partial(train, name, tokens, values, steps), options, settings)


if __name__ == "__main__":
    main()
