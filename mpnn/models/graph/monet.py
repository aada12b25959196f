"""MoNet: messages weighted by Gaussians of the edges' pseudo-coordinates."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Gaussian
from mpnn.graph import sharding
from mpnn.models.layers.stack import Stack
from mpnn.round import validation
from mpnn.update import Activate
from mpnn.update.maps import Linear


class MoNet(Stack):
    """Mixture model network for node classification (Monti et al. 2017, eq. 9-11 and section 5.2).

        u_ij = tanh( A (1 / sqrt(d_i), 1 / sqrt(d_j)) + b ),   d the in-degree of each node
        h_i <- relu( sum_k mean_j exp( -1/2 (u_ij - mu_k)^T Sigma_k^-1 (u_ij - mu_k) ) W_k h_j )

    Where nodes have known positions (a mesh, a road map, an image), edge attributes can replace the degrees as
    pseudo-coordinates.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        hidden: width between the two layers.
        kernels: number of Gaussians.
        coordinates: width of the edges' coordinates; None to use degrees.
        dropout: dropout probability of the features that enter each layer.
        graph: topology or graph of both layers; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 16,
        kernels: int = 3,
        *,
        coordinates: int | None = None,
        dropout: float = 0.5,
        graph: Topology | Graph | None = None,
    ) -> None:
        width = 2 if coordinates is None else coordinates
        places = nn.ModuleList(nn.Sequential(Linear(width, width), nn.Tanh()) for _ in range(2))
        first = MessagePassing(None, "mean", Activate(F.relu), Gaussian(in_dim, hidden, kernels, width))
        last = MessagePassing(None, "mean", None, Gaussian(hidden, classes, kernels, width))
        super().__init__([first, last], dropout)
        self.graph = graph
        self.by_degree = coordinates is None
        self.places = places

    def forward(  # type: ignore[override]
        self, x: Tensor, graph: Topology | Graph | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Maps x [..., N, in_dim] to logits [..., N, classes].

        edge_attr: the edges' coordinates [E, coordinates] if the model has `coordinates`; default: the graph's.
        """
        validation.input_features("x", x)
        first: Any = self.layers[0]
        validation.fits("MoNet", "x", x, first.attention.takes()[1])
        graph = self.graph if graph is None else graph
        if graph is None:
            raise ValueError("this model has no graph; pass one with the call: model(x, graph=...)")
        bound = sharding.bind(graph, x.shape[-2], x.shape[-2]).to(x.device)
        if self.by_degree:
            edge_attr = bound.cached(("degree coordinates", x.dtype), lambda: degree_coordinates(bound, x.dtype))
        elif edge_attr is None:
            edge_attr = bound.edge_attr
        edge_attr = validation.edge_features("MoNet with coordinates", edge_attr)
        for to_coordinates, layer in zip(self.places, self.layers, strict=True):
            x = layer(self.dropout(x), bound, edge_attr=to_coordinates(edge_attr))
        return x


def degree_coordinates(graph: Graph, dtype: torch.dtype = torch.float32) -> Tensor:
    """`(1 / sqrt(d_i), 1 / sqrt(d_j))` for each edge from j to i, [E, 2]. Degree 0 counts as 1."""
    inverse = graph.degree().clamp(min=1).to(dtype).rsqrt()
    of_src = graph.exchange(inverse, 0)  # a part: degrees in the whole graph
    src, dst = graph.ends
    return torch.stack([inverse.index_select(0, dst), of_src.index_select(0, src)], 1)
