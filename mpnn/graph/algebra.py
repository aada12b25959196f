"""The algebra of sets of edges, for two graphs over the same nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from mpnn.graph.made import edge_data, selected, structured
from mpnn.runs import Runs

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
        return _found_in(one, runs, other)
    labels = None
    if one.labels is not None and other.labels is not None:
        labels = np.unique(np.stack([one.labels, other.labels]), axis=1, return_inverse=True)[1].reshape(-1)
    return structured(one, runs, other, labels=labels)


def difference(one: Graph, other: Graph) -> Graph:
    """`one - other`, see `Graph`."""
    runs = _merged(one, other, Runs.__sub__)
    return _found_in(one, runs, other) if one.is_explicit else structured(one, runs, other)


def refuse_truth(edges: object) -> NoReturn:
    """Raises TypeError: Python's `a and b` asks whether `a` is true, and then is `b` alone."""
    raise TypeError(
        f"{edges} is a set of edges, which is neither true nor false: write a & b, a | b or ~a instead of `and`, `or` "
        "or `not`, and `is None` to ask whether there is one"
    )


def _merged(one: Graph, other: Graph, merge: Callable[[Runs, Runs], Runs]) -> Runs:
    if one.device != other.device:
        raise ValueError(f"the graphs are on {one.device} and {other.device}; move one with .to(device)")
    return merge(one.runs, other.runs)


def _found_in(graph: Graph, runs: Runs, other: Graph) -> Graph:
    """Those of the explicit edges that are in the runs too."""
    src, dst = graph.edge_index.cpu().numpy()
    return selected(graph, torch.from_numpy(runs.holds(dst, src)).to(graph.device), other)
