"""GraphSAGE: each node's features concatenated with an aggregate over its in-neighbors."""

from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from mpnn import Graph, MessagePassing, Topology
from mpnn.aggregate import Name as Aggregate
from mpnn.models.layers.stack import Graphs, Stack
from mpnn.update import Concat
from mpnn.update.maps import Linear


class GraphSAGE(Stack):
    """GraphSAGE for node classification (Hamilton et al. 2017, algorithm 1), over full neighborhoods.

        h_i <- normalize( relu( W [h_i || mean_j h_j] ) ),   logits = W_out h

    The graph needs no self-loops: the node's own features are concatenated with the mean.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        hidden: width of each layer.
        layers: number of layers.
        aggregate: "mean" or "max". "max" is over the features themselves; the paper's pooling maps them first.
        dropout: dropout probability of the features that enter each layer.
        graph: topology or graph of every layer; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 256,
        layers: int = 2,
        *,
        aggregate: Aggregate = "mean",
        dropout: float = 0.0,
        graph: Topology | Graph | None = None,
    ) -> None:
        widths = [in_dim] + [hidden] * (layers - 1)
        super().__init__([MessagePassing(graph, aggregate, Embed(d, hidden)) for d in widths], dropout)
        self.head = Linear(hidden, classes)

    def forward(self, x: Tensor, graph: Graphs | None = None) -> Tensor:
        return self.head(super().forward(x, graph))

    def optimizer(self, lr: float = 0.01) -> Adam:
        """Returns Adam as published (section 4)."""
        return Adam(self.parameters(), lr=lr)


class Embed(Concat):
    """`y = relu(W [x || m])`, scaled to length 1 (lines 5 and 7 of the algorithm)."""

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return F.normalize(super().forward(x, message).relu(), dim=-1)
