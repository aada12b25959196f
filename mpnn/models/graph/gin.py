"""GIN: sums over in-neighbors and MLPs, as expressive as the Weisfeiler-Lehman test."""

from torch import Tensor, nn
from torch.optim import Adam

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import EdgeMessage
from mpnn.models.layers.blocks import BatchNorm
from mpnn.models.layers.readout import pooled
from mpnn.models.layers.stack import Stack
from mpnn.round import validation
from mpnn.update import Add
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear


class GIN(Stack):
    """Graph isomorphism network (Xu et al. 2019, eq. 4.1 and 4.2).

    The defaults are the paper's settings for small graphs.

        h_i <- MLP( (1 + eps) h_i + sum_j h_j ),   logits = sum over k of W_k sum_i h_i after k layers

    Each MLP has two layers with batch normalization. The model classifies whole graphs if `forward` gets `pool`, and
    nodes otherwise. The graph needs no self-loops: the update adds the node's own features.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        hidden: width of each layer.
        layers: number of message passing layers (the paper also counts the input, hence its five).
        learn_eps: whether eps is learned (GIN-eps) or fixed to 0 (GIN-0, the paper's best).
        edge_dim: width of edge attributes; a message is then relu(h_j + W e_ij) (GINE, Hu et al. 2020,
            arXiv:1905.12265, section 5.1). None if there are none.
        dropout: dropout probability of each layer's term of the logits, in training.
        graph: topology or graph of every layer; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 64,
        layers: int = 4,
        *,
        learn_eps: bool = False,
        edge_dim: int | None = None,
        dropout: float = 0.5,
        graph: Topology | Graph | None = None,
    ) -> None:
        widths = [in_dim] + [hidden] * layers
        super().__init__(
            MessagePassing(
                graph,
                "sum",
                Add(_mlp(d, hidden), learn_eps=learn_eps),
                None if edge_dim is None else EdgeMessage(WithEdge(edge_dim, d)),
            )
            for d in widths[:-1]
        )
        self.heads = nn.ModuleList(Linear(d, classes) for d in widths)
        self.head_dropout = Dropout(dropout)

    def forward(  # type: ignore[override]
        self, x: Tensor, graph: Topology | Graph | None = None, pool: Graph | None = None
    ) -> Tensor:
        """Maps x [..., N, in_dim] to logits [..., N, classes], or [..., G, classes] with `pool`.

        `pool` has N sources and G destinations: each destination receives from the nodes of one graph.
        """
        validation.input_features("x", x)
        validation.fits("GIN", "x", x, validation.takes(self.heads[0]))
        logits = self._read(0, x, pool)
        for k, layer in enumerate(self.layers, start=1):
            x = layer(x, graph)
            logits = logits + self._read(k, x, pool)
        return logits

    def _read(self, k: int, x: Tensor, pool: Graph | None) -> Tensor:
        return self.head_dropout(self.heads[k](x if pool is None else pooled(pool, x)))

    def optimizer(self, lr: float = 0.01) -> Adam:
        """Returns Adam as published (section 7). The paper halves the learning rate every 50 epochs."""
        return Adam(self.parameters(), lr=lr)


class WithEdge(nn.Module):
    """The message of GINE, `relu( h_j + W e_ij )`."""

    def __init__(self, edge_dim: int, dim: int) -> None:
        super().__init__()
        self.edge = Linear(edge_dim, dim)

    def forward(self, dst: Tensor, src: Tensor, edge_attr: Tensor | None) -> Tensor:
        """src [..., E, dim], edge_attr [E, edge_dim], or [E] if edge_dim is 1 -> messages [..., E, dim]."""
        edge_attr = validation.edge_features("GIN with edge_dim", edge_attr)
        edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
        validation.fits("GIN", "edge_attr", edge_attr, validation.takes(self.edge))
        return (src + self.edge(edge_attr)).relu()


def _mlp(in_dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        Linear(in_dim, hidden),
        BatchNorm(hidden),
        nn.ReLU(),
        Linear(hidden, hidden),
        BatchNorm(hidden),
        nn.ReLU(),
    )
