"""Specs without attention: mapped values, weights from edge attributes, and messages computed for each edge."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from mpnn.attention.spec import Attention
from mpnn.graph import Graph
from mpnn.graphs.explicit import edges_into
from mpnn.round import Round, validation
from mpnn.update import rows

Message = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(features of the destinations [..., E, d], of the sources [..., E, d_src], edge_attr [E, ...]) -> [..., E, F], or
[..., E, H, F] for H heads."""


class Mapped(Attention):
    """Linear or other maps before and after an aggregation that weights all sources equally.

        m_i = out( reduce_j value(h_j) )

    Args:
        value: a module for the features of each source, or None. out: a module for the message, or None.
    """

    normalize = "none"
    depends_on = "node"
    reads = "", "value"

    def __init__(self, value: nn.Module | None = None, out: nn.Module | None = None) -> None:
        super().__init__()
        self.value = value
        self.out = out

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, (src if self.value is None else self.value(src)).unsqueeze(-2))

    def merge(self, out: Tensor) -> Tensor:
        message = out.flatten(-2)
        return message if self.out is None else self.out(message)


class EdgeWeight(Mapped):
    """`Mapped` with weights a_ij from `edge_attr`, one number per edge (1 without `edge_attr`).

        m_i = out( reduce_j a_ij value(h_j) )

    `normalized` divides the weights, which must not be negative, by their sum over the in-neighbors of each
    destination: PinSage's importance pooling (Ying et al. 2018, section 3.2).
    """

    depends_on = "row"

    def __init__(
        self, value: nn.Module | None = None, out: nn.Module | None = None, *, normalized: bool = False
    ) -> None:
        super().__init__(value, out)
        self.balanced = normalized

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        round = super().forward(dst, src, graph)
        if edge_attr is None and not self.balanced:
            return round
        weight = src.new_ones(graph.num_edges) if edge_attr is None else edge_attr
        if weight.shape not in ((graph.num_edges,), (graph.num_edges, 1)):
            raise ValueError(
                f"edge_attr must hold one weight for each of {graph.num_edges} edges; got {list(weight.shape)}"
            )
        weight = weight.reshape(-1)
        weight = _normalize(weight, graph) if self.balanced else weight
        return replace(round, bias=(weight.to(src.dtype)[:, None],))


class EdgeFilter(Mapped):
    """`Mapped` with a weight for each edge and feature, a function of `edge_attr`, as the filters of SchNet (Schütt
    et al. 2017). `csr` writes no tensor of products. A filter of linear maps and activations runs a block of edges at a
    time, and keeps nothing between them for the backward pass.

        m_i = out( reduce_j filter(e_ij) * value(h_j) )

    Args:
        filter: `edge_attr -> weights [E, F]`, F the width of `value(h)`; None for edge_attr itself.
    """

    def __init__(
        self, filter: nn.Module | None = None, value: nn.Module | None = None, out: nn.Module | None = None
    ) -> None:
        super().__init__(value, out)
        self.filter = filter

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        edge_attr = validation.edge_features("EdgeFilter", edge_attr)
        validation.fits("EdgeFilter", "edge_attr", edge_attr, validation.takes(self.filter))
        value = src if self.value is None else self.value(src)
        weight = edge_attr if self.filter is None else rows.mapped(self.filter, edge_attr)
        if weight.shape[-2:] != (graph.num_edges, value.shape[-1]):
            raise ValueError(
                f"the filter must return weights [{graph.num_edges}, {value.shape[-1]}], one for each edge and "
                f"feature; got {list(weight.shape)}"
            )
        return Round(graph, value.unsqueeze(-1), bias=(weight.to(value.dtype),))


def _normalize(weight: Tensor, graph: Graph) -> Tensor:
    """Weights [E] divided by their sum at each destination; 0 if the sum is 0. Computed in float32 or wider."""
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    dst = graph.ends[1]
    sums = weight.new_zeros(graph.num_dst).index_add(0, dst, weight)
    return weight / torch.where(sums == 0, torch.ones_like(sums), sums).index_select(0, dst)


class EdgeMessage(Attention):
    """Messages that are any function of both ends and the edge, with equal weights.

        m_i = reduce_j f(h_i, h_j, e_ij)

    `f` = relu(h_j + e_ij) is GINE's, A(e_ij) h_j the edge network's (Gilmer et al. 2017, section 5), an MLP of all
    three PNA's. The messages differ from edge to edge, so all E are materialized: each edge becomes a source, and the
    round runs over `graphs.edges_into(graph)` with any backend.

    Args:
        function: `(dst, src, edge_attr) -> messages`, see `Message`.
    """

    normalize = "none"
    depends_on = "node"

    def __init__(self, function: Message) -> None:
        super().__init__()
        self.function = function

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        from_src, to_dst = graph.ends
        message = self.function(dst.index_select(-2, to_dst), src.index_select(-2, from_src), edge_attr)
        if message.dim() == src.dim():
            message = message.unsqueeze(-2)
        shape = (*src.shape[:-2], graph.num_edges)
        if message.shape[:-2] != shape:
            raise ValueError(
                f"the function of EdgeMessage must return messages {[*shape, 'F']}, or {[*shape, 'H', 'F']} for "
                f"several heads; got {list(message.shape)}"
            )
        return Round(graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges), message)
