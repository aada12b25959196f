"""The recall task of `mpnn demo`: which graphs carry one letter through a text?

The text is random letters, and after the letter at place 3 the model has to name it at every place. A narrow window
cannot: information travels `layers * radius` places. With landmarks, which every later letter attends to, two layers
suffice: the landmark at place 8 reads the letter, and all others read the landmark.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from mpnn import Topology
from mpnn.cli.tasks import Run
from mpnn.graphs import causal, window
from mpnn.models import GPT
from mpnn.models.saving import Model
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History, Progress, Settings, fit

LETTERS = "abcdefgh"
LENGTH = 48
ASKED = 3
LAYERS = 2
DIM = 32
HEADS = 2
LANDMARK = 8
STEPS = 350
BATCH = 32
RATE = 3e-3
_WARM_STEPS = 20  # and no decay: the second hop is found at once, but not always early
_STRINGS = 256  # that measure the accuracy


def landmarks(every: int) -> Topology:
    """i attends to every `every`-th node up to itself."""
    return Topology.of(_landmarks, every)


def _landmarks(i: NDArray[np.int64], num_src: int, every: int) -> Iterable[tuple[ArrayLike, ArrayLike]]:
    """For each landmark, a run of sources for every destination i: the landmark if it is not after i, else empty."""
    return [(mark, np.where(mark <= i, mark + 1, mark)) for mark in range(0, num_src, every)]


TOPOLOGIES: dict[str, Topology] = {
    "causal & window(7)": causal() & window(7),
    "causal & window(7) | landmarks(8)": (causal() & window(7)) | landmarks(8),
    "causal": causal(),
}


def strings(count: int, length: int = LENGTH, seed: int | None = None) -> Tensor:
    """Random letters, int64 [count, length]: new ones, or those of a seed."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(len(LETTERS), (count, length), generator=generator)


class RecallRun(Run):
    """A GPT that names the letter at place `ASKED`, over one of `TOPOLOGIES`. It trains on new letters in every step.
    Its accuracy is that of the second half of the places, which the letter does not reach over the window alone."""

    def __init__(self, expression: str, steps: int, seed: int) -> None:
        super().__init__("recall", expression, min(steps, STEPS), seed, measure="recall")
        self.layers = LAYERS
        topology = TOPOLOGIES[expression]
        self.graph = topology.bind(LENGTH)
        self.model: GPT = self.seeded(lambda: GPT(len(LETTERS), DIM, HEADS, LAYERS, topology, context=LENGTH))

    def trained(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> History:
        model = self.model
        torch.manual_seed(self.seed)
        history = fit(
            model,
            self.optimizer(RATE),
            lambda step: self.loss(),
            Settings(self.steps, rate=lambda step: min((step + 1) / _WARM_STEPS, 1.0), clip=1.0),
            progress=progress,
            checkpoint=checkpoint,
        )
        history.test_accuracy = accuracy(model)
        return history

    def inputs(self) -> tuple[Tensor]:
        return (strings(BATCH),)

    def loss(self) -> Tensor:
        return _loss(self.model, strings(BATCH))

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), rate)

    def error(self) -> float:
        return 1 - accuracy(self.model)

    def evaluate(self, model: Model) -> str:
        return f"recall {accuracy(model):.1%} on {_STRINGS} new strings"


def _loss(model: Model, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, ASKED:]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, ASKED].repeat_interleave(logits.shape[1]))


@torch.no_grad()
def accuracy(model: Model) -> float:
    """The share of right answers in the second half of the places, over the same strings in every call."""
    tokens = strings(_STRINGS, seed=1)
    answers = model.eval()(tokens)[:, LENGTH // 2 :].argmax(-1)
    return (answers == tokens[:, ASKED, None]).float().mean().item()
