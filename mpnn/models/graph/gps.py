"""GraphGPS: message passing over edges, in parallel with attention over all nodes of a graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology, graphs, ops
from mpnn.attention import DotProduct
from mpnn.graphs import encodings
from mpnn.models.layers.blocks import BatchNorm
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import MLP, Add, PostNorm
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear

COMPLETE = graphs.complete()


class GPSLayer(nn.Module):
    """One layer of GraphGPS (Rampasek et al. 2022, "Recipe for a general, powerful, scalable graph transformer").

    Two message passing operators run in parallel over two graphs on the same nodes:

        l = norm_l( x + local(x) )                        over the graph's edges: any MessagePassing
        g = norm_g( x + attention(x) )                    over a complete graph for each graph of a batch
        y = norm( l + g + mlp(l + g) )

    Args:
        local: a `MessagePassing` from width `dim` to `dim`, or a module with the same signature; None omits l.
        dim: width of the features, a multiple of `heads`.
        heads: number of attention heads.
        dropout: dropout probability of each residual branch, in training.
        attention_dropout: dropout probability of the attention weights, in training.
        norm: normalization, for example `BatchNorm` over all nodes (as in the paper), `nn.LayerNorm`, `nn.Identity`.
        activation: activation of the MLP.
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
        """Maps x [..., N, dim] to [..., N, dim].

        Args:
            graph: the edges. Replaces the graph of the local operator.
            among: graph of the attention: `documents(sizes)` for a batch of graphs of these sizes. Default: complete.
            edge_attr: [E, ...] for the local operator, in the caller's edge order. Default: the graph's.
        """
        both = self.everybody(x, among)
        if self.local is not None and self.keep_local is not None:
            both = both + self.keep_local(x, self.local(x, graph, edge_attr=edge_attr))
        return self.keep_both(both, self.mlp(both))


class GPS(Model):
    """GraphGPS for classification of nodes or graphs (Rampasek et al. 2022).

    The input is the features concatenated with a random-walk encoding. The local operator of each layer is that of GIN
    (Xu et al. 2019).

        h = W x || W_p random_walk(graph),   h <- GPSLayer(h),   logits = mlp(h_i), or mlp(mean_i h_i) for a graph

    Args:
        in_dim, classes: widths of the input features and of the logits.
        dim: width of the layers, a multiple of `heads`.
        heads: number of attention heads.
        layers: number of layers.
        walk: number of steps of the random-walk encoding, which takes a quarter of `dim`; 0 for no encoding.
        dropout: dropout probability of the residual branches and of the attention weights, in training.
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
        walk_dim = dim // 4 if walk else 0
        self.walk = walk
        self.embed = Linear(in_dim, dim - walk_dim)
        self.embed_walk = nn.Sequential(nn.BatchNorm1d(walk), Linear(walk, walk_dim)) if walk else None
        self.layers = nn.ModuleList(
            GPSLayer(
                MessagePassing(None, "sum", Add(MLP(dim, dim))), dim, heads, dropout=dropout, attention_dropout=dropout
            )
            for _ in range(layers)
        )
        self.head = MLP(dim, classes, dim // 2, dropout=dropout)

    def forward(self, x: Tensor, graph: Graph, sizes: Sequence[int] | None = None) -> Tensor:
        """Returns logits [N, classes] of the nodes, or [G, classes] of the graphs of a batch if `sizes` is passed.

        Args:
            x: [N, in_dim].
            graph: the edges. The random-walk encoding is computed once and cached on the graph.
            sizes: number of nodes of each graph of the batch, if `graph` is a batch (`graphs.batch`).
        """
        validation.input_features("x", x)
        validation.fits("GPS", "x", x, validation.takes(self.embed))
        h = self.embed(x)
        if self.embed_walk is not None:
            walk = graph.cached(("random walk", self.walk), lambda: encodings.random_walk(graph, self.walk))
            h = torch.cat([h, self.embed_walk(walk.to(x.dtype))], -1)
        among = COMPLETE if sizes is None else graphs.documents(list(sizes))
        for layer in self.layers:
            h = layer(h, graph, among)
        if sizes is not None:
            h = ops.aggregate(graphs.batch([COMPLETE.bind(1, size) for size in sizes]).to(x.device), h, "mean")
        return self.head(h)

    def loss(self, x: Tensor, graph: Graph, target: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Returns the mean cross-entropy in nats; target int64 [N], or [G] with `sizes`; -100 is ignored."""
        return F.cross_entropy(self(x, graph, sizes), target)
