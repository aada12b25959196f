"""GatedGraphConv as message passing."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import check
from mpnn.attention import EdgeWeight
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.pyg.weights import aggregate_of, check_options, with_weights
from mpnn.topology import Topology
from mpnn.update import GRU


def gated(conv: Any) -> Rounds:
    """Rounds with a map of their own each, and one cell."""
    check_options(conv)
    dim, reduce = conv.out_channels, aggregate_of(conv)

    def build() -> Rounds:
        update = GRU(dim)
        update.cell = copy.deepcopy(conv.rnn)
        maps = [EdgeWeight(nn.Linear(dim, dim, bias=False)) for _ in range(conv.num_layers)]
        return Rounds([MessagePassing(None, reduce, update, each) for each in maps], dim)

    weights: dict[str, Tensor | None] = {
        f"rounds.{k}.attention.value.weight": conv.weight[k].T for k in range(conv.num_layers)
    }
    return with_weights(build, weights)


class Rounds(nn.Module):
    """Operators one after the other, over the same graph, between features of one width.

    Args:
        rounds: the operators. dim: the width; narrower features are filled up with zeros.
    """

    def __init__(self, rounds: Iterable[MessagePassing], dim: int) -> None:
        super().__init__()
        self.rounds, self.dim = nn.ModuleList(rounds), dim

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, edge_attr: Tensor | None = None) -> Tensor:
        """x [..., N, d] with d at most `dim`, weights edge_attr [E] (default: the graph's, or 1) -> [..., N, dim]."""
        check.tensor("x", x)
        if x.shape[-1] > self.dim:
            raise ValueError(f"cells of width {self.dim} cannot begin with {x.shape[-1]} features")
        x = F.pad(x, (0, self.dim - x.shape[-1]))
        for layer in self.rounds:
            x = layer(x, graph, edge_attr=edge_attr)
        return x
