"""Set algebra on the edges of two graphs over the same nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from mpnn.graph.derive import edge_data, selected, structured
from mpnn.graph.relations import Relation
from mpnn.graph.runs import Runs
from mpnn.graph.strips import Strips

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph


def union(one: Graph, other: Graph) -> Graph:
    """`one | other`, see `Graph`."""
    _refuse_loss("|", one, other)
    return structured(one, _merged(one, other, operator.or_), **_common("|", one, other))


def intersection(one: Graph, other: Graph) -> Graph:
    """`one & other`, see `Graph`."""
    if _has_data(other) or (other.is_explicit and not one.is_explicit):
        one, other = other, one
    _refuse_loss("&", other)
    runs, common = _merged(one, other, operator.and_), _common("&", one, other)
    if one.is_explicit:
        return _edges_in(one, runs, common)
    labels = None
    if isinstance(runs, Runs) and one.labels is not None and other.labels is not None:
        labels = np.unique(np.stack([one.labels, other.labels]), axis=1, return_inverse=True)[1].reshape(-1)
    return structured(one, runs, labels=labels, **common)


def difference(one: Graph, other: Graph) -> Graph:
    """`one - other`, see `Graph`."""
    runs, common = _merged(one, other, operator.sub), _common("-", one, other) | {"relation": one.relation}
    return _edges_in(one, runs, common) if one.is_explicit else structured(one, runs, **common)


def refuse_truth(edges: object) -> NoReturn:
    """Raises TypeError, because Python evaluates `a and b` to `b` if `a` is true."""
    raise TypeError(
        f"{edges} is a set of edges, which is neither true nor false: write a & b, a | b or ~a instead of `and`, `or` "
        "or `not`, and test for a missing graph with `is None`"
    )


def _merged(one: Graph, other: Graph, merge: Callable[[Any, Any], Any]) -> Strips | Runs:
    """Strips if both graphs have them, otherwise runs."""
    if one.device != other.device:
        raise ValueError(f"the graphs are on {one.device} and {other.device}; move one with .to(device)")
    structures = one.structure, other.structure
    if all(isinstance(edges, Strips) for edges in structures):
        merged: Strips = merge(*structures)
        return merged
    runs: Runs = merge(one.runs, other.runs)
    return runs


def _edges_in(graph: Graph, runs: Strips | Runs, common: dict[str, Any]) -> Graph:
    """The explicit edges that are also in `runs`, with their data."""
    assert isinstance(runs, Runs)  # an explicit graph has no strips
    src, dst = graph.stored_edges.cpu().long().numpy()
    return selected(graph, torch.from_numpy(runs.contains(dst, src)).to(graph.device), **common)


def _has_data(graph: Graph) -> bool:
    return any(data is not None for data in edge_data(graph).values())


def _refuse_loss(symbol: str, *graphs: Graph) -> None:
    """Raises ValueError if one of these operands has edge data: the result keeps its edges, but not their data."""
    for graph in filter(_has_data, graphs):
        raise ValueError(
            f"`{symbol}` would lose the edge data of {graph}; no operand of a | b and one of a & b can have edge "
            "attributes or types as data. Pass the edges alone, or join edges and data, with "
            "graphs.from_edges"
        )


def _common(symbol: str, one: Graph, other: Graph) -> dict[str, Any]:
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


def _relation(symbol: str, one: Graph, other: Graph) -> Relation | None:
    """None for two rules that differ: then whoever needs types asks for them, instead of getting those of one rule."""
    if symbol == "-" or one._edge_type is not None:
        return one.relation
    rules = [rule for rule in (one.relation, other.relation) if rule is not None]
    return rules[0] if rules and rules[0] == rules[-1] else None
