"""MoNet: a node hears its neighbours through several Gaussians of where they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import check
from mpnn.attention import Gaussian
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import Activate


class MoNet(Model):
    """Mixture model network for classifying nodes (Monti et al. 2017, eq. 9-11 and section 5.2).

        u_ij = tanh( A (1 / sqrt(d_i), 1 / sqrt(d_j)) + b ),   d the degree of each end
        h_i <- relu( sum_k mean_j exp( -1/2 (u_ij - mu_k)^T Sigma_k^-1 (u_ij - mu_k) ) W_k h_j )

    Where a place is known, in a mesh, a road map, an image, edges bring their own pseudo-coordinates.

    Args:
        in_dim: width of the features. classes: width of the logits. hidden: between the two layers.
        kernels: number of Gaussians. coordinates: width of the edges' own coordinates, None for degrees.
        dropout: of the features that enter each layer. graph: whom nodes hear; None when each call gives it.
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
        super().__init__()
        self.graph, self.by_degree = graph, coordinates is None
        width = 2 if coordinates is None else coordinates
        self.places = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.layers = nn.ModuleList(
            [
                MessagePassing(None, "mean", Activate(F.relu), Gaussian(in_dim, hidden, kernels, width)),
                MessagePassing(None, "mean", None, Gaussian(hidden, classes, kernels, width)),
            ]
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, edge_attr: Tensor | None = None) -> Tensor:
        """x [..., N, in_dim] -> logits [..., N, classes]; edge_attr: the edges' coordinates [E, coordinates] where the
        model was made for them, default: the graph's."""
        check.tensor("x", x)
        first: Any = self.layers[0]
        check.fits("MoNet", "x", x, first.attention.takes()[1])
        given = self.graph if graph is None else graph
        if given is None:
            raise ValueError("this model was made without a graph; give one with the call: model(x, graph=...)")
        bound = given.bind(x.shape[-2]).to(x.device) if isinstance(given, Topology) else given
        if self.by_degree:
            edge_attr = bound.memo(("degree coordinates", x.dtype), lambda: degree_coordinates(bound, x.dtype))
        elif edge_attr is None:
            edge_attr = bound.edge_attr
        if edge_attr is None:
            raise ValueError("this model was made for coordinates: the graph or the call must give edge_attr")
        for place, layer in zip(self.places, self.layers, strict=True):
            x = layer(self.dropout(x), bound, edge_attr=place(edge_attr))
        return x


def degree_coordinates(graph: Graph, dtype: torch.dtype = torch.float32) -> Tensor:
    """`(1 / sqrt(d_i), 1 / sqrt(d_j))` for each edge from j to i, [E, 2]; who hears nobody counts as hearing one."""
    inverse = graph.degree().clamp(min=1).to(dtype).rsqrt()
    src, dst = graph.edge_index
    return torch.stack([inverse.index_select(0, dst), inverse.index_select(0, src)], 1)
