"""`mpnn view`: a page for the browser that shows a graph, and what attends to what over it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpnn.cli.console import console, exit_on_failure, exit_on_invalid_input, refuse
from mpnn.cli.expressions import bind
from mpnn.files import write_atomically
from mpnn.view import Page

_SUFFIXES = (".html", ".htm")


def view(
    what: Annotated[str, typer.Argument(metavar="EXPR", help='A topology, such as "causal & window(16)".')],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.", dir_okay=False)] = Path(
        "view.html"
    ),
    n: Annotated[int, typer.Option("--n", help="Number of nodes (destinations, which receive messages).")] = 64,
    num_src: Annotated[
        int | None, typer.Option("--num-src", help="Number of sources, if they are other nodes. Default: same as --n.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out if there is one.")] = False,
) -> None:
    """Write a page for the browser that shows a graph, and what its nodes learn from layer by layer.

    The page is one file that needs no network. Its expression can be changed
    there, and its numbers by sliders.

    \b
    Examples:
      mpnn view "causal & window(16)" -o graph.html
      mpnn view "longformer(64, globals=2)" --n 4096 -o longformer.html
    """
    _check_out(out, force)
    with exit_on_invalid_input():
        bind(what, n, num_src)
    graph = {"expression": what, "n": n, "num_src": num_src}
    page = Page(what, "What a node attends to, and what it learns from, over this graph.", graph)
    with exit_on_failure():
        write_atomically(out, lambda temporary: temporary.write_text(page.html(), encoding="utf-8"))
    console.print(f"saved to {out}; open it in a browser", soft_wrap=True)


def _check_out(out: Path, force: bool) -> None:
    """Refuses a file that cannot be written, before any work."""
    if out.suffix.lower() not in _SUFFIXES:
        refuse(f"the page is an HTML file; name it {out.with_suffix('.html')} instead of {out}")
    if not out.parent.is_dir():
        refuse(f"there is no folder {out.parent} to write {out.name} into")
    if out.exists() and not force:
        refuse(f"{out} exists: name another file, or replace it with --force")
