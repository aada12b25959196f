"""GCNConv as message passing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpnn.attention import Degree, EdgeWeight
from mpnn.integrations.pyg.loops import WithLoops
from mpnn.integrations.pyg.weights import aggregate_of, check_options, widths, with_weights
from mpnn.message_passing import MessagePassing


def gcn(conv: Any) -> MessagePassing:
    """GCNConv: weights by degree, or edge weights if `normalize=False`. `cached` is ignored, as graphs always cache."""
    check_options(conv)
    (in_dim, _), out_dim, reduce = widths(conv), conv.out_channels, aggregate_of(conv)

    def build() -> MessagePassing:
        if not conv.normalize:
            return MessagePassing(None, reduce, None, EdgeWeight(nn.Linear(in_dim, out_dim, False), Bias(out_dim)))
        spec = Degree(in_dim, out_dim)
        if not conv.add_self_loops:
            return MessagePassing(None, reduce, None, spec)
        return WithLoops(None, reduce, None, spec, fill=2.0 if conv.improved else 1.0, keep=True)

    bias = conv.lin.weight.new_zeros(out_dim) if conv.bias is None else conv.bias
    if conv.normalize:
        return with_weights(build, {"attention.to_value.weight": conv.lin.weight, "attention.bias": bias})
    return with_weights(build, {"attention.value.weight": conv.lin.weight, "attention.out.bias": bias})


class Bias(nn.Module):
    """`y = m + b`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, message: Tensor) -> Tensor:
        return message + self.bias
