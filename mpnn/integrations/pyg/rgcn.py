"""RGCNConv as message passing."""

from __future__ import annotations

from typing import Any

from mpnn.attention import Typed
from mpnn.integrations.pyg.weights import aggregate_of, check_options, widths, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.models.graph.rgcn import BasisTyped, BlockTyped
from mpnn.update import SelfConnection


def rgcn(conv: Any) -> MessagePassing:
    """RGCNConv with independent, basis or block-diagonal maps. The edge types are those of the graph."""
    check_options(conv)
    (source_dim, dim), out_dim, reduce = widths(conv), conv.out_channels, aggregate_of(conv)
    sizes, bias = (source_dim, out_dim, conv.num_relations), conv.bias is not None

    def spec() -> Typed:
        if conv.num_bases is not None:
            return BasisTyped(*sizes, conv.num_bases, bias=bias)
        if conv.num_blocks is not None:
            return BlockTyped(*sizes, conv.num_blocks, bias=bias)
        return Typed(*sizes, bias=bias)

    def build() -> MessagePassing:
        update = None if conv.root is None else SelfConnection(dim, out_dim, bias=False)
        return MessagePassing(None, reduce, update, spec())

    weights = {"attention.weight": conv.weight, "attention.bias": conv.bias, "attention.coefficients": conv.comp}
    if conv.root is not None:
        weights["update.linear.weight"] = conv.root.T
    return with_weights(build, weights)
