"""Two training loops for the command line and the examples: language models, and node classification on one graph.

They do not print. They call a `progress` function after each step and return the history. With a `Checkpoint`, a
killed run resumes from its last checkpoint and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from mpnn.data import batches
from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.train.checkpoint import Checkpoint, CheckpointError

_VALIDATION_CROPS = 256


@dataclass
class History:
    """Measurements during training.

    Args:
        train_loss, seconds: one number for each step (for nodes, a step is an epoch). `seconds` excludes validation.
        val_step, val_loss: one number for each validation; `val_step` is the number of steps before it.
        val_accuracy, test_accuracy: for nodes only; `test_accuracy` is measured once, with the final weights.
    """

    train_loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    val_step: list[int] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    val_accuracy: list[float] = field(default_factory=list)
    test_accuracy: float | None = None

    @property
    def seconds_per_step(self) -> float:
        """The median, which slow first steps (allocation, binding of graphs) do not affect."""
        return median(self.seconds)


Progress = Callable[[int, History], Any]
"""Called as `progress(steps_done, history)` after every step. If it raises an exception, training writes the checkpoint
of that step and ends."""


class TrainingDiverged(ArithmeticError):
    """The loss is NaN or infinite. Training stops before it updates the weights, and writes no further checkpoint."""


class LanguageModel(Protocol):
    """The interface that `fit_language_model` needs, such as `mpnn.models.GPT`."""

    context: int

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


class LabelledNodes(Protocol):
    """Nodes to classify: x [N, F], y int64 [N], and bool masks [N], such as `mpnn.data.cora()` and `digits()`."""

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
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains a language model to predict the next token in random crops of context length.

    AdamW with weight decay 0.1 on matrices, gradients clipped to norm 1, and a learning rate that increases linearly
    over the first 5% of the steps and then decreases along a cosine to 10%. Runs with the same `torch.manual_seed` are
    equal.

    Args:
        model: a module with `context` and `loss(tokens, targets)`; it is trained in place.
        train, val: tokens, int64 [length].
        batch: crops per step. lr: the maximum learning rate.
        validate_every: steps between validations; the last step is always validated.
        checkpoint: if its file exists, training continues from it. It is written regularly during training.

    Returns:
        The history, with losses in nats per token.

    Raises:
        TrainingDiverged: if the loss of a step, or of the validation after it, is NaN or infinite.
        ValueError: if steps, batch or validate_every is below 1, or `val` is too short.
        CheckpointError: if the checkpoint is damaged or belongs to another training run.
        OSError: if the checkpoint cannot be written. The previous one then remains.
    """
    assert isinstance(model, nn.Module)
    if min(steps, batch, validate_every) < 1:
        raise ValueError(
            f"steps, batch and validate_every must be at least 1; got {steps}, {batch} and {validate_every}"
        )
    _require_longer_than_context(val, model)  # before training instead of in the first validation
    optimizer = _adamw(model, lr)
    device = next(model.parameters()).device
    settings = {"steps": steps, "batch": batch, "lr": lr, "validate_every": validate_every}
    training = _Training(model, optimizer, checkpoint, progress, settings | {"train": len(train), "val": len(val)})
    history = training.history
    for step in range(training.steps + 1, steps + 1):
        start = perf_counter()
        rate = lr * _warm_cosine(step - 1, steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens, targets = (t.to(device) for t in batches(train, model.context, batch))
        loss = model.train().loss(tokens, targets)
        history.train_loss.append(_require_finite("loss", loss.item(), step, rate))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.seconds.append(perf_counter() - start)
        if step % validate_every == 0 or step == steps:
            history.val_step.append(step)
            val_loss = language_model_loss(model, val, batch)
            history.val_loss.append(_require_finite("validation loss", val_loss, step, rate))
        training.end_step(last=step == steps)
    return history


@torch.no_grad()
def language_model_loss(model: LanguageModel, tokens: Tensor, batch: int = 12) -> float:
    """The loss in nats per token over up to 256 crops, spread evenly over `tokens` int64 [length] (deterministic)."""
    assert isinstance(model, nn.Module)
    _require_longer_than_context(tokens, model)
    model.eval()
    device = next(model.parameters()).device
    most = min(_VALIDATION_CROPS, len(tokens) // model.context)
    starts = torch.linspace(0, len(tokens) - model.context - 1, most).long()
    crops = tokens[starts[:, None] + torch.arange(model.context + 1)].to(device)
    parts = [(model.loss(part[:, :-1], part[:, 1:]), len(part)) for part in crops.split(batch)]
    return sum(loss.item() * count for loss, count in parts) / most


def _require_longer_than_context(tokens: Tensor, model: LanguageModel) -> None:
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
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains `model(x, graph)` on all training nodes in each step.

    Without `patience`, all epochs run and the last weights are used (Kipf & Welling 2017, without their early stopping,
    which rarely occurs within 200 epochs). With `patience`, training stops after that many consecutive epochs without
    improvement of validation loss or validation accuracy. The model then gets the weights of the last epoch in which
    both were at least as good as in all epochs before (Velickovic et al. 2018).

    Args:
        data: features, classes and masks, on one device with the model and the graph.
        optimizer: for the model's parameters, such as `model.optimizer()` of the models in `mpnn.models`, which follows
            their papers.
        checkpoint: if its file exists, training continues from it. It is written regularly during training.

    Raises:
        TrainingDiverged: if the loss of a step, or of the validation after it, is NaN or infinite.
        ValueError: if patience is below 1, or `train_mask` selects no node.
        CheckpointError: if the checkpoint is damaged or belongs to another training run.
        OSError: if the checkpoint cannot be written. The previous one then remains.
    """
    if patience is not None and patience < 1:
        raise ValueError(f"patience must be at least 1 epoch, or None for all of them; got {patience}")
    if not data.train_mask.any():
        raise ValueError("train_mask selects no node, so there is nothing to train on")
    settings = {"graph": repr(graph), "nodes": len(data.y), "epochs": epochs, "patience": patience}
    settings["optimizer"] = " ".join(repr(optimizer).split())
    training = _Training(model, optimizer, checkpoint, progress, settings)
    history = training.history
    if patience is not None and training.best is None:
        training.best = deepcopy(model.state_dict())
    while training.steps < epochs and training.idle != patience:
        start, epoch, rate = perf_counter(), training.steps + 1, optimizer.param_groups[0]["lr"]
        logits = model.train()(data.x, graph)
        loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        history.train_loss.append(_require_finite("loss", loss.item(), epoch, rate))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.seconds.append(perf_counter() - start)
        val_loss, val_accuracy = node_scores(model, graph, data, data.val_mask)
        if data.val_mask.any():
            _require_finite("validation loss", val_loss, epoch, rate)
        lower = val_loss <= min(history.val_loss, default=math.inf)
        higher = val_accuracy >= max(history.val_accuracy, default=0.0)
        history.val_step.append(epoch)
        history.val_loss.append(val_loss)
        history.val_accuracy.append(val_accuracy)
        if patience is not None:
            training.idle = 0 if lower or higher else training.idle + 1
            if lower and higher:
                training.best = deepcopy(model.state_dict())
        training.end_step(last=epoch == epochs or training.idle == patience)
    if training.best is not None:
        model.load_state_dict(training.best)
    _, history.test_accuracy = node_scores(model, graph, data, data.test_mask)
    return history


@torch.no_grad()
def node_scores(model: nn.Module, graph: Topology | Graph, data: LabelledNodes, mask: Tensor) -> tuple[float, float]:
    """Mean cross-entropy in nats and accuracy (0 to 1) on the nodes of a mask."""
    logits, y = model.eval()(data.x, graph)[mask], data.y[mask]
    return F.cross_entropy(logits, y).item(), (logits.argmax(-1) == y).float().mean().item()


class _Training:
    """The complete state of a training run, so that a checkpoint contains all of it.

    Args:
        settings: settings that must be equal in the run that wrote the checkpoint and the run that continues from it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        checkpoint: Checkpoint | None,
        progress: Progress | None,
        settings: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.history = model, optimizer, History()
        self.best: dict[str, Tensor] | None = None
        self.idle = 0
        self._checkpoint, self._progress, self._settings = checkpoint, progress, settings
        if checkpoint is not None and (state := checkpoint.read(settings)) is not None:
            self._load(state, checkpoint)

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return len(self.history.train_loss)

    def end_step(self, last: bool) -> None:
        """Calls `progress`, and writes the checkpoint if it is due, after the last step, and if `progress` raises."""
        try:
            if self._progress is not None:
                self._progress(self.steps, self.history)
        except BaseException:
            self._save()
            raise
        if last or (self._checkpoint is not None and self._checkpoint.due):
            self._save()

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": asdict(self.history),
            "best": self.best,
            "idle": self.idle,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }
        self._checkpoint.write(self.steps, state, self._settings)

    def _load(self, state: dict[str, Any], checkpoint: Checkpoint) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.history, self.best, self.idle = History(**state["history"]), state["best"], state["idle"]
            torch.set_rng_state(state["random"])
            for device, random in enumerate(state["random_cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(random, device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise CheckpointError(f"{checkpoint.path} is not a checkpoint of this model and optimizer: {why}") from None


def _require_finite(name: str, loss: float, step: int, rate: float) -> float:
    if not math.isfinite(loss):
        raise TrainingDiverged(
            f"the {name} of step {step} is {loss}, with learning rate {rate:.3g}; try a lower learning rate, "
            "and look for NaN and infinity in the input"
        )
    return loss


def _adamw(model: nn.Module, lr: float) -> AdamW:
    """AdamW with weight decay for matrices and not for vectors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.99))


def _warm_cosine(step: int, steps: int) -> float:
    """The learning rate after `step` of `steps`, as a fraction of the maximum."""
    warm = max(steps // 20, 1)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
