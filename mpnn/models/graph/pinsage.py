"""PinSage: messages between items, weighted by how often short random walks on a bipartite graph connect them."""

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing
from mpnn.attention import EdgeWeight
from mpnn.models.graph.sage import Embed
from mpnn.models.layers.stack import Stack
from mpnn.update.maps import Linear


class PinSage(Stack):
    """Item-to-item recommendation (Ying et al. 2018, algorithms 1 and 2).

        n_i <- sum_j v_ij relu( Q h_j + q ) / sum_j v_ij,   h_i <- normalize( relu( W [h_i || n_i] + w ) )
        z_i  = G_2 relu( G_1 h_i + g )

    v_ij is the number of times that random walks from i visit j. Create the graph with
    `graphs.random_walk_neighbors(bipartite, k)`, where `bipartite` has users as sources and items as destinations.

    Args:
        in_dim: width of the items' features.
        out_dim: width of the embeddings z.
        hidden: width of each layer.
        layers: number of layers.
    """

    def __init__(self, in_dim: int, out_dim: int, hidden: int = 64, layers: int = 2) -> None:
        widths = [in_dim] + [hidden] * (layers - 1)
        super().__init__(
            MessagePassing(
                None,
                "sum",
                Embed(d, hidden, message_dim=hidden),
                EdgeWeight(nn.Sequential(Linear(d, hidden), nn.ReLU()), normalized=True),
            )
            for d in widths
        )
        self.head = nn.Sequential(Linear(hidden, hidden), nn.ReLU(), Linear(hidden, out_dim, bias=False))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:  # type: ignore[override]
        """Returns embeddings [N, out_dim] of items x [N, in_dim]. `graph.edge_attr` holds the visit counts [E]."""
        return self.head(super().forward(x, graph))

    def loss(  # type: ignore[override]
        self, x: Tensor, graph: Graph, query: Tensor, positive: Tensor, negative: Tensor, margin: float = 0.1
    ) -> Tensor:
        """Returns the max-margin loss: the mean of `max(0, z_q . z_n - z_q . z_p + margin)` (eq. 1).

        Args:
            x: [N, in_dim].
            graph: as in `forward`.
            query: items, int64 [Q].
            positive: a related item for each query, int64 [Q].
            negative: unrelated items for each query, int64 [Q] or [Q, M].
            margin: the margin.
        """
        z = self(x, graph)
        query_z = F.embedding(query, z)
        positive_score = (query_z * F.embedding(positive, z)).sum(-1)
        negative_score = (query_z[:, None] * F.embedding(negative.reshape(len(query), -1), z)).sum(-1)
        return F.relu(negative_score - positive_score[:, None] + margin).mean()
