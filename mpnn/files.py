"""Files that are whole or absent: a crash, a full disk or `kill -9` never leaves half a file under its name."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

if sys.platform != "win32":  # Windows replaces files as a whole too, but does not delete what killed writers left
    import fcntl


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Calls `write(temporary)` and renames that temporary file to `path`. See `atomic_path`."""
    with atomic_path(path) as temporary:
        write(temporary)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path for the block to write to; `path` gets its content when the block ends without an exception.

    The temporary file has the name of `path` and lies in a temporary folder beside it. When the block ends, its content
    is flushed to the disk (fsync) and renamed to `path`: at any time there is the old file or the new one, and a reader
    never meets half of it. After an exception the old file stays and the temporary one is deleted. Temporary folders of
    killed processes are deleted first; that of a running process is locked, and stays.

    Write two files that belong together in two nested blocks: neither is renamed before both are written.

    Raises:
        OSError: the folder of `path` does not exist, cannot be written or is full.
    """
    path = Path(path)
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        yield temporary
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, path)
    if sys.platform != "win32":
        _flush(path.parent)  # the new name survives a crash too


def remove_abandoned(path: str | os.PathLike[str]) -> None:
    """Deletes the temporary folders that killed writers of `path` left beside it."""
    path = Path(path)
    with _lock(path.parent):
        _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    if sys.platform == "win32":
        return
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError), _descriptor(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where its writer is alive
            shutil.rmtree(folder)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, locked for the time of the block and then deleted."""
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with ExitStack() as stack:
        with _lock(
            path.parent
        ):  # between its creation and its lock, nobody may take the new folder for an abandoned one
            _remove_abandoned(path)
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_lock(folder))
        yield folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Waits for the lock of a folder and holds it; the system gives it back when the process is killed."""
    if sys.platform == "win32":
        yield
        return
    with _descriptor(folder) as descriptor:
        with suppress(OSError):  # a file system without locks; there, nothing is taken for abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def _descriptor(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flush(path: Path, flags: int = os.O_RDONLY) -> None:
    with _descriptor(path, flags) as descriptor:
        os.fsync(descriptor)
