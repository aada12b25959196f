"""Attention specs that listen to what is near: Gaussians of pseudo-coordinates (MoNet), and of distances (VAIN)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpnn.attention import Attention, Terms
from mpnn.graph import Graph
from mpnn.scores import Dot


class Gaussian(Attention):
    """Weights by where an edge's pseudo-coordinates u_ij lie (MoNet, Monti et al. 2017, eq. 9-11):

        w_ijk = exp( -1/2 (u_ij - mu_k)^T Sigma_k^-1 (u_ij - mu_k) ),   m_i = sum_k reduce_j w_ijk W_k h_j

    Sigma_k is diagonal, as in the paper. Edges bring their coordinates as attributes [E, coordinates].

    Args:
        in_dim: width of the features. out_dim: of the message. kernels: their number. coordinates: width of u_ij.
        bias: whether a learned bias is added to the message.
    """

    normalize = "none"

    def __init__(self, in_dim: int, out_dim: int, kernels: int, coordinates: int, *, bias: bool = True) -> None:
        super().__init__()
        self.kernels = kernels
        self.to_value = nn.Linear(in_dim, kernels * out_dim, bias=False)
        self.mu, self.sigma = (nn.Parameter(torch.empty(kernels, coordinates)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None
        nn.init.xavier_uniform_(self.to_value.weight)
        nn.init.uniform_(self.mu)
        nn.init.uniform_(self.sigma, 0.5, 1.5)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        coordinates = self.mu.shape[1]
        if edge_attr is None or edge_attr.numel() != graph.num_edges * coordinates:
            given = "none" if edge_attr is None else list(edge_attr.shape)
            raise ValueError(
                f"Gaussian needs the edges' pseudo-coordinates as edge_attr, [{graph.num_edges}, {coordinates}]; got "
                f"{given}"
            )
        apart = edge_attr.to(src.dtype).reshape(-1, 1, coordinates) - self.mu
        weight = (-0.5 * (apart.square() / (self.sigma.square() + 1e-15)).sum(-1)).exp()
        return Terms(self.to_value(src).unflatten(-1, (self.kernels, -1)), bias=(weight,))

    def merge(self, out: Tensor) -> Tensor:
        message = out.sum(-2)
        return message if self.bias is None else message + self.bias


class Near(Attention):
    """Weights by how near two nodes' own vectors are (VAIN, Hoshen 2017, section 3.2):

        w_ij = softmax_j( -|a_i - a_j|^2 ),   a_i = A h_i,   m_i = sum_j w_ij V h_j

    |a_i|^2 is the same for every j and cancels, so the score is the inner product of (2 a_i, -1) and (a_j, |a_j|^2):
    what runs dot-product attention runs this.

    Args:
        to_place: A, a module that gives the vectors a [..., N, D]. to_value: V, that of what is heard.
        dropout: of attention weights, in training.
    """

    def __init__(self, to_place: nn.Module, to_value: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.to_place, self.to_value, self.dropout = to_place, to_value, dropout

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        here, there = self.to_place(dst), self.to_place(src)
        query = torch.cat([2 * here, -torch.ones_like(here[..., :1])], -1)
        key = torch.cat([there, there.square().sum(-1, keepdim=True)], -1)
        return Terms(self.to_value(src).unsqueeze(-2), Dot(query.unsqueeze(-2), key.unsqueeze(-2), 1.0))
