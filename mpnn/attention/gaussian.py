"""Weights that decay with distance: Gaussians of pseudo-coordinates (MoNet) and of learned vectors (VAIN)."""

import torch
from torch import Tensor, nn

from mpnn.attention.spec import Attention, check_integers, join_heads
from mpnn.graph import Graph
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.update.maps import Linear


class Gaussian(Attention):
    """Gaussian weights of an edge's pseudo-coordinates u_ij (MoNet, Monti et al. 2017, eq. 9-11):

        w_ijk = exp( -1/2 (u_ij - mu_k)^T Sigma_k^-1 (u_ij - mu_k) ),   m_i = sum_k reduce_j w_ijk W_k h_j

    Sigma_k is diagonal, as in the paper. `edge_attr` holds the coordinates, [E, coordinates].

    Args:
        in_dim: width of the features. out_dim: width of the message. kernels: their number. coordinates: width of u_ij.
        bias: whether a learned bias is added to the message.
    """

    normalize = "none"
    depends_on = "node"
    reads = "", "to_value"

    def __init__(self, in_dim: int, out_dim: int, kernels: int, coordinates: int, *, bias: bool = True) -> None:
        super().__init__()
        check_integers(in_dim=in_dim, out_dim=out_dim, kernels=kernels, coordinates=coordinates)
        self.kernels = kernels
        self.to_value = Linear(in_dim, kernels * out_dim, bias=False)
        self.mu, self.sigma = (nn.Parameter(torch.empty(kernels, coordinates)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None
        nn.init.xavier_uniform_(self.to_value.weight)
        nn.init.uniform_(self.mu)
        nn.init.uniform_(self.sigma, 0.5, 1.5)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        coordinates = self.mu.shape[1]
        if edge_attr is None or edge_attr.numel() != graph.num_edges * coordinates:
            shape = "none" if edge_attr is None else list(edge_attr.shape)
            raise ValueError(
                f"Gaussian needs the edges' pseudo-coordinates as edge_attr, [{graph.num_edges}, {coordinates}]; got "
                f"{shape}"
            )
        offset = edge_attr.to(src.dtype).reshape(-1, 1, coordinates) - self.mu
        weight = (-0.5 * (offset.square() / (self.sigma.square() + 1e-15)).sum(-1)).exp()
        return Round(graph, self.to_value(src).unflatten(-1, (self.kernels, -1)), bias=(weight,))

    def merge(self, out: Tensor) -> Tensor:
        return join_heads(out.sum(-2, keepdim=True), True, self.bias)


class Near(Attention):
    """Gaussian weights of the distance between two nodes' vectors (VAIN, Hoshen 2017, section 3):

        w_ij = exp( -|a_i - a_j|^2 ), divided by their sum over j when normalized,   m_i = sum_j w_ij v_j

    When normalized, |a_i|^2 cancels, so the score is the inner product of (2 a_i, -1) and (a_j, |a_j|^2). Any backend
    for dot-product attention runs this without materializing a tensor of edges.

    Args:
        encode: a module that maps features [..., N, d] to the concatenation of the value v and the vector a.
        vector_dim: width of a. normalized: whether weights sum to 1. dropout: of attention weights, in training.
    """

    depends_on = "node"
    reads = "encode", "encode"

    def __init__(self, encode: nn.Module, vector_dim: int, *, normalized: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.encode = encode
        self.vector_dim = vector_dim
        self.dropout = dropout
        self.normalize = "softmax" if normalized else "none"

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        encoded = self.encode(src)
        value = encoded[..., : -self.vector_dim].unsqueeze(-2)
        a_src = encoded[..., -self.vector_dim :]
        a_dst = a_src if dst is src else self.encode(dst)[..., -self.vector_dim :]
        if self.normalize == "none":
            from_src, to_dst = graph.ends
            offset = a_dst.index_select(-2, to_dst) - a_src.index_select(-2, from_src)
            return Round(graph, value, bias=((-offset.square().sum(-1, keepdim=True)).exp(),))
        query = torch.cat([2 * a_dst, -torch.ones_like(a_dst[..., :1])], -1)
        key = torch.cat([a_src, a_src.square().sum(-1, keepdim=True)], -1)
        return Round(graph, value, Dot(query.unsqueeze(-2), key.unsqueeze(-2), 1.0))
