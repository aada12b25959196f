"""mpnn.backends.edge_orders: each order has the edges of the graph, under their numbers."""

import pytest
import torch

from mpnn import Graph, graphs
from mpnn.backends import edge_orders
from mpnn.graph.edge_tables import EmbeddingTable
from mpnn.kernels.rows.rows import Rows

PAIRS = torch.tensor([[0, 3, 3, 1, 0, 3, 4], [2, 0, 2, 2, 1, 2, 4]])  # node 3 without edges, one edge twice
BY_DESTINATION = PAIRS[:, PAIRS[1].argsort(stable=True)]
TYPES = torch.tensor([2, 0, 2, 2, 0, 3, 0])  # none of type 1
GRAPHS = {
    "in the order of destinations": graphs.from_edges(BY_DESTINATION, 5, edge_type=TYPES),
    "in another order": graphs.from_edges(PAIRS, 5, edge_type=TYPES),
    "reordered, in the order of destinations": graphs.from_edges(BY_DESTINATION, 5, edge_type=TYPES).reordered(
        "degree"
    ),
    "reordered": graphs.from_edges(PAIRS, 5, edge_type=TYPES).reordered("rcm"),
}


def edges_of(rows: Rows) -> list[tuple[int, int, int]]:
    """Number, row and column of each edge, by number."""
    row, col, edge = rows.ends
    return sorted(zip(edge.tolist(), row.tolist(), col.tolist(), strict=True))


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=list(GRAPHS))
def test_orders_have_the_edges_of_the_graph(graph: Graph) -> None:
    src, dst = graph.ends.tolist()
    numbers = range(graph.num_edges)
    by_destination = list(zip(numbers, dst, src, strict=True))
    by_source = list(zip(numbers, src, dst, strict=True))
    for transposed, expected in ((False, by_destination), (True, by_source)):
        rows = edge_orders.in_order(graph, transposed)
        assert edges_of(rows) == expected
        assert rows.ptr[0] == 0
        assert rows.ptr[-1] == len(rows.col) == graph.num_edges
        if graph.order is not None:
            assert rows.node is not None
            assert rows.node.equal(graph.order)
    assert edges_of(edge_orders.by_destination(graph)) == by_destination
    columns = edge_orders.by_source_with_slots(graph)
    assert edges_of(columns) == by_source
    edge = edge_orders.by_destination(graph).ends[2]
    slot = torch.arange(graph.num_edges) if columns.slot is None else columns.slot
    assert edge[slot].equal(columns.ends[2])


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=list(GRAPHS))
def test_edges_by_type(graph: Graph) -> None:
    found = edge_orders.edge_types(graph, EmbeddingTable(torch.zeros(5, 1)))  # no edge is of the last type
    assert found.ids.equal(TYPES)
    rows = found.by_type()
    dst = graph.ends[1]
    assert edges_of(rows) == list(zip(range(7), TYPES.tolist(), dst.tolist(), strict=True))
    assert rows.num_rows == 5
    edge = edge_orders.by_destination(graph).ends[2]
    assert rows.slot is not None
    assert edge[rows.slot].equal(rows.ends[2])
