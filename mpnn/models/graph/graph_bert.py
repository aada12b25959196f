"""Graph-BERT: attention over a small subgraph per node, whose structure enters as positional encodings only."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Degree, DotProduct
from mpnn.graphs import complete, encodings
from mpnn.models.layers.positions import sinusoid
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import FeedForward, PostNorm
from mpnn.update.maps import Linear

COMPLETE = complete()

_MAX_HOPS = 99  # larger distances are clipped to this; unreachable nodes have _MAX_HOPS + 1


@dataclass(frozen=True, eq=False)
class Subgraphs:
    """The subgraphs of T target nodes; each field is int64 [T, k + 1].

    Attributes:
        nodes: the target, then its context in descending order of intimacy.
        roles: Weisfeiler-Lehman roles of the nodes in the whole graph.
        hops: length of the shortest path from each node to the target.
        graph: the whole graph with self-loops, along which the residual "graph" goes.
    """

    nodes: Tensor
    roles: Tensor
    hops: Tensor
    graph: Graph | None = None

    def of(self, targets: Tensor) -> "Subgraphs":
        """Selects the subgraphs of some targets, integers [B] or bool [T]."""
        return Subgraphs(self.nodes[targets], self.roles[targets], self.hops[targets], self.graph)


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
    hops = encodings.shortest_paths(graph, _MAX_HOPS).gather(1, nodes)
    return Subgraphs(nodes, roles[nodes], hops, graph.with_self_loops())


class GraphBert(Model):
    """Graph-BERT for node classification (Zhang et al. 2020, "Graph-Bert: only attention is needed for learning graph
    representations"). For the nodes j of a target's subgraph:

        h_j = W x_j + P(role of j) + P(rank of j by intimacy) + P(hops from j)     P are sinusoids
        h   <- transformer layer(h) over the complete graph + R x                  raw residual
        z   = mean_j h_j,   logits = W_out z                                       fusion

    With residual="raw", no messages pass along the edges of the original graph: they only determine the subgraphs and
    the encodings. With residual="graph", the paper's graph-raw residual, the residual of all nodes of a subgraph is a
    GCN's sum (A R x) at its target, and the logits have one too, + A R' x. The authors' program has this one for Cora.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        dim: width of the layers, even and a multiple of `heads`.
        heads: number of attention heads.
        layers: number of layers.
        hidden: width of the feed-forward networks; default: `dim`.
        dropout: dropout probability of the residual branches, in training.
        attention_dropout: dropout probability of the attention weights, in training.
        residual: "raw" or "graph".
        graph: topology within a subgraph, whose node 0 is the target; default: complete.

    Raises:
        ValueError: if `dim` is odd, or `residual` is neither.
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
        residual: Literal["raw", "graph"] = "raw",
        graph: Topology = COMPLETE,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim must be even, because the encodings are pairs of sine and cosine; got {dim}")
        if residual not in ("raw", "graph"):
            raise ValueError(f'residual must be "raw" or "graph"; got {residual!r}')
        self.dim = dim
        self.embed = Linear(in_dim, dim)
        self.residual: nn.Module = Linear(in_dim, dim)
        if residual == "graph":
            self.residual = MessagePassing(None, "sum", None, Degree(in_dim, dim))
            self.residual_logits = MessagePassing(None, "sum", None, Degree(in_dim, classes))
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
        self.head = Linear(dim, classes)

    def forward(self, x: Tensor, subgraphs: Subgraphs) -> Tensor:
        """Maps x [N, in_dim] of all nodes to logits [T, classes] of the subgraphs' targets."""
        validation.input_features("x", x)
        validation.fits("GraphBert", "x", x, validation.takes(self.embed))
        rank = torch.arange(subgraphs.nodes.shape[1], device=x.device)
        h = F.embedding(subgraphs.nodes, self.embed(x))
        for positions in (subgraphs.roles, rank, subgraphs.hops):
            h = h + sinusoid(positions, self.dim, dtype=x.dtype)
        raw, logits = self._residuals(x, subgraphs)
        for layer in self.layers:
            h = layer(h) + raw
        return self.head(h.mean(-2)) + logits

    def _residuals(self, x: Tensor, subgraphs: Subgraphs) -> tuple[Tensor, Tensor | float]:
        """Returns the residuals of each layer, [T, k + 1, dim] or [T, 1, dim], and to the logits, [T, classes] or
        zero."""
        if isinstance(self.residual, nn.Linear):
            return F.embedding(subgraphs.nodes, self.residual(x)), 0.0
        if subgraphs.graph is None:
            raise ValueError(
                'residual="graph" needs the whole graph: pass Subgraphs(..., graph=graph.with_self_loops())'
            )
        targets = subgraphs.nodes[:, 0]
        raw = self.residual(x, subgraphs.graph)
        logits = self.residual_logits(x, subgraphs.graph)
        return raw.index_select(0, targets)[:, None], logits.index_select(0, targets)

    def loss(self, x: Tensor, subgraphs: Subgraphs, target: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats; target int64 [T]."""
        return F.cross_entropy(self(x, subgraphs), target)
