"""The page of a topology: its graph, reach and plan."""

from mpnn import Topology
from mpnn.graphs import parse
from mpnn.view import plans
from mpnn.view.page import Page

_MAX_NODES, _MAX_RUNS = 1_000_000, 1 << 23
_SAID = "What a node attends to, and what it learns from, over this graph."


def of_topology(topology: Topology | str, n: int = 64, num_src: int | None = None) -> Page:
    """The page of a topology, or of its text, over `n` destinations and `num_src` sources (None: as for `bind`).

    In a notebook, it is shown where it is the last value of a cell.

    Raises:
        ValueError: if the text cannot be read, the topology cannot be bound to these sizes or written as text, or the
            page cannot draw it.
    """
    expression = topology if isinstance(topology, str) else repr(topology)
    if ".with_relation" in expression:
        raise ValueError("the page shows edges, which .with_relation does not change; leave it out")
    topology = parse(expression)
    graph = topology.bind(n, num_src)
    if max(graph.num_dst, graph.num_src) > _MAX_NODES or graph.structure.num_runs > _MAX_RUNS:
        raise ValueError(
            f"the page draws at most {_MAX_NODES:,} nodes and {_MAX_RUNS:,} runs; this graph has "
            f"{graph.num_dst:,} nodes and {graph.structure.num_runs:,} runs. Use fewer nodes"
        )
    data = {"expression": expression, "n": n, "num_src": num_src}
    return Page(expression, _SAID, data, plan=plans.of_topology(topology, n, num_src))
