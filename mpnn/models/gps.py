"""GraphGPS: a node hears its neighbours along edges and, beside that, everybody in its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import check, encodings, graphs, ops
from mpnn.attention import DotProduct
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import BatchNorm
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import MLP, Add, PostNorm

COMPLETE = graphs.complete()


class GPSLayer(nn.Module):
    """One layer of GraphGPS (Rampasek et al. 2022, "Recipe for a general, powerful, scalable graph
    transformer"): two rounds of message passing over two graphs on the same nodes, side by side.

        l = norm_l( x + local(x) )                        over the given edges: any MessagePassing
        g = norm_g( x + attention(x) )                    over complete graphs, one for each graph of a batch
        y = norm( l + g + mlp(l + g) )

    Args:
        local: a `MessagePassing` over the edges, from `dim` to `dim`, or a module called like one; None leaves l out.
        dim, heads: width, a multiple of heads. dropout: of what each part adds, in training.
        attention_dropout: of attention weights, in training.
        norm: batch normalisation of all nodes (the paper's), `nn.LayerNorm`, `nn.Identity`. activation: of the MLP.
    """

    def __init__(
        self,
        local: nn.Module | None,
        dim: int,
        heads: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = BatchNorm,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.local = local
        self.keep_local = None if local is None else PostNorm(dim, dropout=dropout, norm=norm)
        self.everybody = MessagePassing(
            COMPLETE,
            "sum",
            PostNorm(dim, dropout=dropout, norm=norm),
            DotProduct(dim, heads, dropout=attention_dropout),
        )
        self.mlp = nn.Sequential(MLP(dim, dim, 2 * dim, activation, dropout), Dropout(dropout))
        self.keep_both = PostNorm(dim, norm=norm)

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        among: Topology | Graph | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """x [..., N, dim] -> [..., N, dim].

        Args:
            graph: the edges; takes the place of the local round's own.
            among: who is everybody, `documents(sizes)` for a batch of graphs of these sizes; default: all nodes.
            edge_attr: [E, ...] for the local round, in the caller's edge order; default: the graph's.
        """
        both = self.everybody(x, among)
        if self.local is not None and self.keep_local is not None:
            both = both + self.keep_local(x, self.local(x, graph, edge_attr=edge_attr))
        return self.keep_both(both, self.mlp(both))


class GPS(Model):
    """GraphGPS for nodes or whole graphs: features beside a random-walk encoding, then layers whose local round is GIN
    (Xu et al. 2019).

        h = W x || W_p random_walk(graph),   h <- GPSLayer(h),   logits = mlp(h_i), or mlp(mean_i h_i) for a graph

    Args:
        in_dim: width of the features. classes: width of the logits. dim, heads, layers: width, a multiple of heads;
            number of heads; of layers. walk: steps of the encoding, 0 for none; it gets a quarter of `dim`.
        dropout: of what each part of a layer adds and of attention weights, in training.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        dim: int = 64,
        heads: int = 4,
        layers: int = 5,
        *,
        walk: int = 16,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        encoded = dim // 4 if walk else 0
        self.walk = walk
        self.embed = nn.Linear(in_dim, dim - encoded)
        self.embed_walk = nn.Sequential(nn.BatchNorm1d(walk), nn.Linear(walk, encoded)) if walk else None
        self.layers = nn.ModuleList(
            GPSLayer(
                MessagePassing(None, "sum", Add(MLP(dim, dim))), dim, heads, dropout=dropout, attention_dropout=dropout
            )
            for _ in range(layers)
        )
        self.head = MLP(dim, classes, dim // 2, dropout=dropout)

    def forward(self, x: Tensor, graph: Graph, sizes: Sequence[int] | None = None) -> Tensor:
        """Logits [N, classes] of the nodes of one graph; or [G, classes] of the graphs of a batch.

        Args:
            x: [N, in_dim]. graph: its edges; the encoding is found once for each, and kept with it.
            sizes: how many nodes each graph of the batch has, when `graph` is one (`graphs.batch`).
        """
        check.tensor("x", x)
        check.fits("GPS", "x", x, check.takes(self.embed))
        h = self.embed(x)
        if self.embed_walk is not None:
            walk = graph.memo(("random walk", self.walk), lambda: encodings.random_walk(graph, self.walk))
            h = torch.cat([h, self.embed_walk(walk.to(x.dtype))], -1)
        among = COMPLETE if sizes is None else graphs.documents(list(sizes))
        for layer in self.layers:
            h = layer(h, graph, among)
        return self.head(h if sizes is None else ops.aggregate(_members(sizes, x.device), h, "mean"))

    def loss(self, x: Tensor, graph: Graph, target: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Mean cross-entropy in nats; target int64 [N], or [G] with `sizes`; -100 where there is nothing to learn."""
        return F.cross_entropy(self(x, graph, sizes), target)


def _members(sizes: Sequence[int], device: torch.device) -> Graph:
    """Each graph of a batch hears its nodes."""
    count = torch.tensor(list(sizes), device=device)
    of = torch.repeat_interleave(torch.arange(len(count), device=device), count)
    nodes = torch.arange(len(of), device=device)
    return graphs.from_edges(torch.stack([nodes, of]), num_src=len(of), num_dst=len(count))
