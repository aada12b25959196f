"""GIN: sums and MLPs, as telling as the Weisfeiler-Lehman test."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Adam

from mpnn import check, ops
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import BatchNorm
from mpnn.models.parts.stack import Stack
from mpnn.topology import Topology
from mpnn.update import Add


class GIN(Stack):
    """Graph isomorphism network (Xu et al. 2019, eq. 4.1 and 4.2), with the settings for small graphs.

        h_i <- MLP( (1 + eps) h_i + sum_j h_j ),   logits = sum over k of W_k sum_i h_i after k layers

    Each MLP has two layers with batch normalisation. Classifies whole graphs when a call gives `pool`, else nodes.
    No self-loops: a node's own features are added by the update.

    Args:
        in_dim: width of the features. classes: width of the logits. hidden: width of each layer.
        layers: rounds of message passing (the paper counts the input too, and says five).
        learn_eps: whether eps is learned (GIN-eps) or stays 0 (GIN-0, the paper's best).
        dropout: of the logits' parts, in training.
        graph: whom nodes hear; None when each call gives it.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 64,
        layers: int = 4,
        *,
        learn_eps: bool = False,
        dropout: float = 0.5,
        graph: Topology | Graph | None = None,
    ) -> None:
        widths = [in_dim] + [hidden] * layers
        super().__init__(MessagePassing(graph, "sum", Add(_mlp(d, hidden), learn_eps=learn_eps)) for d in widths[:-1])
        self.heads = nn.ModuleList(nn.Linear(d, classes) for d in widths)
        self.head_dropout = Dropout(dropout)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, pool: Graph | None = None) -> Tensor:
        """x [..., N, in_dim] -> logits [..., N, classes]; or [..., G, classes] with `pool`, a graph of N sources and G
        destinations in which each destination hears the nodes of one graph.
        """
        check.tensor("x", x)
        check.fits("GIN", "x", x, check.takes(self.heads[0]))
        logits = self._read(0, x, pool)
        for k, layer in enumerate(self.layers, start=1):
            x = layer(x, graph)
            logits = logits + self._read(k, x, pool)
        return logits

    def _read(self, k: int, x: Tensor, pool: Graph | None) -> Tensor:
        return self.head_dropout(self.heads[k](x if pool is None else ops.aggregate(pool, x, "sum")))

    def optimizer(self, lr: float = 0.01) -> Adam:
        """Adam, as published (section 7); the paper halves the learning rate every 50 epochs."""
        return Adam(self.parameters(), lr=lr)


def _mlp(in_dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(in_dim, hidden),
        BatchNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        BatchNorm(hidden),
        nn.ReLU(),
    )
