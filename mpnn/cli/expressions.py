"""Graphs from what the user writes on the command line; apart from `console`, as it needs torch."""

import inspect
import re
import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any

import typer

from mpnn import Graph
from mpnn.cli.console import refuse
from mpnn.graphs import parse

imported: list[Path] = []
"""The files that --import named in this command, in their order."""


def bind(expression: str, n: int, num_src: int | None = None) -> Graph:
    """The graph of an expression over --n and --num-src nodes."""
    try:
        return parse(expression).bind(n, num_src)
    except ValueError as error:
        if of_data := re.search(r"there is no topology '(knn|edges|cora)'", str(error)):
            raise ValueError(
                f"{of_data[1]} is a graph of data, which mpnn train and mpnn compare build; here, name a topology such "
                "as causal & window(16)"
            ) from None
        text = re.sub(r"use bind\((\d+)\)", r"use --n \1", str(error))
        raise ValueError(text.replace("num_dst", "--n").replace("num_src", "--num-src")) from None


def with_imports(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option --import: Python files, which run first and may register topologies."""

    @wraps(command)
    def called(*args: Any, imports: list[Path] | None = None, **named: Any) -> None:
        imported.clear()
        for file in imports or ():
            _import(file)
        command(*args, **named)

    own = inspect.signature(command)
    help = "A Python file of yours to import first, whose @graphs.register adds topologies to expressions."
    option = typer.Option("--import", metavar="FILE.py", help=help, dir_okay=False)
    added = inspect.Parameter(
        "imports", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[Path] | None, option]
    )
    vars(called)["__signature__"] = own.replace(parameters=[*own.parameters.values(), added])
    return called


def _import(file: Path) -> None:
    """Runs a file as `import` does, with its folder on the path of modules."""
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        refuse(f"--import takes a Python file (.py); got {file}" + ("" if file.exists() else ", which does not exist"))
    module = module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.absolute().parent))
    try:
        spec.loader.exec_module(module)
        imported.append(file)
    except Exception as error:
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == spec.origin]
        where = f"line {lines[-1]} raises " if lines else ""  # an error of syntax names its line itself
        refuse(f"--import {file}: {where}{type(error).__name__}: {error}")
