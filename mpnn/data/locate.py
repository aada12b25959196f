"""Finds a dataset's files, so that no loader knows about folders or networks.

The order: `$MPNN_DATA/<folder>`, then the cache, then a download into the cache, then one sentence that
says how to get the files. A download is checked by size and SHA-256 and moved into place in one step:
a file in the cache is whole, or it is not there.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from mpnn.data.errors import DamagedFile, DatasetNotFound
from mpnn.data.sources import SOURCES, RemoteFile, Source

_CHUNK = 1 << 16
_TIMEOUT_S = 30.0


def cache_dir() -> Path:
    """The folder for downloads: `$MPNN_CACHE`, else the platform's cache folder for `mpnn`."""
    if chosen := os.environ.get("MPNN_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mpnn"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "mpnn" / "Cache"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "mpnn"


def locate(name: str, *names: str) -> Path:
    """The folder that holds a dataset's files, downloading them where that is possible.

    Args:
        name: a key of `SOURCES`.
        names: files needed, relative to the dataset's folder; all of them when none is named.

    Returns:
        A folder in which every file asked for exists.

    Raises:
        ValueError: there is no such dataset, or it has no such file.
        DatasetNotFound: the files are not here and could not be downloaded.
        DamagedFile: a file is here, but not of the size it has at its source, or a folder has its name.
    """
    source = _source(name)
    files = _files(source, names)
    folders = [root / source.folder for root in _roots()]
    folder = next((folder for folder in folders if not _missing(folder, files)), folders[-1])
    for file in _missing(folder, files):
        if (folder / file.name).exists():
            raise DamagedFile(f"{folder / file.name} is not a file; move it away and fetch the file again")
    try:
        for file in _missing(folder, files):
            download(file, folder / file.name)
    except (OSError, HTTPException) as error:
        raise DatasetNotFound(_how_to_get(source, files, folders, str(error))) from error
    _check_sizes(folder, files)
    return folder


def download(file: RemoteFile, target: Path) -> None:
    """Downloads one file to `target`, which afterwards is whole and checked, or does not exist.

    Raises:
        OSError, HTTPException: it cannot be downloaded, or what arrived is not the file asked for.
    """
    if file.url is None:
        raise OSError(f"{file.name} has no address to download it from")
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each process: two that download at once each replace a whole file by a whole file.
    handle, partial = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            _copy_checked(file, file.url, out)
        os.replace(partial, target)
    except BaseException:
        os.unlink(partial)
        raise


def _copy_checked(file: RemoteFile, url: str, out: BinaryIO) -> None:
    digest = hashlib.sha256()
    received = 0
    with _open(url) as response:
        while chunk := response.read(_CHUNK):
            received += len(chunk)
            if file.size is not None and received > file.size:
                raise OSError(f"{url} sends more than the {file.size} bytes expected")
            digest.update(chunk)
            out.write(chunk)
    if file.size is not None and received != file.size:
        raise OSError(f"{url} sent {received} bytes where {file.size} were expected")
    if file.sha256 is not None and digest.hexdigest() != file.sha256:
        raise OSError(f"{url} has the SHA-256 {digest.hexdigest()} where {file.sha256} was expected")


def _open(url: str) -> BinaryIO:
    return urllib.request.urlopen(url, timeout=_TIMEOUT_S)


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"there is no dataset {name!r} to fetch; there are {', '.join(sorted(SOURCES))}")
    return SOURCES[name]


def _files(source: Source, names: Sequence[str]) -> list[RemoteFile]:
    known = {file.name: file for file in source.files}
    for name in names:
        if name not in known:
            raise ValueError(f"{source.name} has no file {name!r}; it has {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def _roots() -> list[Path]:
    """Where to look, in order; the last one is the cache."""
    given = os.environ.get("MPNN_DATA")
    return ([Path(given).expanduser()] if given else []) + [cache_dir()]


def _missing(folder: Path, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    return [file for file in files if not (folder / file.name).is_file()]


def _check_sizes(folder: Path, files: Sequence[RemoteFile]) -> None:
    for file in files:
        found = (folder / file.name).stat().st_size
        if file.size is not None and found != file.size:
            raise DamagedFile(
                f"{folder / file.name} has {found} bytes where {file.size} are expected: it is truncated or "
                f"another file; delete it and fetch it again"
            )


def _how_to_get(source: Source, files: Sequence[RemoteFile], folders: Sequence[Path], why: str) -> str:
    names = ", ".join(file.name for file in files)
    places = " nor ".join(str(folder) for folder in folders)
    return (
        f"the dataset {source.name} ({names}) is not in {places} and could not be downloaded ({why}); "
        f"to get it, {source.how} into {folders[-1]}, or into {source.folder} "
        f"of a folder named by the environment variable MPNN_DATA"
    )
