"""GAT: every node chooses among its neighbours by additive attention."""

from __future__ import annotations

from torch.nn import functional as F
from torch.optim import Adam

from mpnn.attention import Additive, AdditiveV2
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.stack import Stack
from mpnn.topology import Topology
from mpnn.update import Activate


class GAT(Stack):
    """Graph attention network for classifying nodes (Velickovic et al. 2018, eq. 1-6), with the settings for Cora.

        w_ij = softmax_j( LeakyReLU( a_dst . W h_i + a_src . W h_j ) )   over the j that i hears
        h_i <- || _heads elu( sum_j w_ij W h_j ),   last layer: the mean of its heads, no activation

    The paper's nodes hear themselves: give `graph.with_self_loops()`.

    Args:
        in_dim: width of the features. classes: width of the logits. hidden: width of each of the first layer's heads.
        heads: of the first layer. out_heads: of the last.
        dropout: of the features that enter each layer, and of attention weights.
        graph: whom nodes hear; None when each call gives it.
    """

    spec: type[Additive | AdditiveV2] = Additive

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 8,
        heads: int = 8,
        *,
        out_heads: int = 1,
        dropout: float = 0.6,
        graph: Topology | Graph | None = None,
    ) -> None:
        listen = self.spec(in_dim, hidden, heads, dropout=dropout)
        decide = self.spec(hidden * heads, classes, out_heads, dropout=dropout, concat=False)
        first = MessagePassing(graph, "sum", Activate(F.elu), listen)
        last = MessagePassing(graph, "sum", None, decide)
        super().__init__([first, last], dropout)

    def optimizer(self, lr: float = 0.005, weight_decay: float = 5e-4) -> Adam:
        """Adam as published (section 3.3): L2 on everything."""
        return Adam(self.parameters(), lr=lr, weight_decay=weight_decay)
