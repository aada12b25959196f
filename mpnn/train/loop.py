"""The one training loop, on Hugging Face's accelerate.

accelerate casts to lower precision, scales gradients, accumulates them, and shares them among processes. This file adds
what an experiment needs besides: a checkpoint from which a killed run ends with the same bits, an end at NaN, and the
best weights.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpnn.graph.registry import install
from mpnn.train.checkpoint import Checkpoint, CheckpointError


@dataclass
class History:
    """Measurements during training.

    Args:
        train_loss, seconds: one number for each step. `seconds` excludes validation.
        val_step: the number of steps before each validation.
        val: the results of all validations, by the name of the measure.
        test_accuracy: for nodes only, measured once, with the final weights; F1 of labels, R^2 of numbers.
    """

    train_loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    val_step: list[int] = field(default_factory=list)
    val: dict[str, list[float]] = field(default_factory=dict)
    test_accuracy: float | None = None

    @property
    def val_loss(self) -> list[float]:
        return self.val.get("loss", [])

    @property
    def val_accuracy(self) -> list[float]:
        return self.val.get("accuracy", [])

    @property
    def seconds_per_step(self) -> float:
        """The median, which slow first steps (allocation, binding of graphs) do not affect."""
        return median(self.seconds)


Precision = Literal["no", "bf16", "fp16"]

Progress = Callable[[int, History], Any]
"""Called as `progress(steps_done, history)` after every step. If it raises an exception, training writes the checkpoint
of that step and ends."""


class TrainingDiverged(ArithmeticError):
    """The loss is NaN or infinite. Training stops before it updates the weights, and writes no further checkpoint."""


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        steps: the number of optimizer steps.
        rate: the learning rate of a step, as a fraction of the optimizer's: a function of the steps done before.
        clip: the maximum norm of the gradient, or None.
        accumulate: batches per step; the gradient is their mean.
        precision: "no" for the precision of the weights, or "bf16" or "fp16" for mixed precision.
        validate_every: steps between validations; the last step is always validated.
        patience: validations without improvement of any measure after which training stops, or None.
        keep: whether the model ends with the weights of the last step or those of the best validation.

    Raises:
        ValueError: if steps, accumulate, validate_every or patience is below 1.
    """

    steps: int
    rate: Callable[[int], float] = lambda step: 1.0
    clip: float | None = None
    accumulate: int = 1
    precision: Precision = "no"
    validate_every: int = 1
    patience: int | None = None
    keep: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "validate_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[int], Tensor],
    settings: Settings,
    *,
    validate: Callable[[], Mapping[str, float]] | None = None,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Minimizes a loss, on the device of the model.

    Started by `accelerate launch` or `torchrun`, each process computes its own batches (its random generator has the
    seed of the first plus its number), and all processes have the same weights: with n processes, a step has n times as
    many batches. `progress` is called in every process; only the first writes checkpoints.

    Args:
        model: trained in place.
        optimizer: for parameters of the model.
        loss: `loss(k)` is the scalar loss of the model on batch k, counted from 0. Batches must depend on k and torch's
            random generators only, so that a resumed run sees the same ones.
        validate: returns measures of the model, such as {"loss": 0.7, "accuracy": 0.9}. A measure whose name ends in
            "loss" should fall, any other should rise. A validation is the best if no measure was better before.
        checkpoint: if its file exists, training continues from it. It is written regularly during training.

    Raises:
        TrainingDiverged: if the loss of a step, or a measure of the validation after it, is NaN or infinite.
        CheckpointError: if the checkpoint is damaged or belongs to another training run.
        OSError: if the checkpoint cannot be written. The previous one then remains.
        ImportError: if accelerate is not installed.
    """
    engine = _engine(next(model.parameters()).device, settings)
    alone = engine.num_processes == 1
    objective, stepper = engine.prepare(_Objective(model, loss), optimizer, device_placement=[not alone, not alone])
    rates = [group["lr"] for group in optimizer.param_groups]
    training = _Training(model, optimizer, engine, checkpoint, settings)
    history = training.history
    optimizer.zero_grad()
    while training.steps < settings.steps and not training.exhausted:
        start = perf_counter()
        step = training.steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * settings.rate(step)
        rate = optimizer.param_groups[0]["lr"]
        model.train()
        losses = []
        for k in range(step * settings.accumulate, (step + 1) * settings.accumulate):
            with engine.accumulate(objective):
                value = objective(k)
                mean = value.detach() if alone else engine.reduce(value.detach(), "mean")
                losses.append(_require_finite("loss", mean.item(), step + 1, rate))
                engine.backward(value)
                if settings.clip is not None and engine.sync_gradients:
                    engine.clip_grad_norm_(objective.parameters(), settings.clip)
                stepper.step()
                stepper.zero_grad()
        history.train_loss.append(sum(losses) / len(losses))
        history.seconds.append(perf_counter() - start)
        last = training.steps == settings.steps
        if validate is not None and (last or training.steps % settings.validate_every == 0):
            training.record({k: _require_finite(f"validation {k}", v, step + 1, rate) for k, v in validate().items()})
        training.end_step(progress)
    if settings.keep == "best" and training.best is not None:
        model.load_state_dict(training.best)
    return history


def require_accelerate() -> None:
    """Raises ImportError, which says how to get it, if accelerate is not installed."""
    if find_spec("accelerate") is None:
        raise ImportError(f"training needs accelerate, which is not installed; run: {install('train')}")


def _engine(device: torch.device, settings: Settings) -> Any:
    """An `accelerate.Accelerator` on this kind of device."""
    require_accelerate()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    options = {"mixed_precision": settings.precision, "gradient_accumulation_steps": settings.accumulate}
    try:
        engine = Accelerator(cpu=device.type == "cpu", **options)
    except ValueError:  # accelerate keeps one precision and one kind of device for the whole process
        engine = None
    if engine is None or engine.device.type != device.type:
        AcceleratorState._reset_state(reset_partial_state=True)
        engine = Accelerator(cpu=device.type == "cpu", **options)
    if engine.process_index:
        torch.manual_seed(torch.initial_seed() + engine.process_index)
    return engine


class _Objective(nn.Module):
    """The loss as a module: accelerate casts what runs in the forward pass of a module, and shares its gradients."""

    def __init__(self, model: nn.Module, loss: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, k: int) -> Tensor:
        return self._loss(k)


class _Training:
    """The complete state of a training run, so that a checkpoint contains all of it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        engine: Any,
        checkpoint: Checkpoint | None,
        settings: Settings,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.history = History()
        self.best: dict[str, Tensor] | None = None
        self.idle = 0
        self._engine = engine
        self._checkpoint = checkpoint
        self._settings = settings
        self._names = {name: value for name, value in asdict(settings).items() if name != "rate"}
        self._names["processes"] = engine.num_processes
        if checkpoint is not None and (state := checkpoint.read(self._names)) is not None:
            self._load(state, checkpoint)

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return len(self.history.train_loss)

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out."""
        return self.idle == self._settings.patience

    def record(self, measures: dict[str, float]) -> None:
        """Appends a validation to the history, and copies the weights if it is the best."""
        if not measures:
            return
        self.history.val_step.append(self.steps)
        for name, value in measures.items():
            self.history.val.setdefault(name, []).append(value)
        best = [_is_best(name, values) for name, values in self.history.val.items()]
        self.idle = 0 if any(best) else self.idle + 1
        if all(best):
            self.best = deepcopy(self.model.state_dict())

    def end_step(self, progress: Progress | None) -> None:
        """Calls `progress`, and writes the checkpoint if it is due, after the last step, and if `progress` raises."""
        try:
            if progress is not None:
                progress(self.steps, self.history)
        except BaseException:
            if self._engine.num_processes == 1:  # all processes write together, and others may not have stopped
                self._save()
            raise
        if self.steps == self._settings.steps or self.exhausted or self._due():
            self._save()

    def _due(self) -> bool:
        """Whether the checkpoint is due in any process."""
        if self._checkpoint is None:
            return False
        if self._engine.num_processes == 1:
            return self._checkpoint.due
        device = next(self.model.parameters()).device
        return bool(self._engine.reduce(torch.tensor(float(self._checkpoint.due), device=device), "sum"))

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        random = [torch.get_rng_state()]
        random_cuda = [torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []]
        if self._engine.num_processes > 1:
            from accelerate.utils import gather_object

            random, random_cuda = gather_object(random), gather_object(random_cuda)
        scaler = self._engine.scaler
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "history": asdict(self.history),
            "best": self.best,
            "idle": self.idle,
            "random": random,
            "random_cuda": random_cuda,
        }
        if self._engine.process_index == 0:
            self._checkpoint.write(self.steps, state, self._names)

    def _load(self, state: dict[str, Any], checkpoint: Checkpoint) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self._engine.scaler is not None:
                self._engine.scaler.load_state_dict(state["scaler"])
            self.history = History(**state["history"])
            self.best = state["best"]
            self.idle = state["idle"]
            number = self._engine.process_index
            torch.set_rng_state(state["random"][number])
            for device, random in enumerate(state["random_cuda"][number][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(random, device)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise CheckpointError(f"{checkpoint.path} is not a checkpoint of this model and optimizer: {why}") from None


def _is_best(name: str, values: list[float]) -> bool:
    return values[-1] == (min(values) if name.endswith("loss") else max(values))


def _require_finite(name: str, loss: float, step: int, rate: float) -> float:
    if not math.isfinite(loss):
        raise TrainingDiverged(
            f"the {name} of step {step} is {loss}, with learning rate {rate:.3g}; try a lower learning rate, "
            "and look for NaN and infinity in the input"
        )
    return loss


def warm_cosine(steps: int) -> Callable[[int], float]:
    """A rate for `Settings`: rises linearly over the first 5% of the steps, then falls along a cosine to 10%."""
    warm = max(steps // 20, 1)

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))

    return rate


def shuffled(count: int, batch: int, k: int, seed: int = 0) -> Tensor:
    """The indices of batch `k` in epochs that each visit all `count` samples once, in an order of their own: int64.

    The last batch of an epoch may be smaller. It depends on the arguments only, so a resumed run sees the same batches.
    """
    per_epoch = math.ceil(count / batch)
    epoch, part = divmod(k, per_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[part * batch : (part + 1) * batch]
