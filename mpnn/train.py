"""Two training loops, shared by the command line and the examples: characters in a row, and nodes of one graph.

They print nothing. What happens in training is told to a `progress` function after each step, and returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from mpnn.data import batches
from mpnn.graph import Graph
from mpnn.topology import Topology

_VALIDATION_CROPS = 256


@dataclass
class History:
    """What training measured.

    Args:
        train_loss, seconds: one number for each step (for nodes, a step is an epoch). `seconds` is training alone.
        val_step, val_loss: one number for each validation; `val_step` counts the steps before it.
        val_accuracy, test_accuracy: of nodes; the test is taken once, with the weights that training ends with.
    """

    train_loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    val_step: list[int] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    val_accuracy: list[float] = field(default_factory=list)
    test_accuracy: float | None = None

    @property
    def seconds_per_step(self) -> float:
        """The median, which the first steps (allocation, binding of graphs) do not distort."""
        return median(self.seconds)


Progress = Callable[[int, History], Any]
"""Called as `progress(steps_done, history)` after every step."""


class LanguageModel(Protocol):
    """What `fit_language_model` needs of a module; `mpnn.models.GPT` is one."""

    context: int

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


class LabelledNodes(Protocol):
    """Nodes to classify: x [N, F], y int64 [N], and bool masks [N]; what `mpnn.data.cora()` and `digits()` return."""

    @property
    def x(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...
    @property
    def train_mask(self) -> Tensor: ...
    @property
    def val_mask(self) -> Tensor: ...
    @property
    def test_mask(self) -> Tensor: ...


def fit_language_model(
    model: LanguageModel,
    train: Tensor,
    val: Tensor,
    steps: int,
    *,
    batch: int = 12,
    lr: float = 1e-3,
    validate_every: int = 100,
    progress: Progress | None = None,
) -> History:
    """Trains a language model to predict the next token of random crops as long as its context.

    AdamW with weight decay 0.1 on matrices, gradients clipped to length 1, and a learning rate that climbs for the
    first twentieth of the steps and then falls along a cosine to a tenth. `torch.manual_seed` repeats a run.

    Args:
        model: a module with `context` and `loss(tokens, targets)`; it is trained in place.
        train, val: tokens, int64 [length].
        batch: crops in each step. lr: the highest learning rate.
        validate_every: steps between validations; the last step is always followed by one.

    Returns:
        The history, with losses in nats per token.
    """
    assert isinstance(model, nn.Module)
    if min(steps, batch, validate_every) < 1:
        raise ValueError(
            f"steps, batch and validate_every must be at least 1; got {steps}, {batch} and {validate_every}"
        )
    _refuse_short(val, model)  # now, rather than after the first hundred steps
    optimizer = _adamw(model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_cosine(step, steps))
    device = next(model.parameters()).device
    history = History()
    for step in range(1, steps + 1):
        began = perf_counter()
        tokens, targets = (t.to(device) for t in batches(train, model.context, batch))
        loss = model.train().loss(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.train_loss.append(loss.item())
        history.seconds.append(perf_counter() - began)
        if step % validate_every == 0 or step == steps:
            history.val_step.append(step)
            history.val_loss.append(language_model_loss(model, val, batch))
        if progress is not None:
            progress(step, history)
    return history


@torch.no_grad()
def language_model_loss(model: LanguageModel, tokens: Tensor, batch: int = 12) -> float:
    """The loss in nats per token over up to 256 crops, spread evenly over `tokens` int64 [length]: always the same."""
    assert isinstance(model, nn.Module)
    _refuse_short(tokens, model)
    model.eval()
    device = next(model.parameters()).device
    most = min(_VALIDATION_CROPS, len(tokens) // model.context)
    starts = torch.linspace(0, len(tokens) - model.context - 1, most).long()
    crops = tokens[starts[:, None] + torch.arange(model.context + 1)].to(device)
    parts = [(model.loss(part[:, :-1], part[:, 1:]), len(part)) for part in crops.split(batch)]
    return sum(loss.item() * count for loss, count in parts) / most


def _refuse_short(tokens: Tensor, model: LanguageModel) -> None:
    if len(tokens) <= model.context:
        raise ValueError(f"validation needs more than {model.context} tokens, the model's context; got {len(tokens)}")


def fit_node_classifier(
    model: nn.Module,
    graph: Topology | Graph,
    data: LabelledNodes,
    optimizer: Optimizer,
    *,
    epochs: int = 200,
    patience: int | None = None,
    progress: Progress | None = None,
) -> History:
    """Trains `model(x, graph)` on the training nodes, all of them in each step.

    Without `patience` all epochs are run and the last weights count (Kipf & Welling 2017, but for their early stop,
    which 200 epochs hardly ever meet). With it, training ends after so many epochs in a row that improved neither the
    validation loss nor the validation accuracy, and the model gets back its weights of the last epoch that was as good
    as any in both (Velickovic et al. 2018).

    Args:
        data: features, classes and masks, on one device with the model and the graph.
        optimizer: of the model's parameters; the models in `mpnn.models` have their papers' as `model.optimizer()`.
    """
    if patience is not None and patience < 1:
        raise ValueError(f"patience must be at least 1 epoch, or None for all of them; got {patience}")
    history = History()
    best = deepcopy(model.state_dict())
    idle = 0
    for epoch in range(1, epochs + 1):
        began = perf_counter()
        logits = model.train()(data.x, graph)
        loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.train_loss.append(loss.item())
        history.seconds.append(perf_counter() - began)
        val_loss, val_accuracy = node_scores(model, graph, data, data.val_mask)
        lower = val_loss <= min(history.val_loss, default=math.inf)
        higher = val_accuracy >= max(history.val_accuracy, default=0.0)
        history.val_step.append(epoch)
        history.val_loss.append(val_loss)
        history.val_accuracy.append(val_accuracy)
        if progress is not None:
            progress(epoch, history)
        if patience is None:
            continue
        if lower and higher:
            best = deepcopy(model.state_dict())
        idle = 0 if lower or higher else idle + 1
        if idle == patience:
            break
    if patience is not None:
        model.load_state_dict(best)
    _, history.test_accuracy = node_scores(model, graph, data, data.test_mask)
    return history


@torch.no_grad()
def node_scores(model: nn.Module, graph: Topology | Graph, data: LabelledNodes, mask: Tensor) -> tuple[float, float]:
    """Mean cross-entropy in nats and accuracy (0 to 1) on the nodes of a mask."""
    logits, y = model.eval()(data.x, graph)[mask], data.y[mask]
    return F.cross_entropy(logits, y).item(), (logits.argmax(-1) == y).float().mean().item()


def _adamw(model: nn.Module, lr: float) -> AdamW:
    """Matrices decay, vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.99))


def _warm_cosine(step: int, steps: int) -> float:
    """The fraction of the highest learning rate to use after `step` of `steps`."""
    warm = max(steps // 20, 1)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
