"""Node classification on one graph: all training nodes in each step."""

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
        data: features, classes and masks, on one device with the model and the graph.
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
        logits = model(data.x, graph)
        return F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])

    def validate() -> dict[str, float]:
        value, accuracy = node_scores(model, graph, data, data.val_mask)
        return {"loss": value, "accuracy": accuracy}

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


@torch.no_grad()
def node_scores(
    model: nn.Module, graph: Topology | Graph, data: PointClassification, mask: Tensor
) -> tuple[float, float]:
    """Mean cross-entropy in nats and accuracy (0 to 1) on the nodes of a mask."""
    logits, y = model.eval()(data.x, graph)[mask], data.y[mask]
    return F.cross_entropy(logits, y).item(), (logits.argmax(-1) == y).float().mean().item()
