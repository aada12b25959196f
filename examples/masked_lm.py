"""Masked language modeling, then fine-tuning, on the manual that is part of Python: what pre-training is worth.

The task: from which of ten topics of the manual is a passage of 31 words? A small BERT is trained with 15 labeled
passages of each topic: from scratch, and after pre-training on the words of the whole manual with the objective of
RoBERTa (Liu et al. 2019): masked words, others in each batch, and no prediction of the next sentence. The test
passages are part of the text for pre-training, their topics are not.

    python examples/masked_lm.py                           five minutes on one core
    python examples/masked_lm.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, console, measure, parser, stage
from torch import Tensor

from mpnn.data.text import topics
from mpnn.models import Bert, BertConfig, MaskedLM, SentenceClassifier
from mpnn.models.text.heads import mask_tokens
from mpnn.train.language_model import adamw
from mpnn.train.loop import Settings, fit, shuffled, warm_cosine

MODELS = ("BERT from scratch", "RoBERTa's objective, then BERT")
UNKNOWN, FIRST, MASK, SPECIAL = 1, 2, 3, 4  # 0 is padding, which does not occur
WORDS, PASSAGE, CLASSES, PER_CLASS, BATCH = 3000, 31, 10, 15, 32
CONFIG = BertConfig(vocabulary=WORDS, dim=128, layers=2, heads=4, hidden=256, context=PASSAGE + 1)


class Manual:
    """Passages of the manual, int64 [P, 1 + PASSAGE], and the topics of those of the `CLASSES` longest: `labeled`
    [L, 1 + PASSAGE], `topic` [L], and their words, `texts`. A paragraph that several topics repeat counts for the
    first one only."""

    def __init__(self) -> None:
        seen: set[str] = set()
        words: dict[str, list[str]] = {}
        for name, text in topics().items():
            new = [paragraph for paragraph in text.split("\n\n") if paragraph not in seen]
            seen.update(new)
            words[name] = re.findall(r"\w+|[^\w\s]", " ".join(new).lower())
        common = Counter(word for part in words.values() for word in part).most_common(WORDS - SPECIAL)
        index = {word: SPECIAL + k for k, (word, _) in enumerate(common)}
        passages = {name: _passages([index.get(word, UNKNOWN) for word in part]) for name, part in words.items()}
        self.names = sorted(passages, key=lambda name: -len(passages[name]))[:CLASSES]
        self.texts = [
            " ".join(words[name][k * PASSAGE : (k + 1) * PASSAGE])
            for name in self.names
            for k in range(len(passages[name]))
        ]
        self.passages = torch.cat(list(passages.values()))
        self.labeled = torch.cat([passages[name] for name in self.names])
        self.topic = torch.cat([torch.full((len(passages[name]),), k) for k, name in enumerate(self.names)])

    def split(self, seed: int, topic: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The indices of `PER_CLASS` random labeled passages of each topic, and of the others; `topic` if given."""
        topic = self.topic if topic is None else topic
        order = torch.randperm(len(topic), generator=torch.Generator().manual_seed(seed))
        parts = [order[topic[order] == k] for k in range(CLASSES)]
        return torch.cat([part[:PER_CLASS] for part in parts]), torch.cat([part[PER_CLASS:] for part in parts])


def _passages(words: list[int]) -> Tensor:
    """Consecutive passages that do not overlap, each after the token FIRST."""
    count = len(words) // PASSAGE
    whole = torch.tensor(words[: count * PASSAGE], dtype=torch.int64).view(count, PASSAGE)
    return torch.cat([torch.full((count, 1), FIRST), whole], 1)


def pretrain(encoder: Bert, manual: Manual, steps: int, seed: int, progress: Any, checkpoint: Any) -> None:
    model = MaskedLM(encoder)

    def loss(k: int) -> Tensor:
        tokens = manual.passages[shuffled(len(manual.passages), BATCH, k, seed)]
        return model.loss(*mask_tokens(tokens, MASK, WORDS, tokens != FIRST))

    settings = Settings(steps, rate=warm_cosine(steps), clip=1.0)
    fit(model, adamw(model, 1e-3), loss, settings, progress=progress, checkpoint=checkpoint)


def train(name: str, manual: Manual, sizes: dict[str, int], seed: int, progress: Any, checkpoint: Any) -> Outcome:
    encoder = Bert(CONFIG)
    if name == MODELS[1]:
        pretrain(encoder, manual, sizes["pretraining"], seed, progress, stage(checkpoint, "pretraining"))
    torch.manual_seed(seed)
    model = SentenceClassifier(encoder, CLASSES)
    few, rest = manual.split(seed)

    @torch.no_grad()
    def accuracy() -> dict[str, float]:
        model.eval()
        right = [model(manual.labeled[part]).argmax(1) == manual.topic[part] for part in rest.split(256)]
        return {"accuracy": 100 * torch.cat(right).float().mean().item()}

    def loss(k: int) -> Tensor:
        index = few[shuffled(len(few), BATCH, k, seed)]
        return model.loss(manual.labeled[index], manual.topic[index])

    steps = sizes["steps"]
    settings = Settings(steps, rate=warm_cosine(steps), clip=1.0, validate_every=min(50, steps))
    fitted = fit(model, adamw(model, 5e-4), loss, settings, validate=accuracy, progress=progress, checkpoint=checkpoint)
    return Outcome(fitted, fitted.val_accuracy[-1])


def main() -> None:
    options = parser(__doc__, 3, MODELS).parse_args()
    manual = Manual()
    console.print(f"{len(manual.passages):,} passages, {len(manual.topic):,} with a topic: {', '.join(manual.names)}")
    sizes = {"steps": options.steps or 300, "pretraining": options.steps or 400}
    for name in options.models:
        file = "masked-lm-" + ("fine-tuned" if name == MODELS[1] else "scratch")
        row = Row(file, "topic of a passage of Python's manual", name, "% test accuracy", "none", "")
        settings = sizes if name == MODELS[1] else {"steps": sizes["steps"]}
        measure(row, partial(train, name, manual, sizes), options, settings | {"passages": len(manual.passages)})


if __name__ == "__main__":
    main()
