"""Numbers and vectors of edges: a tensor with a row for each edge, or a table that is looked up by edge type."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.bound import Values
from mpnn.graph.modes import outside_modes
from mpnn.graph.relations import Relation

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """Vectors looked up by edge type, [edge types, H, D]: the `edge_key` or `edge_value` of each edge.

    `relation` is the rule that gives the edge types; None stands for `graph.edge_type`. A table may have more rows than
    the rule has edge types. The constructor cuts off the rows that no edge reads, so that backends get one row for each
    edge type; the gradients of the other rows are zero.
    """

    table: Tensor
    relation: Relation | None = None

    def __post_init__(self) -> None:
        if self.relation is None or not isinstance(self.table, Tensor) or not self.table.dim():
            return  # validation names the error
        if self.table.shape[0] > self.relation.count:
            object.__setattr__(self, "table", self.table[: self.relation.count])

    def ids(self, graph: Graph) -> Tensor:
        """The type of each edge in the order of `graph.csr`, int64 [E]."""
        csr = graph.csr
        if self.relation is not None:
            if graph.positions is not None:
                return csr.from_caller(self.relation.ids(*graph.edge_positions()))
            return self.relation.ids(csr.row + graph.shift, csr.col)
        if graph.types is None:
            raise ValueError(
                f"a table by edge type needs a graph with edge types, and {graph} has none; "
                "pass edge_type to from_edges, or use topology.with_relation(...)"
            )
        return csr.from_caller(graph.types)

    def cached(self, graph: Graph, key: Hashable, build: Callable[[], T]) -> T:
        """`graph.cached` for values that also depend on the relation. Values of a relation that is equal only to itself
        are freed together with the relation, and kept as long as its stamp stays the same."""
        if self.relation is None or self.relation.is_value:
            return graph.cached((key, self.relation), build)
        stamp = self.relation.stamp()
        if stamp is None:
            return outside_modes(build)
        rules: WeakKeyDictionary[Relation, Values] = graph.cached("rules", lambda: WeakKeyDictionary())
        values = rules.setdefault(self.relation, Values())
        stamped = (key, stamp)
        return values[stamped] if stamped in values else values.keep(stamped, build)


@dataclass(frozen=True, eq=False)
class BiasTable(EmbeddingTable):
    """Numbers looked up by edge type, [edge types, H] or [edge types, 1]: one of a round's biases, as in T5's or
    Swin's relative position bias. Backends treat it as an `EmbeddingTable` without the last dimension."""


TABLES: tuple[type, ...] = (EmbeddingTable, BiasTable)
"""The tables that kernels look up. Types count exactly: a subclass may override `ids`."""


def per_edge(data: "PerEdge", graph: Graph, dtype: torch.dtype) -> Tensor:
    """The numbers or vectors of each edge in the caller's order. Tables are cast first, because the gradients of a row
    are summed in the dtype of the table."""
    if isinstance(data, Tensor):
        return data.to(dtype)
    return graph.csr.to_caller(data.table.to(dtype).index_select(0, data.ids(graph)))


def numbers(data: "PerEdge") -> Tensor:
    """The tensor of learned numbers: the rows of a table, or the tensor itself."""
    return data.table if isinstance(data, EmbeddingTable) else data


def total(terms: list[Tensor]) -> Tensor | None:
    """The sum of tensors that broadcast with one another; None if there are none."""
    return sum(terms[1:], terms[0]) if terms else None


PerEdge = Tensor | EmbeddingTable
"""Numbers or vectors for each edge: a tensor in the caller's edge order, or a table by edge type."""
