"""Set algebra on the edges of two graphs over the same nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from mpnn.graph.derive import edge_data, selected, structured
from mpnn.graph.runs import Runs
from mpnn.graph.strips import Strips

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph


def union(one: Graph, other: Graph) -> Graph:
    """`one | other`, see `Graph`."""
    for graph in (one, other):
        if any(data is not None for data in edge_data(graph).values()):
            raise ValueError(f"a union would lose the edge data of {graph}; join edges with graphs.from_edges")
    return structured(one, _merged(one, other, operator.or_), other)


def intersection(one: Graph, other: Graph) -> Graph:
    """`one & other`, see `Graph`."""
    if other.is_explicit and not one.is_explicit:
        one, other = other, one
    runs = _merged(one, other, operator.and_)
    if one.is_explicit:
        return _edges_in(one, runs, other)
    labels = None
    if isinstance(runs, Runs) and one.labels is not None and other.labels is not None:
        labels = np.unique(np.stack([one.labels, other.labels]), axis=1, return_inverse=True)[1].reshape(-1)
    return structured(one, runs, other, labels=labels)


def difference(one: Graph, other: Graph) -> Graph:
    """`one - other`, see `Graph`."""
    runs = _merged(one, other, operator.sub)
    return _edges_in(one, runs, other) if one.is_explicit else structured(one, runs, other)


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


def _edges_in(graph: Graph, runs: Strips | Runs, other: Graph) -> Graph:
    """The explicit edges that are also in `runs`, with their data."""
    assert isinstance(runs, Runs)  # an explicit graph has no strips
    src, dst = graph.stored_edges.cpu().long().numpy()
    return selected(graph, torch.from_numpy(runs.contains(dst, src)).to(graph.device), other)
