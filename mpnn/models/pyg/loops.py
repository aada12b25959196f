"""Operators in which every node hears itself exactly once more, whatever loops a graph has: what convolutions do that
add self-loops."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mpnn import ops
from mpnn.decoding import Cache
from mpnn.graph import Graph
from mpnn.graphs import edges_into
from mpnn.message_passing import MessagePassing
from mpnn.scores import Request
from mpnn.topology import Topology

Fill = float | Tensor | Literal["sum", "mean", "max", "min"]
"""What a new loop has for attributes: a number, a row of them, or what the edges that the node hears have together."""


class WithLoops(MessagePassing):
    """`MessagePassing` over the graph it is given without its self-loops, but with one for each node, which comes last.

    Args:
        fill: attributes of loops, where edges have any. keep: a node that has a loop already keeps its attributes, of
            several the last one's.

    Weights that are returned are those of the edges without loops, in the caller's order, and then of the loops.
    """

    def __init__(self, *parts: Any, fill: Fill = 1.0, keep: bool = False) -> None:
        super().__init__(*parts)
        self.fill, self.keep = fill, keep

    def request(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Tensor | None = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: Cache | None = None,
    ) -> Request:
        bound = self._bound(graph, x, x if source is None else source)
        edge_attr = bound.edge_attr if edge_attr is None else edge_attr
        looped = bound.derived(_looped, edge_attr is not None, num_dst=bound.num_dst)
        if edge_attr is not None:
            edge_attr = self._attributes(bound, edge_attr)
        return super().request(x, looped, source, edge_attr, return_weights, cache)

    def _attributes(self, graph: Graph, edge_attr: Tensor) -> Tensor:
        """[E', ...] for the edges that are no loops, and then for the loops, of edge_attr [E, ...]."""
        if len(edge_attr) != graph.num_edges:
            raise ValueError(f"edge_attr must have one row for each of {graph.num_edges} edges; got {len(edge_attr)}")
        edges, loops = graph.memo("which edges are loops", lambda: _parted(graph))
        others, count = edge_attr[edges], min(graph.num_dst, graph.num_src)
        if isinstance(self.fill, str):
            into = graph.derived(_without, num_dst=graph.num_dst, num_src=len(others))
            new = ops.aggregate(into, others.flatten(1) if others.dim() > 1 else others[:, None], self.fill)
            new = new[:count].reshape(count, *edge_attr.shape[1:])
        else:
            fill = torch.as_tensor(self.fill, dtype=edge_attr.dtype, device=edge_attr.device)
            new = fill.expand(count, *edge_attr.shape[1:])
        if self.keep and len(loops):
            node = graph.edge_index[0, loops]
            last = node.new_zeros(count).scatter_reduce(0, node, loops + 1, "amax", include_self=True)
            had = (last > 0).view(-1, *[1] * (edge_attr.dim() - 1))
            new = torch.where(had, edge_attr[(last - 1).clamp(min=0)], new)
        return torch.cat([others, new])


def _parted(graph: Graph) -> tuple[Tensor, Tensor]:
    """Which edges lead from one node to another, and which are loops, int64 each."""
    src, dst = graph.edge_index
    return (src != dst).nonzero().squeeze(1), (src == dst).nonzero().squeeze(1)


def _without(graph: Graph) -> Graph:
    """Nodes hear the edges that lead to them, loops aside."""
    edges, _ = graph.memo("which edges are loops", lambda: _parted(graph))
    return edges_into(Graph.from_edges(graph.edge_index[:, edges], graph.num_dst, graph.num_src))


def _looped(graph: Graph, ordered: bool) -> Graph:
    """The graph with one loop for each node; `ordered`: after all other edges, as attributes stand."""
    if not (ordered or graph.is_explicit) and graph.num_dst == graph.num_src:
        return graph.with_self_loops()
    edges, _ = graph.memo("which edges are loops", lambda: _parted(graph))
    nodes = torch.arange(min(graph.num_dst, graph.num_src), device=graph.device)
    joined = torch.cat([graph.edge_index[:, edges], nodes.expand(2, -1)], 1)
    return Graph.from_edges(joined, graph.num_dst, graph.num_src)
