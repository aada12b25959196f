"""`mpnn view`: a page for the browser that shows a graph, and what attends to what over it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mpnn.cli.console import console, exit_on_failure, exit_on_invalid_input, refuse
from mpnn.cli.expressions import bind
from mpnn.cli.tasks import CHARACTERS
from mpnn.cli.train import FINISHED
from mpnn.files import write_atomically
from mpnn.graphs import parse
from mpnn.view import Page, of_topology

_SUFFIXES = (".html", ".htm")
_NODES = 64
_TITLE = 60  # characters
_NAME_OF_MODEL = re.compile(r"[\w.-]*[\d/-][\w./-]*")  # as on the Hub: org/name, or a name with a digit or a hyphen


def view(
    what: Annotated[
        str,
        typer.Argument(
            metavar="EXPR|DIR|MODEL",
            help='A topology, such as "causal & window(16)"; a folder of mpnn train on text; or a model of '
            "transformers, as a folder or by its name on the Hugging Face Hub.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.", dir_okay=False)] = Path(
        "view.html"
    ),
    text: Annotated[
        str | None, typer.Option("--text", help="The text that the model reads. Default: a sentence in English.")
    ] = None,
    graph: Annotated[
        list[str] | None,
        typer.Option(
            "--graph",
            help='A topology over which the model attends; "" is its own. Give up to two. Default: its own, and '
            "a window.",
        ),
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", help="Number of nodes (destinations, which receive messages). Default: 64.")
    ] = None,
    num_src: Annotated[
        int | None, typer.Option("--num-src", help="Number of sources, if they are other nodes. Default: same as --n.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out if there is one.")] = False,
) -> None:
    """Write a page for the browser that shows a graph, and what a model attends to over it.

    The page is one file that needs no network. Expressions can be changed
    there, and their numbers by sliders.

    \b
    Examples:
      mpnn view "causal & window(16)" -o graph.html
      mpnn view "longformer(64, globals=2)" --n 4096 -o longformer.html
      mpnn view runs/train --text "If the " -o letters.html
      mpnn view sentence-transformers/all-MiniLM-L6-v2 --text "A bank by the river." -o bank.html
    """
    _check_out(out, force)
    with exit_on_invalid_input():
        if _is_model(what):
            if n is not None or num_src is not None:
                raise ValueError(
                    f"--n and --num-src are for expressions; {what} is a model, whose nodes are its tokens"
                )
            page = _page_of_model(what, text, graph)
        else:
            if text is not None or graph:
                raise ValueError(f"--text and --graph are for models; {what} is an expression")
            nodes = _NODES if n is None else n
            bind(what, nodes, num_src)  # its errors name the options
            with console.status("planning"):
                page = of_topology(what, nodes, num_src)
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


def _is_model(what: str) -> bool:
    if Path(what).is_dir():
        return True
    try:
        parse(what)
    except ValueError:
        return _NAME_OF_MODEL.fullmatch(what) is not None
    return False


def _page_of_model(what: str, text: str | None, graphs: list[str] | None) -> Page:
    from mpnn.cli import view_models

    if graphs and len(graphs) > 2:
        raise ValueError(f"the page shows up to two graphs side by side; got {len(graphs)}")
    if (Path(what) / FINISHED).is_file() and not (Path(what) / CHARACTERS).is_file():
        raise ValueError(f"{what} is a run on nodes; the page shows runs on text, and models of transformers")
    with console.status("reading attention weights"):
        shown = view_models.of_run if (Path(what) / CHARACTERS).is_file() else view_models.of_transformers
        text = text or view_models.TEXT
        attention, compared = shown(what, text, graphs)
    title = text if len(text) <= _TITLE else f"{text[:_TITLE]}…"
    said = f"What each of its {len(attention['tokens']):,} tokens attends to in {what}, in every layer and head."
    return replace(of_topology(compared, len(attention["tokens"])), title=title, subtitle=said, attention=attention)
