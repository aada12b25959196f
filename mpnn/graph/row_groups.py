"""Neighboring rows that share their sources, as a kernel for packed sequences takes them.

rows      0 1 2 3 4 5 6 7        packed texts: each row has the sources of its text        complete groups
sources   a a a b b b b b
rows      0 1 2 3 4 5 6 7        left padding, causal: each row has one source more        a causal group,
sources   - - a ab abc ...                                                                  and rows without sources
"""

from typing import NamedTuple

import numpy as np

from mpnn.graph.bound import cached_on_graph
from mpnn.graph.graph import Graph
from mpnn.graph.runs import Ints, Runs, expand

_COPIES = 2  # of the sources at most: groups of overlapping sources copy them


class RowGroups(NamedTuple):
    """Groups of one kind, one after the other.

    dst, src: the rows and the sources of the groups, in order; None if these are all nodes. num_dst, num_src: how many
    each group has. is_causal: the last row of a group has all of its sources, and each row before it one less.
    """

    dst: Ints | None
    src: Ints | None
    num_dst: Ints
    num_src: Ints
    is_causal: bool


@cached_on_graph
def row_groups(graph: Graph) -> list[RowGroups] | None:
    """The rows with sources as complete and as causal groups; None if some row has several runs, or the groups would
    copy their sources many times, as those of a window."""
    if graph.is_scattered and (parts := graph.parts) is not None:
        return [RowGroups(parts.order, parts.order, parts.lengths, parts.lengths, is_causal=False)]
    runs = graph.runs
    if graph.is_explicit or runs.most_runs > 1 or not graph.num_edges:
        return None
    row = runs.row
    start = runs.start
    stop = runs.stop
    first, last = bounds(runs)
    if (stop[last] - start[last]).sum() > _COPIES * graph.num_src:
        return None
    grows = (last > first) & (stop[last] > stop[first])
    # A group of one row is of both kinds.
    causal = grows | (last == first) if grows.any() else grows
    kinds = [(True, causal), (False, ~causal)]
    return [
        _of_kind(graph, row, start, stop, first[which], last[which], is_causal=is_causal)
        for is_causal, which in kinds
        if which.any()
    ]


def bounds(runs: Runs) -> tuple[Ints, Ints]:
    """The first and the last run of each group of neighboring rows, which have one run each: their sources are the
    same, or each row has one source more than the row before, at the end."""
    step = np.diff(runs.stop)
    follows = (np.diff(runs.row) == 1) & (np.diff(runs.start) == 0) & ((step == 0) | (step == 1))
    same_step = np.append(True, (step[1:] == step[:-1]) | ~follows[:-1])[: len(step)]
    first = np.append(0, np.flatnonzero(~(follows & same_step)) + 1)[: runs.num_runs]
    return first, np.append(first[1:], runs.num_runs)[: len(first)] - 1


def _of_kind(
    graph: Graph, row: Ints, start: Ints, stop: Ints, first: Ints, last: Ints, *, is_causal: bool
) -> RowGroups:
    num_dst = last - first + 1
    num_src = stop[last] - start[last]
    dst = expand(row[first], row[first] + num_dst)
    src = expand(start[last], stop[last])
    return RowGroups(_unless_all(dst, graph.num_dst), _unless_all(src, graph.num_src), num_dst, num_src, is_causal)


def _unless_all(nodes: Ints, count: int) -> Ints | None:
    return None if len(nodes) == count and bool((nodes == np.arange(count)).all()) else nodes
