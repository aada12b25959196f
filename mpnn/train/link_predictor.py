"""Link prediction on one graph: all training links in each step, and the usual measures."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpnn import Graph
from mpnn.data.links import LinkSplit
from mpnn.graphs import HeteroGraph
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History, Progress, Settings, fit


def fit_link_predictor(
    model: Any,
    x: Tensor | Mapping[str, Tensor],
    links: LinkSplit,
    optimizer: Optimizer,
    graph: Graph | HeteroGraph | None = None,
    *,
    epochs: int = 200,
    validate_every: int = 5,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains a `mpnn.models.LinkPredictor`. In each step it sees all training links, and as many new pairs without one.

    The model gets the weights of the validation with the highest `auc`.

    Args:
        x: features of the nodes, [N, in_dim]; of several kinds, {kind: [N_kind, in_dim]}.
        links: see `mpnn.data.split_links`.
        graph: the graph that the encoder computes on. Default: `links.graph`. Pass
            `links.graph.with_self_loops()` for encoders such as GCN, and the graph that `split_relation` returns for
            links between two kinds.

    Raises:
        TrainingDiverged, CheckpointError, OSError: as `mpnn.train.loop.fit`.
    """
    known = links.graph if graph is None else graph
    features = [x] if isinstance(x, Tensor) else [*x.values()]
    if checkpoint is not None:
        nodes = sum(map(len, features))
        checkpoint.describe(graph=repr(known), nodes=nodes, optimizer=" ".join(repr(optimizer).split()))
    device = features[0].device
    return fit(
        model,
        optimizer,
        lambda k: model.loss(x, known, links.train, links.draw_absent(links.train.shape[1]).to(device)),
        Settings(epochs, keep="best", validate_every=validate_every),
        validate=lambda: {"AUC": auc(*link_scores(model, x, known, links.val, links.val_absent))},
        progress=progress,
        checkpoint=checkpoint,
    )


@torch.no_grad()
def link_scores(
    model: Any, x: Tensor | Mapping[str, Tensor], graph: Graph | HeteroGraph, *pairs: Tensor
) -> tuple[Tensor, ...]:
    """The logits [L] of each set of pairs [2, L], in evaluation mode."""
    model.eval()
    z = model.encoder(x, graph)
    return tuple(model.score(z, each) for each in pairs)


def auc(links: Tensor, absent: Tensor) -> float:
    """Area under the ROC curve: the share of (link, absent pair) in which the link scores higher; ties count half.

    links [L], absent [A]: scores.
    """
    below = absent.sort().values
    ranks = [torch.searchsorted(below, links, side=side).double() for side in ("left", "right")]
    return (torch.stack(ranks).mean() / len(absent)).item()


def hits(links: Tensor, absent: Tensor, k: int) -> float:
    """Hits@k of the Open Graph Benchmark: the share of links that score higher than the k-th highest absent pair.

    Raises:
        ValueError: there are less than `k` absent pairs.
    """
    if not 1 <= k <= len(absent):
        raise ValueError(f"k must be from 1 to the number of absent pairs, {len(absent)}; got {k}")
    return (links > absent.topk(k).values[-1]).double().mean().item()
