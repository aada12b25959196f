"""HTML for notebooks, of a topology, a graph, a plan and an operator: `_repr_html_` of each calls this.

Pictures are small SVGs in the color of the text, so that they fit light and dark pages. Large graphs are drawn from a
sample of rows or edges: the work does not grow with the graph.
"""

from collections.abc import Iterable
from contextlib import suppress
from html import escape
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpnn.graph import Graph, reachability
from mpnn.graph.blocks import density
from mpnn.graph.bound import BoundGraph
from mpnn.graph.topology import Topology

_CELLS = 40  # on a side
_ROWS = 4  # read for each row of cells
_EDGES = 1 << 18  # read of an explicit graph
_SIDE = 140  # pixels
_EXAMPLE = 24  # nodes on which a topology is shown
_DIAMETER = 2048  # nodes up to which the diameter is computed
_SECONDS = 0.2  # after which it is left out: a path of 1,024 nodes takes as many hops


def of_graph(graph: Topology | BoundGraph) -> str:
    """The matrix of a graph, and its numbers; of a topology over 24 nodes, if it can be bound to them."""
    if isinstance(graph, Graph):
        return _box(graph.name or "Graph", _picture(graph), _facts(graph))
    if isinstance(graph, BoundGraph):
        return _box(graph, "", ["one graph for each item and head"])
    try:
        bound = graph.bind(_EXAMPLE)
    except ValueError as problem:
        return _box(graph, "", [f"not a graph of {_EXAMPLE} nodes: {problem}"])
    return _box(graph, _picture(bound), [f"a topology, here over {_EXAMPLE} nodes", *_facts(bound)])


def of_operator(operator: Any) -> str:
    """The parts of a `MessagePassing`, and its graph."""
    name = type(operator).__name__
    graph = operator.graph
    attention = operator.attention
    parts = [("aggregate", type(operator.aggregate).__name__), ("update", type(operator.update).__name__)]
    parts += [("attention", "none" if attention is None else repr(attention).splitlines()[0].rstrip("("))]
    parts += [("backend", operator.backend), ("parameters", f"{sum(p.numel() for p in operator.parameters()):,}")]
    rows = "".join(f"<tr><th style='text-align:left'>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in parts)
    picture = "" if graph is None else of_graph(graph)
    return f"<div><b>{escape(name)}</b><table>{rows}</table>{picture}</div>"


def table(title: str, lines: Iterable[str], head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A title, some lines, and a table."""
    row = "".join(f"<th style='text-align:left'>{escape(x)}</th>" for x in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='white-space:nowrap'>{escape(x)}</td>" for x in cells) + "</tr>" for cells in rows
    )
    text = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return f"<div><b>{escape(title)}</b>{text}<table><tr>{row}</tr>{body}</table></div>"


def _box(title: object, picture: str, lines: Iterable[str]) -> str:
    text = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return (
        "<div style='display:flex;flex-wrap:wrap;gap:12px;align-items:center'>"
        f"{picture}<div><b>{escape(str(title))}</b>{text}</div></div>"
    )


def _facts(graph: Graph) -> list[str]:
    pairs = max(graph.num_dst * graph.num_src, 1)
    square = graph.num_dst == graph.num_src
    size = f"{graph.num_dst:,} nodes" if square else f"{graph.num_dst:,} destinations, {graph.num_src:,} sources"
    share = graph.num_edges / pairs
    percent = f"{share:.2%}" if share >= 1e-4 or not share else f"{100 * share:.1g}%"
    facts = [size, f"{graph.num_edges:,} edges, {percent} of all pairs"]
    if square and 0 < graph.num_dst <= _DIAMETER:
        with suppress(TimeoutError):
            facts.append(reachability.diameter_sentence(graph.runs, perf_counter() + _SECONDS))
    return facts


def _picture(graph: Graph) -> str:
    """The matrix as an SVG: rows are destinations, columns sources; the darker, the more of the pairs are edges."""
    share = _shares(graph)
    rows, columns = share.shape
    level = np.ceil(share * 5) / 5  # five shades, so that neighbors of one shade become one rectangle
    rectangles = []
    for i in range(rows):
        change = np.flatnonzero(np.diff(level[i])) + 1
        for first, last in zip([0, *change], [*change, columns], strict=True):
            if level[i, first]:
                size = f"x='{first}' y='{i}' width='{last - first}' height='1'"
                rectangles.append(f"<rect {size} fill-opacity='{0.15 + 0.85 * level[i, first]:.2f}'/>")
    said = escape(f"adjacency matrix: {'; '.join(_facts(graph))}", quote=True)
    height = round(_SIDE * rows / max(columns, 1)) if columns else 0
    return (
        f"<svg role='img' aria-label=\"{said}\" width='{_SIDE}' height='{min(max(height, 8), 2 * _SIDE)}' "
        f"viewBox='0 0 {columns} {rows}' preserveAspectRatio='none' shape-rendering='crispEdges' fill='currentColor' "
        f"style='outline:1px solid currentColor'>{''.join(rectangles)}</svg>"
    )


def _shares(graph: Graph) -> NDArray[np.float64]:
    """The share of pairs that are edges in each cell of the matrix, [rows, columns], at most 40 each."""
    rows, columns = min(graph.num_dst, _CELLS), min(graph.num_src, _CELLS)
    if not rows or not columns:
        return np.zeros((rows, columns))
    if graph.is_explicit:
        step = max(1, graph.num_edges // _EDGES)
        src, dst = graph.edge_index[:, ::step].cpu().numpy()
        cell = dst * rows // graph.num_dst * columns + src * columns // graph.num_src
        counts = np.bincount(cell, minlength=rows * columns).reshape(rows, columns) * float(step)
        return np.minimum(counts * rows * columns / (graph.num_dst * graph.num_src), 1.0)
    count = min(graph.num_dst, _ROWS * rows)
    # The same number of rows of each row of cells.
    nodes = (2 * np.arange(count) + 1) * graph.num_dst // (2 * count)
    return density(graph.runs.take(nodes), rows, columns)
