"""GCN: a sum over in-neighbors, weighted by degrees."""

from typing import Any

from torch.nn import functional as F
from torch.optim import Adam

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Degree
from mpnn.models.layers.stack import Stack
from mpnn.update import Activate


class GCN(Stack):
    """Graph convolutional network for node classification (Kipf & Welling 2017, eq. 9).

    The defaults are the paper's settings for Cora. As published, the layers have no biases.

        logits = A relu( A X W_0 ) W_1,   A_ij = 1 / sqrt(d_i d_j) for each edge j -> i

    In the paper each node has a self-loop: pass `graph.with_self_loops()`. Edges with one attribute are weighted, see
    `mpnn.attention.Degree`.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        hidden: width between layers.
        layers: number of layers.
        dropout: dropout probability of the features that enter each layer.
        graph: topology or graph of every layer; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 16,
        layers: int = 2,
        *,
        dropout: float = 0.5,
        graph: Topology | Graph | None = None,
    ) -> None:
        widths = [in_dim] + [hidden] * (layers - 1)
        rounds = [MessagePassing(graph, "sum", Activate(F.relu), Degree(d, hidden, bias=False)) for d in widths[:-1]]
        super().__init__(
            [*rounds, MessagePassing(graph, "sum", None, Degree(widths[-1], classes, bias=False))], dropout
        )

    def optimizer(self, lr: float = 0.01, weight_decay: float = 5e-4) -> Adam:
        """Returns Adam as published (section 5.2), with L2 regularization of the first layer only."""
        first, *others = self.layers
        regularized: dict[str, Any] = {"params": first.parameters(), "weight_decay": weight_decay}
        return Adam([regularized, {"params": [p for layer in others for p in layer.parameters()]}], lr=lr)
