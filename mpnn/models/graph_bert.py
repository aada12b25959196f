"""Graph-BERT: each node reads a small group of nodes close to it, without links; encodings tell how they stood."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import check, encodings
from mpnn.attention import DotProduct
from mpnn.graph import Graph
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.positions import sinusoid
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import FeedForward, PostNorm

COMPLETE = complete()

_FURTHEST = 99  # hops that are told apart; where no path leads it is one more


@dataclass(frozen=True, eq=False)
class Subgraphs:
    """The nodes that targets read, int64 [T, k + 1] each.

    `nodes`: the target first, then its context, the most intimate first. `roles`: their Weisfeiler-Lehman roles in the
    whole graph. `hops`: how many edges lead from them to the target.
    """

    nodes: Tensor
    roles: Tensor
    hops: Tensor

    def of(self, targets: Tensor) -> Subgraphs:
        """Those of some targets, integers [B] or bool [T]: a batch."""
        return Subgraphs(self.nodes[targets], self.roles[targets], self.hops[targets])


def intimate_subgraphs(graph: Graph, k: int, alpha: float = 0.15, rounds: int = 2) -> Subgraphs:
    """For each node i the k others with the highest intimacy `S_ij`, S = alpha (I - (1 - alpha) A D^-1)^-1 (Zhang et
    al. 2020, "Linkless subgraph batching"): top-k personalised PageRank. Of equals the first count.

    Args:
        rounds: of Weisfeiler-Lehman refinement.

    Raises:
        ValueError: the graph has not more than k nodes, or k is negative.
    """
    n = graph.num_dst
    if not 0 <= k < n:
        raise ValueError(f"k must be at least 0 and less than the number of nodes, {n}; got {k}")
    intimacy = encodings.pagerank(graph, alpha)
    itself = torch.arange(n, device=graph.device)[:, None]
    others = intimacy.scatter(1, itself, -1.0).sort(dim=1, descending=True, stable=True).indices[:, :k]
    nodes = torch.cat([itself, others], 1)
    roles = encodings.weisfeiler_lehman(graph, rounds)
    return Subgraphs(nodes, roles[nodes], encodings.shortest_paths(graph, _FURTHEST).gather(1, nodes))


class GraphBert(Model):
    """Graph-BERT for classifying nodes (Zhang et al. 2020, "Graph-Bert: only attention is needed for learning graph
    representations"). For the nodes j of a target's subgraph:

        h_j = W x_j + P(role of j) + P(rank of j by intimacy) + P(hops from j)     P are sinusoids
        h   <- transformer layer(h) over the complete graph + R x                  raw residual
        z   = mean_j h_j,   logits = W_out z                                       fusion

    No link is heard along: links only decide who belongs to a subgraph, and what the encodings say.

    Args:
        in_dim: width of the features. classes: width of the logits. dim, heads, layers: width, a multiple of heads, and
            even; number of heads; of layers. hidden: of the feed-forward networks; default: `dim`.
        dropout: of what layers add, in training. attention_dropout: of attention weights.
        graph: who hears whom within a subgraph, whose node 0 is the target; default: complete.
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
            raise ValueError(f"dim must be even, as sines and cosines come in pairs; got {dim}")
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
        """x [N, in_dim], of all nodes -> logits [T, classes] of the subgraphs' targets."""
        check.tensor("x", x)
        check.fits("GraphBert", "x", x, check.takes(self.embed))
        rank = torch.arange(subgraphs.nodes.shape[1], device=x.device)
        h = F.embedding(subgraphs.nodes, self.embed(x))
        for number in (subgraphs.roles, rank, subgraphs.hops):
            h = h + sinusoid(number, self.dim, dtype=x.dtype)
        raw = F.embedding(subgraphs.nodes, self.residual(x))
        for layer in self.layers:
            h = layer(h) + raw
        return self.head(h.mean(-2))

    def loss(self, x: Tensor, subgraphs: Subgraphs, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats; target int64 [T]."""
        return F.cross_entropy(self(x, subgraphs), target)
