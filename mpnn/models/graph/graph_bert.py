"""Graph-BERT: attention over a small subgraph per node, whose structure enters as positional encodings only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import encodings
from mpnn.attention import DotProduct
from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.positions import sinusoid
from mpnn.models.saving import Model
from mpnn.request import validation
from mpnn.update import FeedForward, PostNorm

COMPLETE = complete()

_MAX_HOPS = 99  # larger distances are clipped to this; unreachable nodes have _MAX_HOPS + 1


@dataclass(frozen=True, eq=False)
class Subgraphs:
    """The subgraphs of T target nodes; each field is int64 [T, k + 1].

    Attributes:
        nodes: the target, then its context in descending order of intimacy.
        roles: Weisfeiler-Lehman roles of the nodes in the whole graph.
        hops: length of the shortest path from each node to the target.
    """

    nodes: Tensor
    roles: Tensor
    hops: Tensor

    def of(self, targets: Tensor) -> Subgraphs:
        """Selects the subgraphs of some targets, integers [B] or bool [T]."""
        return Subgraphs(self.nodes[targets], self.roles[targets], self.hops[targets])


def intimate_subgraphs(graph: Graph, k: int, alpha: float = 0.15, rounds: int = 2) -> Subgraphs:
    """Selects for each node i the k other nodes j with the highest intimacy `S_ij`.

        S = alpha (I - (1 - alpha) A D^-1)^-1

    This is the top-k of personalised PageRank (Zhang et al. 2020, "Linkless subgraph batching"). Among equal values the
    lower node index comes first.

    Args:
        graph: the whole graph.
        k: number of context nodes of each target.
        alpha: restart probability of PageRank.
        rounds: number of Weisfeiler-Lehman refinements.

    Raises:
        ValueError: if k is negative or not less than the number of nodes.
    """
    n = graph.num_dst
    if not 0 <= k < n:
        raise ValueError(f"k must be at least 0 and less than the number of nodes, {n}; got {k}")
    intimacy = encodings.pagerank(graph, alpha)
    targets = torch.arange(n, device=graph.device)[:, None]
    others = intimacy.scatter(1, targets, -1.0).sort(dim=1, descending=True, stable=True).indices[:, :k]
    nodes = torch.cat([targets, others], 1)
    roles = encodings.weisfeiler_lehman(graph, rounds)
    return Subgraphs(nodes, roles[nodes], encodings.shortest_paths(graph, _MAX_HOPS).gather(1, nodes))


class GraphBert(Model):
    """Graph-BERT for node classification (Zhang et al. 2020, "Graph-Bert: only attention is needed for learning graph
    representations"). For the nodes j of a target's subgraph:

        h_j = W x_j + P(role of j) + P(rank of j by intimacy) + P(hops from j)     P are sinusoids
        h   <- transformer layer(h) over the complete graph + R x                  raw residual
        z   = mean_j h_j,   logits = W_out z                                       fusion

    No messages pass along the edges of the original graph. Its edges only determine the subgraphs and the encodings.

    Args:
        in_dim: width of the input features.
        classes: number of classes, the width of the logits.
        dim: width of the layers, even and a multiple of `heads`.
        heads: number of attention heads.
        layers: number of layers.
        hidden: width of the feed-forward networks; default: `dim`.
        dropout: dropout probability of the residual branches, in training.
        attention_dropout: dropout probability of the attention weights, in training.
        graph: topology within a subgraph, whose node 0 is the target; default: complete.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        dim: int = 32,
        heads: int = 2,
        layers: int = 2,
        *,
        hidden: int | None = None,
        dropout: float = 0.5,
        attention_dropout: float = 0.3,
        graph: Topology = COMPLETE,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim must be even, because the encodings are pairs of sine and cosine; got {dim}")
        self.dim = dim
        self.embed, self.residual = nn.Linear(in_dim, dim), nn.Linear(in_dim, dim)
        hidden = dim if hidden is None else hidden
        self.layers = nn.ModuleList(
            MessagePassing(
                graph,
                "sum",
                PostNorm(dim, FeedForward(dim, hidden), dropout=dropout),
                DotProduct(dim, heads, dropout=attention_dropout),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor, subgraphs: Subgraphs) -> Tensor:
        """x [N, in_dim] of all nodes -> logits [T, classes] of the subgraphs' targets."""
        validation.tensor("x", x)
        validation.fits("GraphBert", "x", x, validation.takes(self.embed))
        rank = torch.arange(subgraphs.nodes.shape[1], device=x.device)
        h = F.embedding(subgraphs.nodes, self.embed(x))
        for positions in (subgraphs.roles, rank, subgraphs.hops):
            h = h + sinusoid(positions, self.dim, dtype=x.dtype)
        raw = F.embedding(subgraphs.nodes, self.residual(x))
        for layer in self.layers:
            h = layer(h) + raw
        return self.head(h.mean(-2))

    def loss(self, x: Tensor, subgraphs: Subgraphs, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats; target int64 [T]."""
        return F.cross_entropy(self(x, subgraphs), target)
