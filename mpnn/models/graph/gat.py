"""GAT: additive attention over the in-neighbors of each node. GATv2: one that ranks them for each node again."""

from functools import partial

from torch.nn import functional as F
from torch.optim import Adam

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Additive, AdditiveV2
from mpnn.models.layers.stack import Stack
from mpnn.update import Activate


class GAT(Stack):
    """Graph attention network for node classification (Velickovic et al. 2018, eq. 1-6).

    The defaults are the paper's settings for Cora.

        w_ij = softmax_j( LeakyReLU( a_dst . W h_i + a_src . W h_j ) )   over the in-neighbors j of i
        h_i <- || _heads elu( sum_j w_ij W h_j ),   last layer: mean over the heads, no activation

    In the paper each node also attends to itself: pass `graph.with_self_loops()`.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        hidden: width of each head of each layer but the last.
        heads: number of heads of each layer but the last.
        out_heads: number of heads of the last layer.
        layers: number of layers.
        edge_dim: width of edge attributes that take part in the score; None if there are none.
        dropout: dropout probability of the features that enter each layer and of the attention weights.
        graph: topology or graph of every layer; None if each call passes one.
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
        layers: int = 2,
        edge_dim: int | None = None,
        dropout: float = 0.6,
        graph: Topology | Graph | None = None,
    ) -> None:
        widths = [in_dim] + [hidden * heads] * (layers - 1)
        attention = partial(self.spec, dropout=dropout, edge_dim=edge_dim)
        rounds = [MessagePassing(graph, "sum", Activate(F.elu), attention(d, hidden, heads)) for d in widths[:-1]]
        last = MessagePassing(graph, "sum", None, attention(widths[-1], classes, out_heads, concat=False))
        super().__init__([*rounds, last], dropout)

    def optimizer(self, lr: float = 0.005, weight_decay: float = 5e-4) -> Adam:
        """Returns Adam as published (section 3.3), with L2 regularization of all parameters."""
        return Adam(self.parameters(), lr=lr, weight_decay=weight_decay)


class GATv2(GAT):
    """GAT with dynamic attention (Brody et al. 2022, eq. 7): the nonlinearity comes before the product with a.

        w_ij = softmax_j( a . LeakyReLU( W_dst h_i + W_src h_j ) )   over the in-neighbors j of i

    In GAT the ranking of the sources is the same for all destinations. Here it depends on the destination. The
    arguments are those of `GAT`.
    """

    spec = AdditiveV2
