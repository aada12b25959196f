"""Graphs from what the user writes on the command line; apart from `console`, as it needs torch."""

import re

from mpnn import Graph
from mpnn.graphs import parse


def bind(expression: str, n: int, num_src: int | None = None) -> Graph:
    """The graph of an expression over --n and --num-src nodes."""
    try:
        return parse(expression).bind(n, num_src)
    except ValueError as error:
        text = re.sub(r"use bind\((\d+)\)", r"use --n \1", str(error))
        raise ValueError(text.replace("num_dst", "--n").replace("num_src", "--num-src")) from None
