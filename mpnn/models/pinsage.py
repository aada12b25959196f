"""PinSage: an item hears the items that short walks over a bipartite graph lead to, as much as they do."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import EdgeWeight
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.stack import Stack
from mpnn.models.sage import Embed


class PinSage(Stack):
    """Recommendation from item to item (Ying et al. 2018, algorithms 1 and 2).

        n_i <- sum_j v_ij relu( Q h_j + q ) / sum_j v_ij,   h_i <- normalised( relu( W [h_i || n_i] + w ) )
        z_i  = G_2 relu( G_1 h_i + g )

    v_ij is how often walks from i visit j: the graph is `graphs.random_walk_neighbors(items_hear_users, k)`.

    Args:
        in_dim: width of the items' features. out_dim: of their embeddings z. hidden: of each layer. layers: their
            number.
    """

    def __init__(self, in_dim: int, out_dim: int, hidden: int = 64, layers: int = 2) -> None:
        widths = [in_dim] + [hidden] * (layers - 1)
        super().__init__(
            MessagePassing(
                None,
                "sum",
                Embed(d, hidden, message_dim=hidden),
                EdgeWeight(nn.Sequential(nn.Linear(d, hidden), nn.ReLU()), normalized=True),
            )
            for d in widths
        )
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out_dim, bias=False))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:  # type: ignore[override]
        """Embeddings [N, out_dim] of items x [N, in_dim], over a graph whose edges bring visits [E]."""
        return self.head(super().forward(x, graph))

    def loss(
        self, x: Tensor, graph: Graph, query: Tensor, positive: Tensor, negative: Tensor, margin: float = 0.1
    ) -> Tensor:
        """`mean of max(0, z_q . z_n - z_q . z_p + margin)` (eq. 1): x [N, in_dim]; for each query, int64 [Q], an item
        that goes with it [Q], and some that do not [Q] or [Q, M]."""
        z = self(x, graph)
        asked = F.embedding(query, z)
        good = (asked * F.embedding(positive, z)).sum(-1)
        bad = (asked[:, None] * F.embedding(negative.reshape(len(query), -1), z)).sum(-1)
        return F.relu(bad - good[:, None] + margin).mean()

    def recommend(self, z: Tensor, query: Tensor, count: int) -> Tensor:
        """The items that go best with each query item, best first and itself aside: int64 [Q, count] of embeddings
        z [N, out_dim] and query int64 [Q]."""
        if not 0 <= count < len(z):
            raise ValueError(f"count must be less than the {len(z)} items; got {count}")
        score = z[query] @ z.T
        return score.scatter(1, query[:, None], float("-inf")).topk(count).indices
