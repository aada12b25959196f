"""Edge lists and tensors of edges in the form that GPU kernels read."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.csr import CSR, sorted_by
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, total
from mpnn.kernels.cuda.schedule import Sorted
from mpnn.round import Round


def rows(graph: Graph) -> Sorted:
    """The edges by destination."""
    return graph.cached("device rows", lambda: _sorted(graph.csr, graph.num_src))


def columns(graph: Graph) -> Callable[[], Sorted]:
    """A function that returns the edges sorted by source."""
    return lambda: graph.cached("device columns", lambda: _sorted(graph.csc, graph.num_dst))


def _sorted(edges: CSR, num_cols: int) -> Sorted:
    return Sorted(edges.ptr, edges.col, edges.edge_id, num_cols)


def per_edge(x: Tensor, heads: int, round: Round, trailing: int = 1) -> Tensor:
    """[B, E, H] (or, with 2 trailing dimensions, [B, E, H, D]) of x, broadcast over the batch and heads. A view
    if possible."""
    shape = (*x.shape[-1 - trailing : -trailing], heads, *x.shape[x.dim() - trailing + 1 :])
    if x.dim() == trailing + 1:
        return x.expand(round.batch.numel(), *shape)
    return x.expand(*round.batch, *shape).reshape(round.batch.numel(), *shape)


def biases(round: Round) -> Tensor | None:
    """The sum of all biases in the caller's edge order."""
    return total([numbers(b, round) for b in round.bias])


def numbers(data: PerEdge, round: Round) -> Tensor:
    """The numbers of each edge, [..., E, H] in the caller's order. Tables are expanded."""
    if isinstance(data, Tensor):
        return data.to(round.accumulate_dtype)
    from mpnn.kernels.rows.cuda.reduce import Gather

    graph = round.graph
    table = data.table.to(round.accumulate_dtype)
    out: Tensor = Gather.apply(table, ids(data, graph), by_type(data, graph))
    return out


def ids(table: EmbeddingTable, graph: Graph) -> Tensor:
    """The type of each edge, [E], in the caller's order."""
    return table.cached(graph, "device edge types", lambda: graph.csr.to_caller(table.ids(graph)))


def by_type(table: EmbeddingTable, graph: Graph) -> Callable[[], Sorted]:
    """A function that returns the edges, numbered in the caller's order, sorted by edge type."""
    count = len(table.table)

    def build() -> Sorted:
        types = ids(table, graph)
        sources = torch.arange(len(types), device=types.device)
        edges = sorted_by(types, sources, count, len(types))
        return Sorted(edges.ptr, edges.col, None, len(types))

    return lambda: table.cached(graph, ("device edges by type", count), build)
