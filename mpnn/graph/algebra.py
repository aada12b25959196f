"""Set algebra on the edges of two graphs over the same nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from mpnn.graph.derive import edge_data, selected, structured
from mpnn.graph.runs import Runs

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph


def union(one: Graph, other: Graph) -> Graph:
    """`one | other`, see `Graph`."""
    for graph in (one, other):
        if any(data is not None for data in edge_data(graph).values()):
            raise ValueError(f"a union would lose the edge data of {graph}; join edges with graphs.from_edges")
    return structured(one, _merged(one, other, Runs.__or__), other)


def intersection(one: Graph, other: Graph) -> Graph:
    """`one & other`, see `Graph`."""
    if other.is_explicit and not one.is_explicit:
        one, other = other, one
    runs = _merged(one, other, Runs.__and__)
    if one.is_explicit:
        return _edges_in(one, runs, other)
    labels = None
    if one.labels is not None and other.labels is not None:
        labels = np.unique(np.stack([one.labels, other.labels]), axis=1, return_inverse=True)[1].reshape(-1)
    return structured(one, runs, other, labels=labels)


def difference(one: Graph, other: Graph) -> Graph:
    """`one - other`, see `Graph`."""
    runs = _merged(one, other, Runs.__sub__)
    return _edges_in(one, runs, other) if one.is_explicit else structured(one, runs, other)


def refuse_truth(edges: object) -> NoReturn:
    """Raises TypeError, because Python evaluates `a and b` to `b` if `a` is true."""
    raise TypeError(
        f"{edges} is a set of edges, which is neither true nor false: write a & b, a | b or ~a instead of `and`, `or` "
        "or `not`, and test for a missing graph with `is None`"
    )


def _merged(one: Graph, other: Graph, merge: Callable[[Runs, Runs], Runs]) -> Runs:
    if one.device != other.device:
        raise ValueError(f"the graphs are on {one.device} and {other.device}; move one with .to(device)")
    return merge(one.runs, other.runs)


def _edges_in(graph: Graph, runs: Runs, other: Graph) -> Graph:
    """The explicit edges that are also in `runs`, with their data."""
    src, dst = graph.edge_index.cpu().numpy()
    return selected(graph, torch.from_numpy(runs.contains(dst, src)).to(graph.device), other)
