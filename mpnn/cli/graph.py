"""`mpnn graph`: what a topology is at a size, in numbers and as a drawing."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.table import Table

from mpnn.cli import drawing
from mpnn.cli.console import console, refuse, refusing
from mpnn.graph import Graph
from mpnn.graphs import parse

_DEEPEST = 32
_PATIENCE = 20.0


def graph(
    expression: Annotated[str, typer.Argument(metavar="EXPR", help='A topology, such as "causal & window(16)".')],
    n: Annotated[int, typer.Option("--n", help="Number of nodes: of destinations, those that hear.")] = 64,
    num_src: Annotated[
        int | None, typer.Option("--num-src", help="Number of sources, where these are other nodes. Default: as --n.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also draw it into this file (.png, .svg, .pdf).", dir_okay=False)
    ] = None,
) -> None:
    """Draw a topology, and count its edges and how far messages travel.

    Topologies are sets of edges. Join them with [bold]|[/bold] (either), [bold]&[/bold] (both), [bold]-[/bold]
    (without) and [bold]~[/bold] (all others):
    \b
      causal  complete  identity  window(radius, dilation=1)
      strided(stride)  prefix(k)  global_nodes(count)  memory(length)
      fixed(block, summary=1)  documents([3, 5])  permutation([2, 0, 1])
      random(degree, block=1, seed=0)  longformer(window, globals=0)
      bigbird(block=64, window=3, random=3, globals=2)
      grid(height, width)  neighborhood(height, width, radius)
      windows(height, width, size, shift=0)  pooling(height, width, size)
      convolution(height, width, kernel, stride=1, padding=0, dilation=1)

    Examples:
    \b
      mpnn graph "causal & window(16)"
      mpnn graph "window(8) | global_nodes(2)" --n 128 -o longformer.png
      mpnn graph "bigbird(block=16)" --n 1024
      mpnn graph complete --n 10 --num-src 77
    """
    with refusing():
        if out is not None:
            out = out if out.suffix else out.with_suffix(".png")
            if not out.parent.is_dir():
                refuse(f"there is no folder {out.parent} to write {out.name} into")
        bound = parse(expression).bind(n, num_src)
        runs = bound.runs
    console.print()
    with console.status("counting"):
        facts = _facts(expression, bound)
    console.print(facts)
    console.print()
    if runs.num_dst and runs.num_src:
        plain = console.no_color or console.color_system is None
        console.print(drawing.matrix(runs, plain, console.width))
        cell = "filled" if plain else "coloured"
        console.print(f"destinations down, sources across; a {cell} cell: the row hears the column", style="dim")
    if out is not None:
        _draw(expression, bound, out)


def reach_by_layer(graph: Graph) -> list[tuple[int, float]]:
    """The reach after 1, 2, 4, ... layers, until it no longer grows or too much time has passed."""
    began, found = perf_counter(), [(1, graph.reach(1))]
    while found[-1][0] < _DEEPEST and perf_counter() - began < _PATIENCE:
        layers = 2 * found[-1][0]
        found.append((layers, graph.reach(layers)))
        if found[-1][1] == found[-2][1]:
            return found[:-1]
    return found


def _facts(expression: str, graph: Graph) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column()
    pairs = graph.num_dst * graph.num_src
    table.add_row("graph", expression)
    size = f"{graph.num_dst:,}" if graph.num_dst == graph.num_src else f"{graph.num_dst:,} hear {graph.num_src:,}"
    table.add_row("nodes", size)
    table.add_row("edges", f"{graph.num_edges:,}")
    if pairs:
        table.add_row("density", f"{graph.num_edges / pairs:.2%} of {pairs:,} pairs")
    table.add_row("runs", f"{len(graph.runs.start):,}, what the graph is stored as")
    if graph.num_dst:
        degree = graph.degree()
        mean = graph.num_edges / graph.num_dst
        table.add_row("degree", f"{int(degree.min()):,} least, {mean:,.1f} mean, {int(degree.max()):,} most")
    if graph.num_dst == graph.num_src > 0:
        reached = reach_by_layer(graph)
        for layers, fraction in reached:
            name = f"reach after {layers} layer{'s' * (layers > 1)}"
            table.add_row(name, f"{fraction:.1%} of all pairs" + ", as each knows itself" * (layers == 1))
        table.add_row("all hear all", _full_reach(graph, reached))
    return table


def _full_reach(graph: Graph, reached: list[tuple[int, float]]) -> str:
    deepest, fraction = reached[-1]
    if fraction == 1.0:
        layers = graph.diameter()
        return f"after {layers} layer{'s' * (layers != 1)}"
    again = graph.reach(deepest + 1)
    return f"not within {deepest} layers" if again > fraction else f"never: no more than {fraction:.1%}"


def _draw(expression: str, graph: Graph, path: Path) -> None:
    from matplotlib.figure import Figure

    from mpnn.plot import adjacency

    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    adjacency(graph, figure.add_subplot(), title=expression)
    with refusing():
        figure.savefig(path, dpi=160, bbox_inches="tight")  # cut to a graph that is wide or tall
    console.print(f"drawn into {path}")
