"""GatedGraphConv as message passing."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import EdgeWeight
from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.integrations.pyg.weights import aggregate_of, check_options, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.request import validation
from mpnn.update import GRU


def gated(conv: Any) -> Rounds:
    """GatedGraphConv: each round has its own map, and all rounds share one GRU cell."""
    check_options(conv)
    dim, reduce = conv.out_channels, aggregate_of(conv)

    def build() -> Rounds:
        update = GRU(dim)
        update.cell = copy.deepcopy(conv.rnn)
        maps = [EdgeWeight(nn.Linear(dim, dim, bias=False)) for _ in range(conv.num_layers)]
        return Rounds([MessagePassing(None, reduce, update, attention) for attention in maps], dim)

    weights: dict[str, Tensor | None] = {
        f"rounds.{k}.attention.value.weight": conv.weight[k].T for k in range(conv.num_layers)
    }
    return with_weights(build, weights)


class Rounds(nn.Module):
    """Operators in sequence, over the same graph and with features of the same width.

    Args:
        rounds: the operators.
        dim: width of the features. Narrower inputs are padded with zeros.
    """

    def __init__(self, rounds: Iterable[MessagePassing], dim: int) -> None:
        super().__init__()
        self.rounds, self.dim = nn.ModuleList(rounds), dim

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, edge_attr: Tensor | None = None) -> Tensor:
        """x [..., N, d] with d <= dim, edge weights edge_attr [E] (default: the graph's, else 1) -> [..., N, dim]."""
        validation.tensor("x", x)
        if x.shape[-1] > self.dim:
            raise ValueError(f"x has {x.shape[-1]} features, but the width of the cells is {self.dim}")
        x = F.pad(x, (0, self.dim - x.shape[-1]))
        for layer in self.rounds:
            x = layer(x, graph, edge_attr=edge_attr)
        return x
