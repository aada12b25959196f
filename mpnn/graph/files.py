"""The folder for caches, and atomic file writes: a crash, a full disk or `kill -9` never leaves a partial file under
the final name."""

import glob
import hashlib
import mmap
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":  # on Windows, replacing is atomic too, but files of killed writers are not deleted
    import fcntl


def cache_dir() -> Path:
    """The folder for downloads and measured prices: `$MPNN_CACHE`, else the platform's cache folder for `mpnn`.

    Raises:
        FileNotFoundError: if there is neither, because the user has no home folder, as in some containers.
    """
    if path := os.environ.get("MPNN_CACHE"):
        return Path(path).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "mpnn" / "Cache"
    if sys.platform not in ("darwin", "win32") and (shared := os.environ.get("XDG_CACHE_HOME")):
        return Path(shared) / "mpnn"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} Name a folder for caches in the environment variable MPNN_CACHE.") from None
    inside = {"darwin": "Library/Caches/mpnn", "win32": "AppData/Local/mpnn/Cache"}
    return home / inside.get(sys.platform, ".cache/mpnn")


DIGITS = 64  # of a digest


def digest(file: IO[bytes], at: int) -> bytes:
    """The SHA-256 of an open file in `DIGITS` hexadecimal digits, of which the file keeps a copy at position `at`. That
    copy counts as zeros."""
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        total = hashlib.sha256(view[:at])
        total.update(b"0" * DIGITS)
        total.update(view[at + DIGITS :])
    return total.hexdigest().encode()


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Calls `write(temporary)` and renames that temporary file to `path`. See `atomic_path`."""
    with atomic_path(path) as temporary:
        write(temporary)


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, folder: bool = False) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `path` if the block ends without an exception. With
    `folder` it is a new folder, to write files to.

    The temporary file has the name of `path` and is in a temporary folder next to it. At the end of the block, it is
    flushed to disk (fsync) and renamed to `path`. A reader therefore sees either the old file or the new one, never a
    partial one. After an exception the old file remains and the temporary one is deleted. Temporary folders of killed
    processes are deleted first; those of running processes are locked and remain.

    To write two files that belong together, nest two blocks: neither file is renamed before both are written.

    Raises:
        FileExistsError: with `folder`, if `path` exists. Folders are not replaced.
        OSError: if the folder of `path` does not exist, cannot be written or is full.
    """
    path = Path(path)
    if folder and path.exists():
        raise FileExistsError(f"{path} exists; delete it first, or choose another name")
    with _temporary_folder(path) as outer:
        temporary = outer / path.name
        if folder:
            temporary.mkdir()
        yield temporary
        for file in temporary.iterdir() if folder else (temporary,):
            _flush(file, os.O_RDWR)
        os.replace(temporary, path)
    if sys.platform != "win32":
        _flush(path.parent)  # so that the rename survives a crash too


def remove_abandoned(path: str | os.PathLike[str]) -> None:
    """Deletes temporary folders of killed writers of `path`."""
    path = Path(path)
    with _lock(path.parent):
        _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    if sys.platform == "win32":
        return
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError), _descriptor(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if its writer is alive
            shutil.rmtree(folder)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Creates a folder next to `path`, locks it during the block and then deletes it."""
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with ExitStack() as stack:
        with _lock(path.parent):  # so that no process deletes the new folder before it is locked
            _remove_abandoned(path)
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_lock(folder))
        yield folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Waits for the lock of a folder and holds it. The system releases it if the process is killed."""
    if sys.platform == "win32":
        yield
        return
    with _descriptor(folder) as descriptor:
        with suppress(OSError):  # the file system has no locks; no folder is then considered abandoned
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
