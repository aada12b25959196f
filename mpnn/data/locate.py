"""Finds or downloads the files of a dataset.

It looks in `$MPNN_DATA/<folder>`, then in the cache, then where a package of the operating system or of Python puts it,
then downloads into the cache. If this fails, the error explains how to get the files. A download is checked by size and
SHA-256 and renamed atomically: the cache never contains a partial file.
"""

import os
import urllib.request
from collections.abc import Sequence
from hashlib import sha256
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from mpnn.data.errors import DamagedFile, DatasetNotFound
from mpnn.data.sources import SOURCES, RemoteFile, Source
from mpnn.graph.files import cache_dir, write_atomically
from mpnn.graph.registry import unknown

_CHUNK = 1 << 16
_TIMEOUT_S = 30.0


def locate(name: str, *names: str) -> Path:
    """Returns the folder with a dataset's files, and downloads missing ones if possible.

    Args:
        name: a key of `SOURCES`.
        names: the files needed, relative to the dataset's folder; default: all files.

    Returns:
        A folder that contains all these files.

    Raises:
        ValueError: if there is no such dataset, or it has no such file.
        DatasetNotFound: if the files are not on this machine and cannot be downloaded.
        DamagedFile: if a file has the wrong size, or a folder has its name.
    """
    source = _source(name)
    files = _files(source, names)
    folders = [root / source.folder for root in search_folders()]
    folder = _first_with(files, _places(source, folders)) or folders[-1]
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


def find(name: str) -> Path | None:
    """Returns the folder that contains all files of a dataset, or None. Nothing is downloaded.

    Raises:
        ValueError: if there is no such dataset.
    """
    source = _source(name)
    try:
        folders = [root / source.folder for root in search_folders()]
    except FileNotFoundError:  # no folder to search
        folders = []
    return _first_with(source.files, _places(source, folders))


def download(file: RemoteFile, target: Path) -> None:
    """Downloads one file to `target` and verifies it. On failure, `target` is not created.

    Raises:
        OSError, HTTPException: if the download fails, or its size or checksum is wrong.
    """
    if file.url is None or file.size is None:
        raise OSError(f"{file.name} has no address to download it from")
    content = b""
    with _open(file.url) as response:
        while len(content) <= file.size and (chunk := response.read(_CHUNK)):
            content += chunk
    if len(content) > file.size:
        raise OSError(f"{file.url} sent more than the expected {file.size} bytes")
    if len(content) != file.size:
        raise OSError(f"{file.url} sent {len(content)} bytes, expected {file.size}")
    if (digest := sha256(content).hexdigest()) != file.sha256:
        raise OSError(f"{file.url} has the SHA-256 {digest}, expected {file.sha256}")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda partial: partial.write_bytes(content))


def _open(url: str) -> BinaryIO:
    return urllib.request.urlopen(url, timeout=_TIMEOUT_S)


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(unknown("dataset", name, sorted(SOURCES)))
    return SOURCES[name]


def _files(source: Source, names: Sequence[str]) -> list[RemoteFile]:
    known = {file.name: file for file in source.files}
    for name in names:
        if name not in known:
            raise ValueError(f"{source.name} has no file {name!r}; it has {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def search_folders() -> list[Path]:
    """The folders to search, in order; downloads go to the last one. That is the cache, if there can be one."""
    data_dir = os.environ.get("MPNN_DATA")
    folders = [Path(data_dir).expanduser()] if data_dir else []
    try:
        folders.append(cache_dir())
    except FileNotFoundError:
        if not folders:
            raise
    return folders


def _places(source: Source, folders: Sequence[Path]) -> list[Path]:
    system = [Path(source.installed)] if source.installed else []
    return [*folders, *system, *_in_package(source)]


def _in_package(source: Source) -> list[Path]:
    """The folder of an installed Python package that has the files, which does not import the package."""
    name, _, folder = (source.package or "").partition("/")
    spec = find_spec(name) if name else None
    return [Path(place) / folder for place in (spec.submodule_search_locations or [])] if spec else []


def _first_with(files: Sequence[RemoteFile], folders: Sequence[Path]) -> Path | None:
    return next((folder for folder in folders if not _missing(folder, files)), None)


def _missing(folder: Path, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    return [file for file in files if not (folder / file.name).is_file()]


def _check_sizes(folder: Path, files: Sequence[RemoteFile]) -> None:
    for file in files:
        size = (folder / file.name).stat().st_size
        if file.size is not None and size != file.size:
            raise DamagedFile(
                f"{folder / file.name} has {size} bytes, expected {file.size}: it is truncated or "
                f"another file; delete it and fetch it again"
            )


def _how_to_get(source: Source, files: Sequence[RemoteFile], folders: Sequence[Path], why: str) -> str:
    names = ", ".join(file.name for file in files)
    searched = " nor ".join(str(folder) for folder in folders)
    return (
        f"the dataset {source.name} ({names}) is not in {searched} and could not be downloaded ({why}); "
        f"to get it, {source.how} into {folders[-1]}, or into {source.folder} "
        f"of a folder named by the environment variable MPNN_DATA"
    )
