"""Whether a graph is a chain of causal documents, over which gates form a product from node to node."""

from __future__ import annotations

from mpnn.graph.graph import Graph
from mpnn.graph.strips import Strips


def documents(graph: Graph) -> list[int] | None:
    """The lengths of the documents of `causal() & documents(lengths)`, without empty ones; one for `causal()`. None if
    the graph is another."""
    return graph.cached("causal documents", lambda: _documents(graph))


def _documents(graph: Graph) -> list[int] | None:
    edges = graph.structure
    lengths = (edges if isinstance(edges, Strips) else Strips.of_runs(edges)).documents
    if lengths is None or int((lengths * (lengths + 1) // 2).sum()) != graph.num_edges:  # edges that are repeated
        return None
    return [int(n) for n in lengths]
