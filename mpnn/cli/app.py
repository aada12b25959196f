"""The commands and their names. A command is imported when it runs, with the libraries that it needs."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import mpnn
from mpnn.cli.console import console

COMMANDS = {
    "demo": "Show what the choice of graph does: train small models over several graphs, and time the graphs.",
    "graph": "Draw a topology, count its edges, and compute how far messages travel.",
    "explain": "Show which backend would run dot-product attention over a topology, its estimated time, and why others "
    "would not.",
    "view": "Write a page for the browser that shows a graph, and what a model attends to over it.",
    "train": "Train a model over a graph of your choice, print a table of results, and save the model and pictures.",
    "compare": "Find out which graph suits your data: train one model over several graphs, and compare them at equal "
    "time and at equal steps.",
    "generate": "Continue a text with a model that mpnn train or save_pretrained saved.",
    "eval": "Measure a model that mpnn train saved, on the held-out part of its data.",
    "predict": "Write the predictions of a model of nodes, graphs or links, which mpnn train saved, to a table.",
    "data": "Find or download datasets.",
    "tune": "Measure how fast this machine runs each backend, so that plans choose the fastest.",
    "doctor": "Show what this installation has and lacks, and check that its kernels compute correctly.",
}
# Of a command that else takes an argument; and their modules.
SUBCOMMANDS = {("graph", "convert"): "convert", ("graph", "cut"): "cut"}
WITH_EXPRESSIONS = {"graph", "explain", "view", "train", "compare", "generate", "eval", "predict"}
"""The commands that read an expression, or a model that was saved with one."""
_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(
    help="Neural networks as message passing over graphs: the choice of graph is the choice of model.",
    epilog="Start with [bold]mpnn demo[/bold]: it downloads nothing, and draws pictures.",
    no_args_is_help=True,
    add_completion=True,
    **_SETTINGS,
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


def load(name: str) -> Any:
    """Returns the command: the Typer app of `mpnn.cli.<name>`, or its function of this name."""
    module = import_module(f"mpnn.cli.{name}")
    if hasattr(module, "app"):
        return _readable(typer.main.get_command(module.app))
    single = typer.Typer(add_completion=False, **_SETTINGS)
    command = getattr(module, name)
    if name in WITH_EXPRESSIONS:
        command = import_module("mpnn.cli.expressions").with_imports(command)
    single.command(name)(command)
    return _readable(typer.main.get_command(single))


def _readable(command: Any) -> Any:
    """The command, readable: paragraphs fill the terminal, flags have no type, and bounds follow numbers."""
    command.help = paragraphs(command.help or "")
    command.get_help_option = partial(_help_option, command.get_help_option)
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.metavar is None and (_bound(parameter, "min") or _bound(parameter, "max")):
            parameter.metavar = "<number>"
    for inner in getattr(command, "commands", {}).values():
        _readable(inner)
    return command


def _help_option(original: Callable[[Any], Any], context: Any) -> Any:
    """The option --help, which is a flag."""
    option = original(context)
    if option is not None:
        option.metavar = ""
    return option


def _bound(parameter: Any, side: str) -> bool:
    return getattr(parameter, side, None) is not None


def paragraphs(text: str) -> str:
    """The text with each paragraph on one line. Lists of examples, which begin with \\b or are indented, stay."""
    text = re.sub(r"\n+(\x08\n)?Examples:\n+(\x08\n)?", "\n\n\b\nExamples:\n", inspect.cleandoc(text))
    parts = text.split("\n\n")
    return "\n\n".join(part if "\b" in part or "\n  " in part else part.replace("\n", " ") for part in parts)


class _Later(TyperCommand):
    """Stands for a command in the help of `mpnn`, and loads it to parse its arguments and run."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **named: Any) -> Any:
        name = SUBCOMMANDS.get((str(self.name), args[0])) if args else None
        if name is not None:
            info_name = f"{info_name} {name}"
            args = args[1:]
        return load(name or str(self.name)).make_context(info_name, args, *more, **named)


def _run() -> None:
    """Never called: the loaded command runs in its place."""


for _name, _summary in COMMANDS.items():
    app.command(_name, cls=_Later, help=_summary)(_run)
