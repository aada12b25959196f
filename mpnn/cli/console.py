"""Functions that all commands share: output and error handling."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

FAILED = 1
REFUSED = 2
_START = perf_counter()
_SECONDS_A_LINE = 10.0

Force = Annotated[bool, typer.Option("--force", help="Replace the file of --out if there is one.")]
NumSrc = Annotated[
    int | None, typer.Option("--num-src", help="Number of sources, if they are other nodes. Default: same as --n.")
]
console = Console(highlight=False)
_errors = Console(stderr=True, highlight=False)


def as_seed(seed: int) -> int:
    """The seed, if torch takes it."""
    if not -(2**63) <= seed < 2**63:
        refuse(f"--seed must be from -2**63 to 2**63 - 1; got {seed}")
    return seed


@contextmanager
def exit_on_invalid_input() -> Iterator[None]:
    """Turns errors in the user's input into an error message on stderr and exit code 2.

    Use it only around the parsing of input, not around the computation: there, an error is a bug that needs its
    traceback.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        refuse(too_large(error))
    except (ValueError, TypeError, IndexError, OSError, ImportError) as error:
        refuse(sentence(error))


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether Python, NumPy or torch, which raises a RuntimeError, could not get memory."""
    return isinstance(error, MemoryError) or any(
        sign in str(error) for sign in ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
    )


def too_large(error: MemoryError | RuntimeError) -> str:
    """Returns the message for an error of `is_out_of_memory`."""
    asked = re.search(r"tried to allocate (\d+) bytes", str(error))
    how_much = f": one tensor of it has {int(asked[1]) / 1e9:,.0f} GB" if asked else ""
    return f"this does not fit into memory{how_much}; choose smaller sizes"


def sentence(error: Exception) -> str:
    """The message of an error, without the error number of the system."""
    at, why = getattr(error, "filename", None), getattr(error, "strerror", None)
    return f"cannot read or write {at}: {why}" if at and why else why or str(error)


def refuse(why: str) -> NoReturn:
    """Ends the command with exit code 2 because its input is invalid."""
    warn(why)
    raise typer.Exit(REFUSED)


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """Turns an OSError during the computation, such as a full disk, into an error message on stderr and exit code 1."""
    try:
        yield
    except OSError as error:
        fail(sentence(error))


def fail(why: str) -> NoReturn:
    """Ends the command with exit code 1 because the computation failed."""
    warn(why)
    raise typer.Exit(FAILED)


def warn(what: str) -> None:
    # A terminal gets whole words on a line, a file or a pipe the message on one.
    _errors.print(f"mpnn: {what}", style="bold red", markup=False, soft_wrap=not _errors.is_terminal)


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """Creates the output folder before the block runs, so that an error appears before minutes of training.

    If the folder is new and is empty at the end, because the command failed or was stopped, it is deleted.
    """
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    with exit_on_invalid_input():
        path.mkdir(parents=True, exist_ok=True)
    try:
        if not os.access(path, os.W_OK | os.X_OK):
            refuse(f"cannot write into {path}: permission denied; name another folder with --out")
        yield
    finally:
        with suppress(OSError):  # the folder is not empty
            for folder in created:
                folder.rmdir()


def check_file(out: Path, suffixes: Sequence[str], what: str, force: bool) -> None:
    """Refuses a file that cannot be written, before any work."""
    if out.suffix.lower() not in suffixes:
        refuse(f"{what}; name it {out.with_suffix(suffixes[0])} instead of {out}")
    if not out.parent.is_dir():
        refuse(f"there is no folder {out.parent} to write {out.name} into")
    if out.exists() and not force:
        refuse(f"{out} exists: name another file, or replace it with --force")


def memory(size: float) -> str:
    """Bytes as people read them: 12 kB, 3.4 MB."""
    if size < 1e6:
        return f"{size / 1e3:.0f} kB" if size >= 999.5 else f"{size:.0f} B"
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ("graph",)) -> Table:
    """A table whose columns are aligned to the right, but for those in `left`."""
    result = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        justify: Literal["left", "right"] = "left" if heading in left else "right"
        result.add_column(heading, justify=justify, overflow="fold", no_wrap=heading != "graph")
    for row in rows:
        result.add_row(*row)
    return result


class _Lines(Progress):
    """Progress in a file or a pipe, where bars cannot move: a line every ten seconds, and one at the end of a task."""

    _last = perf_counter()

    def update(self, task_id: TaskID, *arguments: Any, **fields: Any) -> None:
        was_finished = self.tasks[task_id].finished
        super().update(task_id, *arguments, **fields)
        now = perf_counter()
        task = self.tasks[task_id]
        if was_finished or (not task.finished and now - self._last < _SECONDS_A_LINE):
            return
        self._last = now
        # Runs of several processes end in any order, so a line counts those that ended, and not their places.
        ended = sum(each.finished for each in self.tasks)
        count = f"{ended} of {len(self.tasks)} done; " if len(self.tasks) > 1 else ""
        step = f"step {task.completed:.0f} of {task.total:.0f}"
        line = f"{now - _START:5.0f} s  {count}{task.description}, {step}, {task.fields['note']}"
        self.console.print(line, soft_wrap=True, markup=False)


def training_bars() -> Progress:
    kind = Progress if console.is_terminal else _Lines
    return kind(
        TextColumn("{task.description}", table_column=Column(max_width=32, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        disable=kind is _Lines,
    )
