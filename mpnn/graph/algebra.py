"""Set algebra on the edges of two graphs over the same nodes."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpnn.graph.bound import BoundGraph
from mpnn.graph.data import G, GraphData, selected, structured
from mpnn.graph.relations import Relation
from mpnn.graph.runs import Runs


class Algebra(GraphData):
    """The operators `|`, `&`, `-` and `~` of a graph."""

    def __or__(self: G, other: G) -> G:
        """The union of both edge sets, as rows of runs. Neither graph may have edge attributes or types as data.

        One rule holds for `|`, `&` and `-`: an edge of the result has all that it has in the operands, or they are
        refused. Only explicit edges have data, so one operand of `&` may have them, and both of `-`, whose edges are
        those of the left one. A relation, a shift or positions that one operand has are those of the result. Of two
        relations that differ it has none: `with_relation` sets one for all edges.

        Raises:
            ValueError: if edges would lose their data, if the operands differ in a shift or positions that both have,
                if they are on two devices, or if their sizes differ.
        """
        if not isinstance(other, GraphData):
            return NotImplemented
        refuse_loss("|", self, other)
        return structured(self, _merged(self, other, operator.or_), **common("|", self, other))

    def __and__(self: G, other: G) -> G:
        """The edges in both graphs. Keeps order, repeated edges and data of the graph with edge data, or of the
        explicit one, or of this one. Raises as `|`."""
        if not isinstance(other, GraphData):
            return NotImplemented
        one = self
        two = other
        if _has_data(two) or (two.is_explicit and not one.is_explicit):
            one, two = two, one
        refuse_loss("&", two)
        runs = _merged(one, two, operator.and_)
        alike = common("&", one, two)
        if one.is_explicit:
            return _edges_in(one, runs, alike)
        labels = None
        # Parts of consecutive nodes are seen in the runs.
        if (one.is_scattered or two.is_scattered) and one.labels is not None and two.labels is not None:
            labels = np.unique(np.stack([one.labels, two.labels]), axis=1, return_inverse=True)[1].reshape(-1)
        return structured(one, runs, labels=labels, **alike)

    def __sub__(self: G, other: G) -> G:
        """The edges in this graph only. An explicit graph keeps its order, repeated edges and data. Raises as `|`."""
        if not isinstance(other, GraphData):
            return NotImplemented
        runs = _merged(self, other, operator.sub)
        alike = common("-", self, other) | {"relation": self.relation}
        return _edges_in(self, runs, alike) if self.is_explicit else structured(self, runs, **alike)

    def __invert__(self: G) -> G:
        """The complement: all pairs that are not edges."""
        return structured(self, self.runs.complement())


def _merged(one: GraphData, other: GraphData, merge: Callable[[Runs, Runs], Runs]) -> Runs:
    if one.device != other.device:
        raise ValueError(f"the graphs are on {one.device} and {other.device}; move one with .to(device)")
    return merge(one.runs, other.runs)


def _edges_in(graph: G, runs: Runs, alike: dict[str, Any]) -> G:
    """The explicit edges that are also in `runs`, with their data."""
    src, dst = graph.stored_edges.cpu().long().numpy()
    return selected(graph, torch.from_numpy(runs.contains(dst, src)).to(graph.device), **alike)


def _has_data(graph: GraphData) -> bool:
    return any(data is not None for data in graph.edge_data.values())


def refuse_loss(symbol: str, *graphs: GraphData) -> None:
    """Raises ValueError if one of these operands has edge data: the result keeps its edges, but not their data."""
    for graph in filter(_has_data, graphs):
        raise ValueError(
            f"`{symbol}` would lose the edge data of {graph}; no operand of a | b and one of a & b can have edge "
            "attributes or types as data. Pass the edges alone, or join edges and data, with "
            "graphs.from_edges"
        )


def common(symbol: str, one: BoundGraph, other: BoundGraph) -> dict[str, Any]:
    """The relation, shift and positions of the result: what one operand has and the other has not, or both alike."""
    at = one.positions, other.positions
    alike = {
        "shift": 0 in (one.shift, other.shift) or one.shift == other.shift,
        "positions": at[0] is None or at[1] is None or all(map(torch.equal, at[0], at[1])),
    }
    for name, agrees in alike.items():
        if not agrees:
            raise ValueError(f"the operands of `{symbol}` differ in their {name}: {one} and {other}; use one for both")
    return {"relation": _relation(symbol, one, other), **{x: getattr(one, x) or getattr(other, x) for x in alike}}


def _relation(symbol: str, one: BoundGraph, other: BoundGraph) -> Relation | None:
    """None for two rules that differ: then code that needs types asks for them, instead of getting those of one
    rule."""
    if symbol == "-" or (isinstance(one, GraphData) and one._edge_type is not None):
        return one.relation
    rules = [rule for rule in (one.relation, other.relation) if rule is not None]
    return rules[0] if rules and rules[0] == rules[-1] else None
