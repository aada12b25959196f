"""Operators in which every node hears itself exactly once, whatever loops a graph has: what convolutions do that add
self-loops."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mpnn import check, ops
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
        check.tensor("x", x)
        if source is not None:
            check.tensor("source", source)
        given = self._given(graph)
        bound = given, x.shape[-2], (x if source is None else source).shape[-2], x.device
        if edge_attr is None and isinstance(given, Graph):
            edge_attr = given.edge_attr
        if edge_attr is None:
            return super().request(x, ops.built(_looped, False, *bound), source, None, return_weights, cache)
        edge_attr = self._attributes(edge_attr, *bound)
        return super().request(x, ops.built(_looped, True, *bound), source, edge_attr, return_weights, cache)

    def _attributes(self, edge_attr: Tensor, *bound: Any) -> Tensor:
        """[E', ...] for the edges that are no loops, and then for the loops, of edge_attr [E, ...]."""
        if len(edge_attr) != (num_edges := ops.built(_num_edges, *bound)):
            raise ValueError(f"edge_attr must have one row for each of {num_edges} edges; got {len(edge_attr)}")
        taken, count = ops.built(_taken, self.keep, *bound), min(bound[1], bound[2])
        shape = count, *edge_attr.shape[1:]
        if isinstance(self.fill, str):
            others = edge_attr[taken[: len(taken) - count]]
            rows = others.flatten(1) if others.dim() > 1 else others[:, None]
            new = ops.aggregate(ops.built(_without_loops, *bound), rows, self.fill)[:count].reshape(shape)
        else:
            new = torch.as_tensor(self.fill, dtype=edge_attr.dtype, device=edge_attr.device).expand(shape)
        return torch.cat([edge_attr, new])[taken]


# What follows from a graph alone. A program that `torch.compile` traces takes it for constant, so it is compiled for a
# graph: which edges are loops cannot be traced. All take what `_bound` does.


def _bound(given: Topology | Graph, num_dst: int, num_src: int, device: torch.device) -> Graph:
    return given.bind(num_dst, num_src).to(device) if isinstance(given, Topology) else given


def _looped(ordered: bool, *bound: Any) -> Graph:
    """The graph with one loop for each node; `ordered`: after all other edges, as attributes stand."""
    graph = _bound(*bound)
    return graph.derived(_with_one_loop_each, ordered, num_dst=graph.num_dst)


def _without_loops(*bound: Any) -> Graph:
    """Nodes hear the edges that lead to them, loops aside."""
    graph = _bound(*bound)
    return graph.derived(_edges_but_loops, num_dst=graph.num_dst)


def _num_edges(*bound: Any) -> int:
    return _bound(*bound).num_edges


def _taken(keep: bool, *bound: Any) -> Tensor:
    """Which attributes each edge takes, int64 [E'], of those of all edges and, after them, of new loops."""
    graph = _bound(*bound)
    return graph.memo(("attributes with loops", keep), lambda: _taken_by(graph, keep))


def _taken_by(graph: Graph, keep: bool) -> Tensor:
    src, dst = graph.edge_index
    loops = (src == dst).nonzero().squeeze(1)
    last = src.new_full((min(graph.num_dst, graph.num_src),), -1)
    if keep:
        last = last.scatter_reduce(0, src[loops], loops, "amax")
    new = graph.num_edges + torch.arange(len(last), device=graph.device)
    return torch.cat([(src != dst).nonzero().squeeze(1), torch.where(last < 0, new, last)])


def _edges_but_loops(graph: Graph) -> Graph:
    return edges_into(Graph.from_edges(_but_loops(graph), graph.num_dst, graph.num_src))


def _with_one_loop_each(graph: Graph, ordered: bool) -> Graph:
    if not (ordered or graph.is_explicit) and graph.num_dst == graph.num_src:
        return graph.with_self_loops()
    nodes = torch.arange(min(graph.num_dst, graph.num_src), device=graph.device)
    joined = torch.cat([_but_loops(graph), nodes.expand(2, -1)], 1)
    return Graph.from_edges(joined, graph.num_dst, graph.num_src)


def _but_loops(graph: Graph) -> Tensor:
    src, dst = graph.edge_index
    return graph.edge_index[:, src != dst]
