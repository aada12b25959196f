"""The graphs that the Graph pane offers, and the runs of graphs that a browser cannot make."""

import re
from base64 import b64encode
from functools import cache
from typing import Any

from mpnn.graph import Graph
from mpnn.graphs.parse import BUILDERS, parse

EXAMPLES = (
    ("BERT", "complete", 64),
    ("GPT", "causal", 64),
    ("Mistral", "causal & window(16)", 64),
    ("Longformer", "longformer(8, globals=1)", 64),
    ("BigBird", "bigbird(block=4, window=3, random=2, globals=1)", 96),
    ("Sparse Transformer", "strided(8)", 64),
    ("Swin", "windows(8, 8, 4)", 64),
    ("pixels", "grid(8, 8)", 64),
    ("100,000 nodes", "causal & (window(2048) | global_nodes(64))", 100_000),
)
"""What a graph is known by, its expression, and the number of its nodes."""

RANDOM = {"random", "expander", "bigbird"}
"""The builders whose edges come from numpy's generator: `RANDOM` in `viewer/src/graph/builders.ts`."""

_CALLS = re.compile(r"[A-Za-z_]\w*(?=\()")


def examples() -> list[dict[str, Any]]:
    """Returns the Example of `viewer/src/data.ts`."""
    return [_example(*one) for one in EXAMPLES]


@cache
def _example(name: str, expression: str, n: int) -> dict[str, Any]:
    topology = parse(expression)
    data = {"name": name, "expression": expression, "n": n, "num_src": None}
    return data | ({"runs": runs(topology.bind(n))} if needs_runs(repr(topology)) else {})


def needs_runs(expression: str) -> bool:
    """Whether the browser cannot make the graph: a builder draws random numbers, or is one of the user's."""
    return bool(set(_CALLS.findall(expression)) - (BUILDERS.keys() - RANDOM))


def runs(graph: Graph) -> dict[str, str]:
    """Returns the RunsData of `viewer/src/data.ts`."""
    arrays = {name: getattr(graph.runs, name).astype("<i4").tobytes() for name in ("ptr", "start", "stop")}
    return {name: b64encode(array).decode("ascii") for name, array in arrays.items()}
