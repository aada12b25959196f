"""A plain graph network: a sum or maximum over in-neighbors, then a linear layer."""

from torch import Tensor

from mpnn import Graph, MessagePassing, Topology
from mpnn.aggregate import Name as Aggregate
from mpnn.models.layers.stack import Stack
from mpnn.update import Concat


class GNN(Stack):
    """Graph neural network for node classification (Scarselli et al. 2009, with few rounds; Morris et al. 2019).

        h_i <- relu( W [h_i || reduce_j h_j] ),   last layer: without relu

    Args:
        in_dim, classes: widths of the input features and of the logits.
        hidden: width between layers.
        layers: number of layers.
        aggregate: "sum", "max" or the name of any other aggregator.
        dropout: dropout probability of the features that enter each layer.
        graph: topology or graph of every layer; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 64,
        layers: int = 2,
        *,
        aggregate: Aggregate = "sum",
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
