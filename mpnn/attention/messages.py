"""No choice among sources: weights that edges bring, and messages made edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from mpnn import check
from mpnn.attention.spec import ANY, Attention, Terms
from mpnn.graph import Graph
from mpnn.graphs.incidence import edges_into

Message = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(features of the destinations [..., E, d], of the sources [..., E, d_src], edge_attr [E, ...]) -> [..., E, F], or
[..., E, H, F] for H heads."""


class Mapped(Attention):
    """Maps around an aggregation in which every source counts alike.

        m_i = out( reduce_j value(h_j) )

    Args:
        value: what is done to each source's features, None for nothing. out: what to the message.
    """

    normalize = "none"

    def __init__(self, value: nn.Module | None = None, out: nn.Module | None = None) -> None:
        super().__init__()
        self.value, self.out = value, out

    def takes(self) -> tuple[check.Takes, check.Takes]:
        return ANY, check.takes(self.value)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        return Terms((src if self.value is None else self.value(src)).unsqueeze(-2))

    def merge(self, out: Tensor) -> Tensor:
        message = out.flatten(-2)
        return message if self.out is None else self.out(message)


class EdgeWeight(Mapped):
    """`Mapped` with the weights that edges bring as attributes, a number each (1 where they bring none).

        m_i = out( reduce_j a_ij value(h_j) )

    `normalized` divides weights, which must not be negative then, by their sum over the sources of each destination:
    PinSage's importance pooling (Ying et al. 2018, section 3.2).
    """

    def __init__(
        self, value: nn.Module | None = None, out: nn.Module | None = None, *, normalized: bool = False
    ) -> None:
        super().__init__(value, out)
        self.balanced = normalized

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        terms = super().forward(dst, src, graph)
        if edge_attr is None and not self.balanced:
            return terms
        weight = src.new_ones(graph.num_edges) if edge_attr is None else edge_attr
        if weight.shape not in ((graph.num_edges,), (graph.num_edges, 1)):
            raise ValueError(
                f"edge_attr must hold one weight for each of {graph.num_edges} edges; got {list(weight.shape)}"
            )
        weight = weight.reshape(-1)
        shares = _shares(weight, graph) if self.balanced else weight
        return replace(terms, bias=(shares.to(src.dtype)[:, None],))


def _shares(weight: Tensor, graph: Graph) -> Tensor:
    """Weights [E] over their sums at each destination, 0 where these are; in float32 at least, as sums are long."""
    weight, dst = weight.to(torch.promote_types(weight.dtype, torch.float32)), graph.edge_index[1]
    sums = weight.new_zeros(graph.num_dst).index_add(0, dst, weight)
    return weight / torch.where(sums == 0, torch.ones_like(sums), sums)[dst]


class EdgeMessage(Attention):
    """Messages that are any function of both ends and the edge, and count alike.

        m_i = reduce_j f(h_i, h_j, e_ij)

    `f` = relu(h_j + e_ij) is GINE's, A(e_ij) h_j the edge network's (Gilmer et al. 2017, section 5), an MLP of all
    three PNA's. Such messages differ from edge to edge, so they are written out, E of them: each edge becomes a source,
    and the round runs over `graphs.edges_into(graph)` with any backend.

    Args:
        function: `(dst, src, edge_attr) -> messages`, see `Message`.
    """

    normalize = "none"

    def __init__(self, function: Message) -> None:
        super().__init__()
        self.function = function

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        from_src, to_dst = graph.edge_index
        message = self.function(dst.index_select(-2, to_dst), src.index_select(-2, from_src), edge_attr)
        if message.dim() == src.dim():
            message = message.unsqueeze(-2)
        wanted = (*src.shape[:-2], graph.num_edges)
        if message.shape[:-2] != wanted:
            raise ValueError(
                f"the function of EdgeMessage must give messages {[*wanted, 'F']}, or {[*wanted, 'H', 'F']} for "
                f"several heads; got {list(message.shape)}"
            )
        return Terms(message, graph=graph.derived(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges))
