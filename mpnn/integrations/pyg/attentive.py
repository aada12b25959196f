"""GATConv and GATv2Conv as message passing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mpnn.attention import Additive, AdditiveV2, Attention
from mpnn.integrations.pyg.loops import WithLoops
from mpnn.integrations.pyg.weights import AGGREGATES, aggregate_of, check_options, linear, widths, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.request import validation
from mpnn.request.scores import LeakyReLU
from mpnn.update import SelfConnection, Update


def gat(conv: Any) -> MessagePassing:
    """GATConv. With two in_channels, sources and destinations have separate maps."""
    separate = conv.lin is None

    def spec() -> Attention:
        kind = SeparateAdditive if separate else Additive
        return kind(
            widths(conv)[0],
            conv.out_channels,
            conv.heads,
            concat=conv.concat,
            negative_slope=conv.negative_slope,
            dropout=conv.dropout,
            edge_dim=conv.edge_dim,
            bias=conv.bias is not None,
            **({"dst_dim": widths(conv)[1]} if separate else {}),
        )

    weights = {
        "attention.to_value.weight": (conv.lin_src if separate else conv.lin).weight,
        "attention.to_query.weight": conv.lin_dst.weight if separate else None,
        "attention.by_src": conv.att_src,
        "attention.by_dst": conv.att_dst,
        "attention.by_edge": conv.att_edge,
    }
    return _convert(conv, spec, weights)


def gatv2(conv: Any) -> MessagePassing:
    def spec() -> Attention:
        source_dim, dim = widths(conv)
        return AdditiveV2(
            dim,
            conv.out_channels,
            conv.heads,
            activation=LeakyReLU(conv.negative_slope),
            concat=conv.concat,
            dropout=conv.dropout,
            edge_dim=conv.edge_dim,
            source_dim=source_dim,
            share=conv.share_weights,
            bias=conv.bias is not None,
        )

    maps = {**linear("attention.to_query", conv.lin_r), **linear("attention.to_value", conv.lin_l)}
    return _convert(conv, spec, {**maps, "attention.vector": conv.att})


def _convert(conv: Any, spec: Any, weights: dict[str, Tensor | None]) -> MessagePassing:
    """Converts what GATConv and GATv2Conv share: self-loops, the residual, the bias and the map of edge features."""
    check_options(conv)
    reduce, fill = aggregate_of(conv), conv.fill_value
    if isinstance(fill, str):
        if fill not in AGGREGATES:
            raise ValueError(f"from_pyg does not support {type(conv).__name__} with fill_value = {fill!r}")
        fill = AGGREGATES[fill]
    out_dim = conv.out_channels * (conv.heads if conv.concat else 1)

    def build() -> MessagePassing:
        update: Update | None = None
        if conv.residual:
            update = SelfConnection(widths(conv)[1], out_dim, bias=False)
        if not conv.add_self_loops:
            return MessagePassing(None, reduce, update, spec())
        return WithLoops(None, reduce, update, spec(), fill=fill)

    residual = linear("update.linear", conv.res)
    edge = linear("attention.to_edge", conv.lin_edge)
    return with_weights(build, {**weights, **residual, **edge, "attention.bias": conv.bias})


class SeparateAdditive(Additive):
    """`Additive` with a separate map for the destinations, whose features have width `dst_dim`."""

    depends_on = "node"
    one_map = False

    def __init__(self, in_dim: int, out_dim: int, heads: int, *, dst_dim: int, **options: Any) -> None:
        super().__init__(in_dim, out_dim, heads, **options)
        self.to_query = nn.Linear(dst_dim, heads * out_dim, bias=False)

    def takes(self) -> tuple[validation.Takes, validation.Takes]:
        return validation.takes(self.to_query), validation.takes(self.to_value)

    def query(self, dst: Tensor) -> Tensor:
        return self.to_query(dst).unflatten(-1, (self.heads, -1))
