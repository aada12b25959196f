"""What every command shares: where it prints, and how it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
        refuse(str(error))


def refuse(why: str) -> NoReturn:
    _errors.print(f"mpnn: {why}", style="bold red", markup=False)
    raise typer.Exit(REFUSED)


def training_bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
    )
