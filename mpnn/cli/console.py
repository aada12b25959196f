"""What every command shares: where it prints, and how it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

FAILED, REFUSED = 1, 2

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
        refuse(sentence(error))


def sentence(error: Exception) -> str:
    """What went wrong, without the number that the system has for it."""
    at, why = getattr(error, "filename", None), getattr(error, "strerror", None)
    return f"cannot read or write {at}: {why}" if at and why else why or str(error)


def refuse(why: str) -> NoReturn:
    warn(why)
    raise typer.Exit(REFUSED)


@contextmanager
def failing() -> Iterator[None]:
    """A full disk, and whatever else the system refuses to do for the work, becomes one sentence on stderr."""
    try:
        yield
    except OSError as error:
        fail(sentence(error))


def fail(why: str) -> NoReturn:
    """Ends the command because its work failed, for no fault in what it was asked for."""
    warn(why)
    raise typer.Exit(FAILED)


def warn(what: str) -> None:
    _errors.print(f"mpnn: {what}", style="bold red", markup=False)


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """Creates the folder of results for the block, or refuses: better now than after minutes of training.

    A folder that this creates and that is empty at the end, because the command failed or was stopped, is deleted.
    """
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    with refusing():
        path.mkdir(parents=True, exist_ok=True)
    try:
        if not os.access(path, os.W_OK | os.X_OK):
            refuse(f"cannot write into {path}: permission denied; name another folder with --out")
        yield
    finally:
        with suppress(OSError):  # not empty
            for folder in created:
                folder.rmdir()


def training_bars() -> Progress:
    return Progress(
        TextColumn("{task.description}", table_column=Column(max_width=32, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
    )
