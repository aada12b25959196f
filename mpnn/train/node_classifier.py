"""Nodes of one graph with targets: all training nodes in each step."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mpnn import Graph, Topology
from mpnn.data import PointClassification
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History, Precision, Progress, Settings, fit


def fit_node_classifier(
    model: nn.Module,
    graph: Topology | Graph,
    data: PointClassification,
    optimizer: Optimizer,
    *,
    epochs: int = 200,
    patience: int | None = None,
    precision: Precision = "no",
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains `model(x, graph)` on all training nodes in each step.

    Without `patience`, all epochs run and the last weights are used (Kipf & Welling 2017, without their early stopping,
    which rarely occurs within 200 epochs). With `patience`, training stops after that many consecutive epochs without
    improvement of validation loss or validation accuracy. The model then gets the weights of the last epoch in which
    both were at least as good as in all epochs before (Velickovic et al. 2018).

    Args:
        data: features, targets and masks, on one device with the model and the graph. The dtype of `y` decides what is
            learned, see `node_loss`.
        optimizer: for the model's parameters, such as `model.optimizer()` of the models in `mpnn.models`, which follows
            their papers.
        precision: "bf16" or "fp16" for mixed precision, see `mpnn.train.loop.Settings`.
        checkpoint: as for `mpnn.train.loop.fit`.

    Raises:
        ValueError: if epochs or patience is below 1, or `train_mask` selects no node.
        TrainingDiverged, CheckpointError, OSError: as `mpnn.train.loop.fit`.
    """
    if not data.train_mask.any():
        raise ValueError("train_mask selects no node, so there is nothing to train on")
    settings = Settings(epochs, precision=precision, patience=patience, keep="last" if patience is None else "best")
    if checkpoint is not None:
        checkpoint.describe(graph=repr(graph), nodes=len(data.y), optimizer=" ".join(repr(optimizer).split()))

    def loss(k: int) -> Tensor:
        return node_loss(model(data.x, graph)[data.train_mask], data.y[data.train_mask])

    def validate() -> dict[str, float]:
        value, score = node_scores(model, graph, data, data.val_mask)
        return {"loss": value, "accuracy": score}

    history = fit(
        model,
        optimizer,
        loss,
        settings,
        validate=validate if data.val_mask.any() else None,
        progress=progress,
        checkpoint=checkpoint,
    )
    _, history.test_accuracy = node_scores(model, graph, data, data.test_mask)
    return history


def node_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """The loss of outputs [N, C]: cross-entropy in nats of classes, int64 [N], and of labels, bool [N, C] (mean over
    labels); mean squared error of numbers [N, C]."""
    if y.dtype == torch.int64:
        return F.cross_entropy(outputs, y)
    if y.dtype == torch.bool:
        return F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype))
    return F.mse_loss(outputs, y)


def node_score(outputs: Tensor, y: Tensor) -> float:
    """How good outputs [N, C] are, 1 at best: the accuracy of classes, int64 [N]; F1 over all labels, bool [N, C];
    R^2 of numbers [N, C], mean over columns."""
    if y.dtype == torch.int64:
        return (outputs.argmax(-1) == y).float().mean().item()
    if y.dtype == torch.bool:
        hits = ((outputs > 0) & y).sum()
        claims = (outputs > 0).sum() + y.sum()
        return (2 * hits / claims.clamp(min=1)).item()
    spread = (y - y.mean(0)).square().sum(0).clamp(min=torch.finfo(y.dtype).eps)
    return (1 - (outputs - y).square().sum(0) / spread).mean().item()


@torch.no_grad()
def node_scores(
    model: nn.Module, graph: Topology | Graph, data: PointClassification, mask: Tensor
) -> tuple[float, float]:
    """`node_loss` and `node_score` on the nodes of a mask."""
    outputs = model.eval()(data.x, graph)[mask]
    y = data.y[mask]
    return node_loss(outputs, y).item(), node_score(outputs, y)
