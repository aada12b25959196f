"""TransformerConv as message passing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.integrations.pyg.weights import aggregate_of, check_options, linear, widths, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.models.graph.graph_transformer import GatedResidual, HeadsOf
from mpnn.update import SelfConnection, Update


def transformer(conv: Any) -> MessagePassing:
    check_options(conv)
    (source_dim, dim), reduce = widths(conv), aggregate_of(conv)
    out_dim = conv.out_channels * (conv.heads if conv.concat else 1)
    bias = conv.lin_query.bias is not None

    def build() -> MessagePassing:
        spec = HeadsOf(
            dim,
            conv.out_channels,
            conv.heads,
            source_dim=source_dim,
            edge_dim=conv.edge_dim,
            concat=conv.concat,
            bias=bias,
            dropout=conv.dropout,
        )
        update: Update | None = None
        if conv.root_weight:
            kind = GatedResidual if conv.beta else SelfConnection
            update = kind(dim, out_dim, bias=bias)
        return MessagePassing(None, reduce, update, spec)

    names = {"to_query": conv.lin_query, "to_key": conv.lin_key, "to_value": conv.lin_value, "to_edge": conv.lin_edge}
    weights: dict[str, Tensor | None] = {}
    for name, module in names.items():
        weights |= linear(f"attention.{name}", module)
    if conv.root_weight and conv.beta:
        weights |= {**linear("update.own", conv.lin_skip), **linear("update.gate", conv.lin_beta)}
    elif conv.root_weight:
        weights |= linear("update.linear", conv.lin_skip)
    return with_weights(build, weights)
