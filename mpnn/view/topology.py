"""The page of a topology: its graph, reach and plan."""

import re
from base64 import b64encode
from typing import Any

from mpnn import Topology
from mpnn.graphs.parse import BUILDERS, parse
from mpnn.view import plans
from mpnn.view.page import Page

_MAX_NODES, _MAX_RUNS = 1_000_000, 1 << 23
_CALLS = re.compile(r"[A-Za-z_]\w*(?=\()")
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
    data: dict[str, Any] = {"expression": expression, "n": n, "num_src": num_src}
    if set(_CALLS.findall(repr(topology))) - BUILDERS.keys():  # those of the user, which the page does not know
        arrays = {name: getattr(graph.runs, name).astype("<i4").tobytes() for name in ("ptr", "start", "stop")}
        data["runs"] = {name: b64encode(array).decode("ascii") for name, array in arrays.items()}
    return Page(expression, _SAID, data, plan=plans.of_topology(topology, n, num_src))
