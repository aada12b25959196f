"""What graph networks share: rounds of message passing, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from mpnn import check
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.topology import Topology


class Stack(Model):
    """`x <- layer(dropout(x))` for each layer; every layer hears over the same graph.

    Args:
        layers: the rounds. dropout: of the features that enter each of them, in training.
    """

    def __init__(self, layers: Iterable[MessagePassing], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """x [..., N, in_dim] -> [..., N, out_dim] over `graph`, or over the layers' own when that is None.

        Where the first thing a model does is a linear map (GCN, GAT), x may be a torch sparse COO tensor [N, in_dim].
        """
        check.tensor("x", x)
        for layer in self.layers:
            x = layer(self.dropout(x), graph)
        return x
