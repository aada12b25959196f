"""GINConv and GINEConv as message passing."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from mpnn.attention import EdgeMessage
from mpnn.integrations.pyg.weights import aggregate_of, check_options, linear, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.update import Add


def gin(conv: Any) -> MessagePassing:
    check_options(conv)
    reduce = aggregate_of(conv)
    return with_weights(lambda: MessagePassing(None, reduce, Add(copy.deepcopy(conv.nn))), {"update.eps": conv.eps})


def gine(conv: Any) -> MessagePassing:
    check_options(conv)
    reduce = aggregate_of(conv)

    def build() -> MessagePassing:
        to_message = None if conv.lin is None else nn.Linear(conv.lin.in_channels, conv.lin.out_channels)
        return MessagePassing(None, reduce, Add(copy.deepcopy(conv.nn)), EdgeMessage(EdgeReLU(to_message)))

    return with_weights(build, {"update.eps": conv.eps, **linear("attention.function.edge", conv.lin)})


class EdgeReLU(nn.Module):
    """`relu(h_j + W e_ij)` (Hu et al. 2020, "Strategies for pre-training graph neural networks"). If W is None it is
    the identity."""

    def __init__(self, edge: nn.Module | None) -> None:
        super().__init__()
        self.edge = edge

    def forward(self, dst: Tensor, src: Tensor, edge_attr: Tensor | None) -> Tensor:
        if edge_attr is None:
            raise ValueError("GINEConv needs edge features: pass edge_attr, or a graph that has edge_attr")
        return (src + (edge_attr if self.edge is None else self.edge(edge_attr))).relu()
