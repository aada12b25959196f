"""SAGEConv and GraphConv as message passing: a map of the aggregated messages plus a map of the node's features."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F

from mpnn.attention import EdgeWeight, Mapped
from mpnn.integrations.pyg.weights import aggregate_of, check_options, linear, widths, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.update import Activate, SelfConnection, Update

UNIT = partial(F.normalize, dim=-1)


def sage(conv: Any) -> MessagePassing:
    check_options(conv)
    (source_dim, dim), out_dim, reduce = widths(conv), conv.out_channels, aggregate_of(conv)

    def build() -> MessagePassing:
        activation = UNIT if conv.normalize else None
        update: Update | None = Activate(activation) if activation else None
        if conv.root_weight:
            update = SelfConnection(dim, out_dim, activation, bias=False)
        value = nn.Sequential(nn.Linear(source_dim, source_dim), nn.ReLU()) if conv.project else None
        out = nn.Linear(source_dim, out_dim, conv.lin_l.bias is not None)
        return MessagePassing(None, reduce, update, Mapped(value, out))

    weights = linear("attention.out", conv.lin_l)
    if conv.root_weight:
        weights |= linear("update.linear", conv.lin_r)
    if conv.project:
        weights |= linear("attention.value.0", conv.lin)
    return with_weights(build, weights)


def graph(conv: Any) -> MessagePassing:
    check_options(conv)
    (source_dim, dim), out_dim, reduce = widths(conv), conv.out_channels, aggregate_of(conv)

    def build() -> MessagePassing:
        out = nn.Linear(source_dim, out_dim, conv.lin_rel.bias is not None)
        return MessagePassing(None, reduce, SelfConnection(dim, out_dim, bias=False), EdgeWeight(out=out))

    return with_weights(build, {**linear("attention.out", conv.lin_rel), **linear("update.linear", conv.lin_root)})
