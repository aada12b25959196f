"""GCN: every node hears its neighbours with weights fixed by degrees."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F
from torch.optim import Adam

from mpnn.attention import Degree
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.stack import Stack
from mpnn.topology import Topology
from mpnn.update import Activate


class GCN(Stack):
    """Graph convolutional network for classifying nodes (Kipf & Welling 2017, eq. 9), with the settings for Cora.

        logits = A relu( A X W_0 ) W_1,   A_ij = 1 / sqrt(d_i d_j) where i hears j

    No biases, as published. The paper's nodes hear themselves: give `graph.with_self_loops()`.

    Args:
        in_dim: width of the features. classes: width of the logits. hidden: width between the two layers.
        dropout: of the features that enter each layer.
        graph: whom nodes hear; None when each call gives it.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 16,
        *,
        dropout: float = 0.5,
        graph: Topology | Graph | None = None,
    ) -> None:
        first = MessagePassing(graph, "sum", Activate(F.relu), Degree(in_dim, hidden, bias=False))
        last = MessagePassing(graph, "sum", None, Degree(hidden, classes, bias=False))
        super().__init__([first, last], dropout)

    def optimizer(self, lr: float = 0.01, weight_decay: float = 5e-4) -> Adam:
        """Adam as published (section 5.2): L2 on the first layer only."""
        first, last = self.layers
        decays: dict[str, Any] = {"params": first.parameters(), "weight_decay": weight_decay}
        return Adam([decays, {"params": last.parameters()}], lr=lr)
