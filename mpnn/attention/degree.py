"""Weights that depend on the graph only: GCN's normalization by degree."""

import torch
from torch import Tensor, nn

from mpnn.attention.spec import Attention, check_integers, join_heads
from mpnn.graph import Graph
from mpnn.graph.arguments import one_set
from mpnn.graph.exchange import LOCAL
from mpnn.round import Round
from mpnn.update.maps import Linear


class Degree(Attention):
    """GCN's fixed weights (Kipf & Welling 2017, eq. 2): `w_ij = a_ij / sqrt(d_i d_j)`, value `W h_j`.

    d is the in-degree of a node, or the sum of the weights |a_ij| of its incoming edges if edges have one-dimensional
    attributes, which may be negative (the signed Laplacian, Kunegis et al. 2010). Batches of `neighbor_batches` carry
    the d of the whole graph. To add the paper's self-loops, use `graph.with_self_loops(fill=1.0)`.
    """

    normalize = "none"
    depends_on = "row"
    balanced = True
    reads = "", "to_value"

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        check_integers(in_dim=in_dim, out_dim=out_dim)
        self.to_value = Linear(in_dim, out_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None
        nn.init.xavier_uniform_(self.to_value.weight)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        if graph.exchange is LOCAL and graph.degrees is None:
            one_set("Degree", graph)
        if edge_attr is None:
            weight = graph.cached(("degree weights", src.dtype), lambda: degree_weights(graph, dtype=src.dtype))
        else:
            if edge_attr.numel() != graph.num_edges:
                raise ValueError(
                    f"Degree takes one weight per edge as edge_attr, [{graph.num_edges}]; got {list(edge_attr.shape)}"
                )
            if graph.degrees is not None and edge_attr is not graph.edge_attr:
                raise ValueError(
                    "the degrees of a sampled graph sum the weights of the whole graph's edges; pass edge_attr to "
                    "graphs.from_edges before sampling, not to the layer"
                )
            weight = degree_weights(graph, edge_attr.reshape(-1), src.dtype)
        return Round(graph, self.to_value(src).unsqueeze(-2), bias=(weight[:, None],))

    def merge(self, out: Tensor) -> Tensor:
        return join_heads(out, True, self.bias)


def degree_weights(graph: Graph, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Returns `a_ij / sqrt(d_i d_j)` for each edge, [E] in the caller's order; 0 if an end has degree 0. d sums |a_ij|.

    `dtype` is the dtype of the result. Default: that of `weight`, or float32 without `weight`. Degrees are summed in
    float32 or wider, because bfloat16 counts no further than 256.
    """
    src, dst = graph.stored_edges
    if dtype is None:
        dtype = torch.float32 if weight is None else weight.dtype
    accumulate_dtype = torch.promote_types(dtype, torch.float32)
    weight = (
        torch.ones(graph.num_edges, dtype=accumulate_dtype, device=graph.device)
        if weight is None
        else weight.to(accumulate_dtype)
    )
    if graph.degrees is not None:
        of_dst, of_src = (_inverse_root(degree.to(accumulate_dtype)) for degree in graph.degrees)
    else:
        size = torch.where(weight < 0, -weight, weight)  # unlike abs, with a derivative of 1 at 0
        of_dst = _inverse_root(weight.new_zeros(graph.num_dst).index_add(0, dst, size))
        of_src = graph.exchange(of_dst, 0)  # a part: degrees in the whole graph
    # index_select, because the backward of indexing sums in a nondeterministic order on several threads
    return (of_dst.index_select(0, dst) * weight * of_src.index_select(0, src)).to(dtype)


def _inverse_root(degree: Tensor) -> Tensor:
    return torch.where(degree > 0, degree.clamp(min=torch.finfo(degree.dtype).tiny).rsqrt(), torch.zeros_like(degree))
