"""What every command shares: where it prints, and how it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

REFUSED = 2

console = Console(highlight=False)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def refusing() -> Iterator[None]:
    """What the user gave wrong becomes one sentence on stderr and exit code 2.

    Wrapped around the reading of what was given, not around the work on it: a traceback of our own is worth seeing.
    """
    try:
        yield
    except MemoryError as error:
        refuse(f"this does not fit into memory: {error}")
    except (ValueError, TypeError, IndexError, OSError, ImportError) as error:
        at, why = getattr(error, "filename", None), getattr(error, "strerror", None)
        refuse(f"cannot read or write {at}: {why}" if at and why else str(error))


def refuse(why: str) -> NoReturn:
    _errors.print(f"mpnn: {why}", style="bold red", markup=False)
    raise typer.Exit(REFUSED)


def folder(path: Path) -> None:
    """Makes the folder that results go into, or refuses: better now than after minutes of training."""
    with refusing():
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        refuse(f"cannot write into {path}: permission denied; name another folder with --out")


def training_bars() -> Progress:
    return Progress(
        TextColumn("{task.description}", table_column=Column(max_width=32, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
    )
