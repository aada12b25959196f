"""Models learn: after a few steps, their own loss is small on a task that needs what the model is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

from mpnn import Graph, graphs, models

SIZES = models.BertConfig(
    vocabulary=20, dim=16, layers=1, heads=2, hidden=32, context=12, dropout=0.0, attention_dropout=0.0
)
BOTH = models.TransformerConfig(14, dim=32, heads=4, hidden=64, encoder_layers=1, decoder_layers=1, dropout=0.0)
TOKENS = torch.tensor([[4, 5, 6, 7], [8, 9, 3, 3]])
TINY_VIT = models.ViTConfig(image=12, patch=4, dim=16, layers=2, heads=2, hidden=32)
TINY_SWIN = models.SwinConfig(image=16, patch=4, dim=8, depths=(2, 1), heads=(2, 2), window=2)
TINY_MAE = models.MAEConfig(
    12, 4, dim=16, layers=1, heads=2, hidden=32, decoder_dim=8, decoder_layers=1, decoder_heads=2
)


class Task(NamedTuple):
    make: Callable[[], Any]
    draw: Callable[[], tuple[Any, ...]]
    """What the loss is called with."""
    most: float
    """The loss after the last step."""
    steps: int = 60
    lr: float = 0.01


def reversed_sentences(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first word of the target is the last of the source."""
    source = torch.randint(low, high, (8, 4))
    return source, F.pad(F.pad(source.flip(1), (1, 0), value=1), (0, 1), value=2)


def ring(n: int) -> Graph:
    return graphs.from_edges(torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])).undirected()


def rings() -> tuple[Any, ...]:
    """Rings of three and of four: nodes look alike, but walks return at different times."""
    sizes = [3, 4, 3, 4]
    return torch.ones(14, 1), graphs.batch(map(ring, sizes)), torch.tensor([0, 1, 0, 1]), sizes


def two_rings() -> tuple[Any, ...]:
    """Which ring a node is of."""
    subgraphs = models.intimate_subgraphs(graphs.batch([ring(5), ring(7)]), 4)
    return torch.randn(12, 5), subgraphs, torch.tensor([0] * 5 + [1] * 7)


def products() -> tuple[Any, ...]:
    x = torch.randn(60, 12)
    return x, (x[:, 0] * x[:, 5] > 0).long()


TASKS: dict[str, Task] = {
    "GPT": Task(
        lambda: models.GPT(11, 16, 4, 2, context=24),
        lambda: ((torch.arange(24) % 11).expand(4, -1), (torch.arange(1, 25) % 11).expand(4, -1)),
        0.1,
    ),
    "MaskedLM": Task(lambda: models.MaskedLM(models.Bert(SIZES)), lambda: (TOKENS, TOKENS.roll(-1, 1)), 0.1),
    "MaskedLM, causal": Task(
        lambda: models.MaskedLM(models.Bert(SIZES, graphs.causal())), lambda: (TOKENS, TOKENS.roll(1, 1)), 0.1
    ),
    "SentenceClassifier": Task(
        lambda: models.SentenceClassifier(models.Bert(SIZES), 3), lambda: (TOKENS, torch.tensor([2, 0])), 0.1
    ),
    "TokenClassifier": Task(lambda: models.TokenClassifier(models.Bert(SIZES), 2), lambda: (TOKENS, TOKENS % 2), 0.1),
    "XLNet": Task(  # sentences of one token, repeated: after the first in the order, all the others are certain
        lambda: models.XLNet(models.XLNetConfig(5, 16, layers=1, heads=2, hidden=32, dropout=0.0)),
        lambda: (torch.randint(5, (16, 1)).expand(-1, 6),),
        0.9,  # of which the first, one of five, is a part
    ),
    # of which labels that are smoothed make the most
    "Transformer": Task(lambda: models.Transformer(BOTH), lambda: reversed_sentences(3, 14), 0.8),
    "Seq2Seq": Task(lambda: models.Seq2Seq(12, 12, embedding=16, dim=32), lambda: reversed_sentences(3, 12), 0.5),
    "MAE": Task(lambda: models.MAE(TINY_MAE), lambda: (torch.rand(4, 3, 12, 12), torch.rand(4, 9)), 0.2, 15),
    "ImageClassifier over neighbors": Task(
        lambda: models.ImageClassifier(models.ViT(TINY_VIT, graphs.neighborhood(3, 3, 1), pooler=8), classes=2),
        lambda: (torch.randn(8, 3, 12, 12), torch.tensor([0, 1] * 4)),
        0.35,
        15,
    ),
    "ImageClassifier over windows": Task(
        lambda: models.ImageClassifier(models.Swin(TINY_SWIN), classes=2),
        lambda: (torch.randn(8, 3, 16, 16), torch.tensor([0, 1] * 4)),
        0.35,
        15,
    ),
    "GPS": Task(lambda: models.GPS(1, 2, 12, 3, layers=1, walk=4, dropout=0.0), rings, 0.1, 40),
    "GraphBert": Task(lambda: models.GraphBert(5, 2, 8, 2, dropout=0.0, attention_dropout=0.0), two_rings, 0.1),
    "Graphormer": Task(
        lambda: models.Graphormer(5, 1, dim=12, heads=3, layers=1, dropout=0.0),
        lambda: (torch.randn(11, 5), [ring(6), ring(4), ring(1)], torch.tensor([[1.0], [-1.0], [3.0]])),
        1.0,
        30,
    ),
    "MAGNA": Task(
        lambda: models.MAGNA(5, 4, 12, 3, 2, graph=graphs.window(2), dropout=0.0),
        lambda: (F.one_hot(torch.arange(17) % 4, 5).float(), torch.arange(17) % 4),
        0.7,
        30,
    ),
    "RelationalMLP": Task(lambda: models.RelationalMLP(12, 2, 48, 2, nodes=6, graph=graphs.window(1)), products, 0.2),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.sample(3)
def test_the_loss_falls(task: Task) -> None:
    model, batch = task.make(), task.draw()
    optimizer = torch.optim.Adam(model.parameters(), task.lr)
    for _ in range(task.steps):
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()
    assert model.loss(*batch) < task.most
