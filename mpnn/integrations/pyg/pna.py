"""PNAConv as message passing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpnn import aggregate
from mpnn.aggregate import Aggregator, Composed, Var
from mpnn.attention import EdgeMessage
from mpnn.integrations.pyg.weights import AGGREGATES, check_options, linear, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.models.graph.pna import TowerMessage, TowerUpdate

SCALERS = ("identity", "amplification", "attenuation")


def pna(conv: Any) -> MessagePassing:
    check_options(conv)
    scaling = conv.aggr_module
    if isinstance(scaling.avg_deg_log, nn.Parameter):
        raise ValueError("from_pyg does not support PNAConv with train_norm = True, only False")
    for name in scaling.scaler:
        if name not in SCALERS:
            raise ValueError(f"from_pyg does not support PNAConv with scaler {name!r}, only {', '.join(SCALERS)}")
    parts = [_aggregator(part) for part in getattr(scaling.aggr, "aggrs", [scaling.aggr])]
    shared = not conv.divide_input

    def build() -> MessagePassing:
        edge = None if conv.edge_dim is None else nn.Linear(conv.edge_dim, conv.F_in)
        message = TowerMessage(copy.deepcopy(conv.pre_nns), edge, shared)
        out = nn.Linear(conv.out_channels, conv.out_channels)
        update = TowerUpdate(copy.deepcopy(conv.post_nns), out, shared)
        aggregator = aggregate.PNA(parts, scaling.scaler, float(scaling.avg_deg_log))
        return MessagePassing(None, aggregator, update, EdgeMessage(message))

    weights = linear("update.out", conv.lin)
    if conv.edge_dim is not None:
        weights |= linear("attention.function.edge", conv.edge_encoder)
    return with_weights(build, weights)


def _aggregator(aggregation: Any) -> Aggregator:
    """Converts an aggregation module of PyTorch Geometric."""
    name = type(aggregation).__name__.removesuffix("Aggregation").lower()
    if name == "std":
        return ClampedStd()
    if name not in AGGREGATES:
        raise ValueError(f"from_pyg does not support PNAConv with the aggregator {type(aggregation).__name__}")
    aggregator: Aggregator = aggregate.aggregator(AGGREGATES[name])
    return aggregator


class ClampedStd(Composed):
    """Standard deviation as in PyTorch Geometric: `sqrt(var)`, or zero without a gradient if var <= 1e-5."""

    parts = (Var(),)

    def compose(self, results: Sequence[Tensor], degree: Tensor) -> Tensor:
        out = results[0].clamp(min=1e-5).sqrt()
        return torch.where(out <= 1e-5**0.5, torch.zeros_like(out), out)
