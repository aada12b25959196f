"""Whether a graph is one of causal documents of which the last nodes are convolved, or one of prefixes, over which sums
run."""

import numpy as np

from mpnn.graph.graph import Graph


def is_of_prefixes(graph: Graph) -> bool:
    """Whether each destination attends to the first sources, some number of them: `prefix(k)`, `causal()`."""
    return graph.cached("is of prefixes", lambda: _is_of_prefixes(graph))


def _is_of_prefixes(graph: Graph) -> bool:
    return graph.num_src > 0 and graph.runs.most_runs <= 1 and not graph.runs.start.any()


def convolution(graph: Graph) -> tuple[int, list[int]] | None:
    """The radius and the lengths of the documents of `causal() & window(radius) & documents(lengths)`, without empty
    ones; None if the graph is another."""
    return graph.cached("causal convolution", lambda: _convolution(graph))


def _convolution(graph: Graph) -> tuple[int, list[int]] | None:
    runs = graph.runs
    nodes = graph.num_dst
    one_run = len(runs.start) == nodes and bool((np.diff(runs.ptr) == 1).all())
    if nodes != graph.num_src or not one_run or not (runs.stop == np.arange(nodes) + 1).all():
        return None
    count = runs.stop - runs.start
    radius = int(count.max(initial=1)) - 1
    begins = count == 1
    if not (begins[1:] | (count[1:] == np.minimum(count[:-1] + 1, radius + 1))).all() or count.sum() != graph.num_edges:
        return None
    return radius, [int(n) for n in np.diff(np.flatnonzero(begins), append=nodes)]
