"""The edges of a graph in the orders that kernels read, cached on the graph. Those of CPU kernels are `Rows`, those of
GPU kernels `Sorted`."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.csr import CSR, inverse, sorted_by
from mpnn.graph.edge_tables import EmbeddingTable
from mpnn.kernels.cuda.schedule import Sorted
from mpnn.kernels.rows.attention import EdgeTypes
from mpnn.kernels.rows.rows import Rows

ROWS = "csr rows"
"""The key of the edges by destination among what a graph has cached."""


def by_destination(graph: Graph) -> Rows:
    return graph.cached(ROWS, lambda: _rows(graph.csr))


def by_source(graph: Graph) -> Rows:
    """The edges by source, without the slots that attention needs."""
    return graph.cached("csr columns", lambda: _rows(graph.csc))


def by_source_with_slots(graph: Graph) -> Rows:
    """The edges by source, each with its position by destination."""
    return graph.cached("csr columns with slots", lambda: _with_slots(graph))


def in_order(graph: Graph, transposed: bool) -> Rows:
    """The edges by destination, or by source if `transposed`, with rows in the order of `graph.order`, which places
    neighbors close together."""
    order = graph.order
    if order is None:
        return by_source(graph) if transposed else by_destination(graph)
    return graph.cached(
        ("csr rows in order", transposed), lambda: _ordered(graph.csc if transposed else graph.csr, order)
    )


def edge_types(graph: Graph, table: EmbeddingTable) -> EdgeTypes:
    """The edge type of each edge, and the edges by type."""
    ids = table.cached(graph, "csr edge types", lambda: _types(graph, table))
    return EdgeTypes(
        ids, lambda: table.cached(graph, ("csr edges by type", len(table.table)), lambda: _by_type(graph, table))
    )


def _rows(edges: CSR) -> Rows:
    return Rows(edges.ptr, edges.columns.int(), edges.edge_id)


def _with_slots(graph: Graph) -> Rows:
    rows = by_source(graph)
    edge_id = graph.csr.edge_id
    # not `csr.position`, which would be kept
    slot = graph.csc.edge_id if edge_id is None else graph.csc.from_caller(inverse(edge_id))
    return Rows(rows.ptr, rows.col, rows.edge, slot)


def _ordered(edges: CSR, order: Tensor) -> Rows:
    degree = edges.ptr.diff()[order]
    ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    index = torch.repeat_interleave(edges.ptr[order] - ptr[:-1], degree) + torch.arange(len(edges.columns))
    edge = index if edges.edge_id is None else edges.edge_id[index]
    return Rows(ptr, edges.columns[index].int(), edge, node=order)


def _types(graph: Graph, table: EmbeddingTable) -> Tensor:
    """The type of each edge in the caller's order, contiguous. Kernels do not check what a rule returns."""
    ids = graph.csr.to_caller(table.ids(graph)).long().contiguous()
    rule = table.relation
    if rule is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rule.count:
        raise IndexError(
            f"{rule} gives edge types from {int(ids.min())} to {int(ids.max())}, and its count is {rule.count}: its "
            f"ids must lie in [0, {rule.count})"
        )
    return ids


def _by_type(graph: Graph, table: EmbeddingTable) -> Rows:
    csr = graph.csr
    types = table.ids(graph).long()
    slot = types.argsort(stable=True)
    ptr = torch.cat([slot.new_zeros(1), torch.bincount(types, minlength=len(table.table)).cumsum(0)])
    return Rows(ptr, csr.row[slot].int(), slot if csr.edge_id is None else csr.edge_id[slot], slot)


# ------------------------------------------------------------------------------------------------ on a GPU


def rows_on_gpu(graph: Graph) -> Sorted:
    """The edges by destination."""
    return graph.cached("device rows", lambda: _sorted(graph.csr, graph.num_src))


def columns_on_gpu(graph: Graph) -> Callable[[], Sorted]:
    """A function that returns the edges sorted by source."""
    return lambda: graph.cached("device columns", lambda: _sorted(graph.csc, graph.num_dst))


def _sorted(edges: CSR, num_cols: int) -> Sorted:
    return Sorted(edges.ptr, edges.col, edges.edge_id, num_cols)


def types_on_gpu(table: EmbeddingTable, graph: Graph) -> Tensor:
    """The type of each edge, [E], in the caller's order."""
    return table.cached(graph, "device edge types", lambda: graph.csr.to_caller(table.ids(graph)))


def by_type_on_gpu(table: EmbeddingTable, graph: Graph) -> Callable[[], Sorted]:
    """A function that returns the edges, numbered in the caller's order, sorted by edge type."""
    count = len(table.table)

    def build() -> Sorted:
        types = types_on_gpu(table, graph)
        sources = torch.arange(len(types), device=types.device)
        edges = sorted_by(types, sources, count, len(types))
        return Sorted(edges.ptr, edges.col, None, len(types))

    return lambda: table.cached(graph, ("device edges by type", count), build)
