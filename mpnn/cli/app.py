"""The commands and their names."""

from __future__ import annotations

from typing import Annotated

import typer

import mpnn
from mpnn.cli import data, demo, explain, graph, train
from mpnn.cli.console import console

app = typer.Typer(
    help="Neural networks as message passing over graphs: the choice of graph is the choice of model.",
    epilog="Start with [bold]mpnn demo[/bold]: it takes two minutes, downloads nothing, and draws pictures.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"mpnn {mpnn.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Neural networks as message passing over graphs: the choice of graph is the choice of model."""


app.command("demo")(demo.demo)
app.command("graph")(graph.graph)
app.command("explain")(explain.explain)
app.command("train")(train.train)
app.add_typer(data.app, name="data")
