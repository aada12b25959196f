"""Operators over a graph with exactly one self-loop per node, as in convolutions that add self-loops."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mpnn import engine, ops
from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.graphs import edges_into
from mpnn.message_passing import MessagePassing, Source
from mpnn.request import validation
from mpnn.request.request import Request

Fill = float | Tensor | Literal["sum", "mean", "max", "min"]
"""Attributes of new loops: a number, a row of numbers, or an aggregate over the attributes of incoming edges."""


class WithLoops(MessagePassing):
    """`MessagePassing` that replaces the graph's self-loops by one loop per node, after all other edges.

    Args:
        fill: attributes of the new loops, if edges have attributes.
        keep: whether a node that already has loops keeps the attributes of the last one.

    Returned weights are those of the edges that are not loops, in the caller's order, then those of the loops.
    """

    def __init__(self, *parts: Any, fill: Fill = 1.0, keep: bool = False) -> None:
        super().__init__(*parts)
        self.fill, self.keep = fill, keep

    def rounds(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Source = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: KVCache | None = None,
    ) -> tuple[Request, ...]:
        validation.tensor("x", x)
        if source is not None:
            validation.tensor("source", source)
            assert isinstance(source, Tensor)
        graph = self._graph_or_default(graph)
        bound = graph, x.shape[-2], (x if source is None else source).shape[-2], x.device
        if edge_attr is None and isinstance(graph, Graph):
            edge_attr = graph.edge_attr
        if edge_attr is None:
            return super().rounds(x, engine.build_once(_looped, False, *bound), source, None, return_weights, cache)
        edge_attr = self._attributes(edge_attr, *bound)
        return super().rounds(x, engine.build_once(_looped, True, *bound), source, edge_attr, return_weights, cache)

    def _attributes(self, edge_attr: Tensor, *bound: Any) -> Tensor:
        """edge_attr [E, ...] -> [E', ...]: attributes of the edges that are not loops, then of the loops."""
        if len(edge_attr) != (num_edges := engine.build_once(_num_edges, *bound)):
            raise ValueError(f"edge_attr must have one row for each of {num_edges} edges; got {len(edge_attr)}")
        index, count = engine.build_once(_attribute_index, self.keep, *bound), min(bound[1], bound[2])
        shape = count, *edge_attr.shape[1:]
        if isinstance(self.fill, str):
            others = edge_attr[index[: len(index) - count]]
            rows = others.flatten(1) if others.dim() > 1 else others[:, None]
            new = ops.aggregate(engine.build_once(_without_loops, *bound), rows, self.fill)[:count].reshape(shape)
        else:
            new = torch.as_tensor(self.fill, dtype=edge_attr.dtype, device=edge_attr.device).expand(shape)
        return torch.cat([edge_attr, new])[index]


# The functions below depend on the graph only. `torch.compile` treats their results as constants and recompiles for
# another graph, because which edges are loops cannot be traced. All take the arguments of `_bound`.


def _bound(graph: Topology | Graph, num_dst: int, num_src: int, device: torch.device) -> Graph:
    return graph.bind(num_dst, num_src).to(device) if isinstance(graph, Topology) else graph


def _looped(ordered: bool, *bound: Any) -> Graph:
    """The graph with one loop per node. With `ordered`, loops come after all other edges, as their attributes do."""
    graph = _bound(*bound)
    return graph.derive(_with_one_loop_each, ordered, num_dst=graph.num_dst)


def _without_loops(*bound: Any) -> Graph:
    """The graph in which each node receives from its incoming edges, except loops."""
    graph = _bound(*bound)
    return graph.derive(_edges_without_loops, num_dst=graph.num_dst)


def _num_edges(*bound: Any) -> int:
    return _bound(*bound).num_edges


def _attribute_index(keep: bool, *bound: Any) -> Tensor:
    """Row of each edge's attributes, int64 [E'], in the attributes of all edges followed by those of new loops."""
    graph = _bound(*bound)
    return graph.cached(("attributes with loops", keep), lambda: _build_attribute_index(graph, keep))


def _build_attribute_index(graph: Graph, keep: bool) -> Tensor:
    src, dst = graph.edge_index
    loops = (src == dst).nonzero().squeeze(1)
    last = src.new_full((min(graph.num_dst, graph.num_src),), -1)
    if keep:
        last = last.scatter_reduce(0, src[loops], loops, "amax")
    new = graph.num_edges + torch.arange(len(last), device=graph.device)
    return torch.cat([(src != dst).nonzero().squeeze(1), torch.where(last < 0, new, last)])


def _edges_without_loops(graph: Graph) -> Graph:
    return edges_into(Graph.from_edges(_non_loops(graph), graph.num_dst, graph.num_src))


def _with_one_loop_each(graph: Graph, ordered: bool) -> Graph:
    if not (ordered or graph.is_explicit) and graph.num_dst == graph.num_src:
        return graph.with_self_loops()
    nodes = torch.arange(min(graph.num_dst, graph.num_src), device=graph.device)
    edges = torch.cat([_non_loops(graph), nodes.expand(2, -1)], 1)
    return Graph.from_edges(edges, graph.num_dst, graph.num_src)


def _non_loops(graph: Graph) -> Tensor:
    src, dst = graph.edge_index
    return graph.edge_index[:, src != dst]
