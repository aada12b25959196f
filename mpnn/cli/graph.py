"""`mpnn graph`: statistics and a drawing of a topology at a given size."""

from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.table import Table

from mpnn import Graph
from mpnn.cli import drawing
from mpnn.cli.console import Force, NumSrc, check_file, console, exit_on_invalid_input
from mpnn.cli.expressions import bind
from mpnn.graph import reachability

_SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".webp")
_LAYERS = (1, 2, 4, 8, 16, 32)
_TIME_LIMIT = 20.0  # seconds for the reach
_MAX_RUNS = 1 << 25  # of a graph that is drawn and whose reach is computed; 800 MB


def graph(
    expression: Annotated[str, typer.Argument(metavar="EXPR", help='A topology, such as "causal & window(16)".')],
    n: Annotated[int, typer.Option("--n", help="Number of nodes (destinations, which receive messages).")] = 64,
    num_src: NumSrc = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write the picture to this file (.png, .svg, .pdf).", dir_okay=False),
    ] = None,
    force: Force = False,
) -> None:
    """Draw a topology, count its edges, and compute how far messages travel.

    Topologies are sets of edges. Combine them with [bold]|[/bold] (union), [bold]&[/bold] (intersection),
    [bold]-[/bold] (difference) and [bold]~[/bold] (complement):
    \b
      causal  complete  identity  window(radius, dilation=1)
      strided(stride)  prefix(k)  global_nodes(count)  memory(length)
      fixed(block, summary=1)  documents([3, 5])  permutation([2, 0, 1])
      random(degree, block=1, seed=0)  expander(degree, seed=0)
      longformer(window, globals=0)
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

    To turn a file of edges into a graph that may be larger than memory, run [bold]mpnn graph convert[/bold].
    """
    with exit_on_invalid_input():
        if out is not None:
            out = out if out.suffix else out.with_suffix(".png")
            check_file(out, _SUFFIXES, f"pictures are {', '.join(_SUFFIXES)}", force)
        bound = bind(expression, n, num_src)
    console.print()
    with console.status("counting"):
        facts = _facts(expression, bound)
    console.print(facts)
    console.print()
    if bound.runs.num_runs > _MAX_RUNS:
        console.print(f"not drawn: more than {_MAX_RUNS:,} runs", style="dim")
    elif bound.num_dst and bound.num_src:
        plain = console.no_color or console.color_system is None
        console.print(drawing.matrix(bound.runs, plain, console.width, ascii_only=console.options.ascii_only))
        cell = "filled" if plain else "colored"
        console.print(f"rows: destinations, columns: sources; a {cell} cell is an edge", style="dim")
    if out is not None:
        _draw(expression, bound, out)


def reach_by_layer(graph: Graph, deadline: float) -> list[tuple[int, float]]:
    """The reach after 1, 2, 4, ... layers, until it stops growing or the deadline passes. There may be none."""
    reached: list[tuple[int, float]] = []
    with suppress(TimeoutError):
        for layers in _LAYERS:
            reached.append((layers, reachability.fraction(graph.runs, layers, deadline)))
            if len(reached) > 1 and reached[-1][1] == reached[-2][1]:
                return reached[:-1]
    return reached


def _facts(expression: str, graph: Graph) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column()
    pairs = graph.num_dst * graph.num_src
    table.add_row("graph", expression)
    size = f"{graph.num_dst:,}"
    if graph.num_dst != graph.num_src:
        size += f" destinations, {graph.num_src:,} sources"
    table.add_row("nodes", size)
    table.add_row("edges", f"{graph.num_edges:,}")
    if pairs:
        table.add_row("density", f"{graph.num_edges / pairs:.2%} of {pairs:,} pairs")
    runs = graph.runs.num_runs
    table.add_row("runs", f"{runs:,}, the storage format of the graph")
    if graph.num_dst:
        (least, most), mean = graph.runs.degree_range(), graph.num_edges / graph.num_dst
        table.add_row("degree", f"{least:,} least, {mean:,.1f} mean, {most:,} most")
    if graph.num_dst == graph.num_src > 0 and runs <= _MAX_RUNS:
        deadline = perf_counter() + _TIME_LIMIT
        for layers, fraction in reach_by_layer(graph, deadline):
            name = f"reach after {layers} layer{'s' * (layers > 1)}"
            table.add_row(name, f"{fraction:.1%} of all pairs" + ", each node with itself included" * (layers == 1))
        try:
            table.add_row("diameter", reachability.diameter_sentence(graph.runs, deadline))
        except TimeoutError:
            table.add_row("diameter", f"not known: stopped after {_TIME_LIMIT:.0f} s")
    return table


def _draw(expression: str, graph: Graph, path: Path) -> None:
    from matplotlib.figure import Figure

    from mpnn.view.plot import adjacency

    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    adjacency(graph, figure.add_subplot(), title=expression)
    with exit_on_invalid_input():
        figure.savefig(path, dpi=160, bbox_inches="tight")  # crops the margins of a wide or tall graph
    console.print(f"saved to {path}")
