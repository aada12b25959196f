"""Sources of the public datasets: addresses, sizes, checksums, licenses.

They are in `sources.json`; `locate.py` downloads them. Addresses are pinned to a commit, and sizes and checksums are
those of the files at this commit.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RemoteFile:
    """One file of a dataset: its name in the dataset's folder, address, size and checksum.

    Args:
        name: file name relative to the dataset's folder.
        url: download address; None if the user has to unpack the file by hand.
        size: bytes; None if it is not known.
        sha256: checksum in hexadecimal; None if it is not known.
    """

    name: str
    url: str | None = None
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Source:
    """One dataset.

    Args:
        name: the name for `locate` and `mpnn data get`.
        folder: its folder under `$MPNN_DATA` and under the cache.
        files: all of its files.
        how: instructions, as the second half of the sentence "to get it, ...".
        license: license or terms of use, as the source states them.
        cite: the paper to cite.
        installed: where a package of the operating system puts the files; None if there is no such package.
        package: the folder of a Python package that has the files, such as "pykeen/datasets/umls", or None.
    """

    name: str
    folder: str
    files: tuple[RemoteFile, ...]
    how: str
    license: str
    cite: str
    installed: str | None = None
    package: str | None = None


_FILE = Path(__file__).with_name("sources.json")


def _read(name: str, files: list[dict[str, Any]], **facts: Any) -> Source:
    return Source(name, files=tuple(RemoteFile(**file) for file in files), **facts)


SOURCES: dict[str, Source] = {facts["name"]: _read(**facts) for facts in json.loads(_FILE.read_text(encoding="utf-8"))}
"""Every dataset that is stored in files, by name."""
