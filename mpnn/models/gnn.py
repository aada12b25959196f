"""The plain graph network: every node adds up what its neighbours know, or takes the largest, and thinks."""

from __future__ import annotations

from torch import Tensor

from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.stack import Stack
from mpnn.topology import Topology
from mpnn.update import Concat


class GNN(Stack):
    """A graph network for classifying nodes (Scarselli et al. 2009, a few rounds of it; Morris et al. 2019).

        h_i <- relu( W [h_i || reduce_j h_j] ),   last layer: without relu

    Args:
        in_dim: width of the features. classes: width of the logits. hidden: between layers. layers: their number.
        aggregate: "sum", "max" or any other aggregator by its name.
        dropout: of the features that enter each layer.
        graph: whom nodes hear; None when each call gives it.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 64,
        layers: int = 2,
        *,
        aggregate: str = "sum",
        dropout: float = 0.0,
        graph: Topology | Graph | None = None,
    ) -> None:
        widths = [in_dim] + [hidden] * (layers - 1)
        rounds = [MessagePassing(graph, aggregate, Perceptron(d, hidden)) for d in widths[:-1]]
        super().__init__([*rounds, MessagePassing(graph, aggregate, Concat(widths[-1], classes))], dropout)


class Perceptron(Concat):
    """`y = relu(W [x || m])`."""

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return super().forward(x, message).relu()
