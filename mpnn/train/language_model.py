"""Language models: the next token of random crops of a text."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mpnn.data import batches
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History, Precision, Progress, Settings, fit, warm_cosine

_VALIDATION_CROPS = 256


def fit_language_model(
    model: Any,
    train: Tensor,
    val: Tensor,
    steps: int,
    *,
    batch: int = 12,
    lr: float = 1e-3,
    validate_every: int = 100,
    precision: Precision = "no",
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains a language model to predict the next token in random crops of context length.

    AdamW with weight decay 0.1 on matrices, gradients clipped to norm 1, and a learning rate that increases linearly
    over the first 5% of the steps and then decreases along a cosine to 10%. Runs with the same `torch.manual_seed` are
    equal.

    Args:
        model: a module with `context` and `loss(tokens, targets)`, such as `mpnn.models.GPT`; it is trained in place.
        train, val: tokens, int64 [length].
        batch: crops per step. lr: the maximum learning rate.
        validate_every: steps between validations; the last step is always validated.
        precision: "bf16" or "fp16" for mixed precision, see `mpnn.train.loop.Settings`.
        checkpoint: as for `mpnn.train.loop.fit`.

    Returns:
        The history, with losses in nats per token.

    Raises:
        ValueError: if steps, batch or validate_every is below 1, or `val` is too short.
        TrainingDiverged, CheckpointError, OSError: as `mpnn.train.loop.fit`.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1; got {batch}")
    settings = Settings(steps, rate=warm_cosine(steps), clip=1.0, precision=precision, validate_every=validate_every)
    _require_longer_than_context(val, model)  # before training instead of in the first validation
    device = next(model.parameters()).device
    if checkpoint is not None:
        checkpoint.describe(steps=steps, batch=batch, lr=lr, train=len(train), val=len(val))

    def loss(k: int) -> Tensor:
        tokens, targets = (t.to(device) for t in batches(train, model.context, batch))
        return model.loss(tokens, targets)

    def validate() -> dict[str, float]:
        return {"loss": language_model_loss(model, val, batch)}

    return fit(model, adamw(model, lr), loss, settings, validate=validate, progress=progress, checkpoint=checkpoint)


@torch.no_grad()
def language_model_loss(model: Any, tokens: Tensor, batch: int = 12, crops: int = _VALIDATION_CROPS) -> float:
    """The loss in nats per token over at most this many crops, spread evenly over `tokens` int64 [length]: the same
    ones in every call."""
    _require_longer_than_context(tokens, model)
    model.eval()
    device = next(model.parameters()).device
    most = min(crops, len(tokens) // model.context)
    starts = torch.linspace(0, len(tokens) - model.context - 1, most).long()
    texts = tokens[starts[:, None] + torch.arange(model.context + 1)].to(device)
    parts = [(model.loss(part[:, :-1], part[:, 1:]), len(part)) for part in texts.split(batch)]
    return sum(loss.item() * count for loss, count in parts) / most


def _require_longer_than_context(tokens: Tensor, model: Any) -> None:
    if len(tokens) <= model.context:
        raise ValueError(f"validation needs more than {model.context} tokens, the model's context; got {len(tokens)}")


def adamw(model: nn.Module, lr: float) -> AdamW:
    """AdamW with weight decay for matrices and not for vectors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.99))
