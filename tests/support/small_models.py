"""A small instance and a call of every model of `mpnn.models`, by name: the models of `every_model.py`, on inputs that
do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from every_model import GRAPHS, ROWS, OnGraphs, OnRows, World
from torch import Tensor

from mpnn import models

Make, Call = Callable[[], models.Model], Callable[[Any], Tensor]

PARTS = {
    *("GPSLayer", "GraphBlock", "GraphPredictor", "Hetero", "LightGCN", "Linformer", "LinkPredictor", "LinkRanker"),
    *("Reformer", "Swin"),
}
"""Parts of other models, or layers."""
POOLED = {"Bert", "BigBird", "LinformerEncoder", "Longformer", "PerformerEncoder", "ViT"}
"""Models whose pooled output depends on all of their parameters."""


def fixed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def on_graphs(spec: OnGraphs) -> Call:
    world = World.draw(fixed(), (7, 5), degree=3)
    return lambda model: torch.cat([x.flatten() for x in spec.call(model, world).values()])


def on_rows(name: str, spec: OnRows) -> Call:
    rows = spec.draw(fixed(), 2)
    if name not in POOLED:
        return lambda model: spec.call(model, *rows)
    tokens, mask = rows if len(rows) == 2 else (*rows, None)
    padding = {} if mask is None else {"padding_mask": ~mask}
    return lambda model: model(tokens, **padding).pooled


EVERY: dict[str, tuple[Make, Call]] = {
    **{name: (spec.make, on_graphs(spec)) for name, spec in GRAPHS.items() if name not in PARTS},
    **{name: (spec.make, on_rows(name, spec)) for name, spec in ROWS.items() if name not in PARTS},
}
