"""The base class of graph networks: a sequence of rounds of message passing."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update.dropout import Dropout


class Stack(Model):
    """Applies `x <- layer(dropout(x))` for each layer, all over the same graph.

    Args:
        layers: the layers.
        dropout: of the input of each layer, in training.
    """

    def __init__(self, layers: Iterable[MessagePassing], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """Maps x [..., N, in_dim] to [..., N, out_dim].

        Args:
            x: features. If the model begins with a linear map (GCN, GAT), may be a sparse COO tensor [N, in_dim].
            graph: replaces the graphs of the layers; default: the graph of each layer.
        """
        validation.input_features("x", x)
        for layer in self.layers:
            x = layer(self.dropout(x), graph)
        return x

    def loss(
        self, x: Tensor, target: Tensor, mask: Tensor | None = None, graph: Topology | Graph | None = None, *more: Any
    ) -> Tensor:
        """Mean cross-entropy in nats: x [N, in_dim], target int64 [N]. mask bool [N] selects nodes; default: all. More
        arguments are those of `forward`."""
        logits = self(x, graph, *more)
        return F.cross_entropy(logits, target) if mask is None else F.cross_entropy(logits[mask], target[mask])
