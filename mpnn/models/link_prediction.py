"""Link prediction: nodes are encoded by what they hear, and pairs of them are scored."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graphs import absent_edges
from mpnn.models.saving import Model
from mpnn.topology import Topology


class LinkPredictor(Model):
    """An encoder and a decoder of pairs (Kipf & Welling 2016, "Variational graph auto-encoders").

        z = encoder(x, graph),   p(j -> i) = sigmoid( decoder(z_j, z_i) )

    Args:
        encoder: any graph network of this library that makes [N, d] of [N, in_dim]. decoder: `Inner()`,
            `DistMult(d, relations)`, `PairMLP(d)`.
    """

    def __init__(self, encoder: Model, decoder: Model) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self, x: Tensor, pairs: Tensor, graph: Topology | Graph | None = None, relation: Tensor | None = None
    ) -> Tensor:
        """Scores [P], the logits of there being these links.

        Args:
            x: [N, in_dim]. pairs: int64 [2, P], sources above destinations. graph: the links that are known.
            relation: int64 [P], the kind of each link that is asked about, for decoders that tell kinds apart.
        """
        return self.score(self.encoder(x, graph), pairs, relation)

    def score(self, z: Tensor, pairs: Tensor, relation: Tensor | None = None) -> Tensor:
        """Scores [P] of pairs [2, P] of nodes that are encoded already, [N, d]."""
        if pairs.dim() != 2 or len(pairs) != 2:
            raise ValueError(f"pairs must be int64 [2, P], sources above destinations; got {list(pairs.shape)}")
        src, dst = z.index_select(0, pairs[0]), z.index_select(0, pairs[1])
        return self.decoder(src, dst) if relation is None else self.decoder(src, dst, relation)

    def loss(
        self,
        x: Tensor,
        graph: Graph,
        positive: Tensor | None = None,
        negative: Tensor | None = None,
        *,
        relation: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats over links that are there plus that over pairs that are none.

        Args:
            x: [N, in_dim]. graph: the links that nodes hear along.
            positive: int64 [2, P], default: the graph's own. negative: default: as many pairs that are no edges of the
                graph, drawn with `generator`.
            relation: int64 [P], the kinds of the positive links; where they are given, there must be as many negative
                ones, and these are asked about the same kinds.
        """
        positive = graph.edge_index if positive is None else positive
        if negative is None:
            negative = absent_edges(graph, positive.shape[1], generator)
        z = self.encoder(x, graph)
        there, not_there = self.score(z, positive, relation), self.score(z, negative, relation)
        return F.softplus(-there).mean() + F.softplus(not_there).mean()


class Inner(Model):
    """`<z_j, z_i>`: links go both ways."""

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        return (src * dst).sum(-1)


class DistMult(Model):
    """`<z_j, r, z_i>`, r a vector for each kind of link (Yang et al. 2015)."""

    def __init__(self, dim: int, relations: int) -> None:
        super().__init__()
        self.relation = nn.Parameter(torch.empty(relations, dim))
        nn.init.xavier_uniform_(self.relation)

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor | None = None) -> Tensor:
        if relation is None:
            raise ValueError(f"DistMult scores {len(self.relation)} kinds of links: say which, relation=int64 [P]")
        return (src * self.relation.index_select(0, relation) * dst).sum(-1)


class PairMLP(Model):
    """`w . relu( W [z_j || z_i] )`: a link and its reverse may differ."""

    def __init__(self, dim: int, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        return self.layers(torch.cat([src, dst], -1)).squeeze(-1)


def hits_at(k: int, positive: Tensor, negative: Tensor) -> float:
    """Hits@k: the share of positive scores [P] that lie above the k-th best of the negative ones [Q] (Hu et al. 2020,
    "Open graph benchmark"); 1 where there are fewer than k negative ones."""
    if k < 1:
        raise ValueError(f"k must be at least 1; got {k}")
    if len(negative) < k:
        return 1.0
    return (positive > negative.topk(k).values[-1]).float().mean().item()
