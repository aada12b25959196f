"""Reads files of a dataset."""

from __future__ import annotations

from pathlib import Path

from mpnn.data.errors import DamagedFile, DatasetNotFound


def read_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        DatasetNotFound: if it does not exist.
        DamagedFile: if it is not a regular file.
    """
    if not path.exists():
        raise DatasetNotFound(f"there is no {path}; fetch it again")
    if not path.is_file():  # reading a pipe could block forever
        raise DamagedFile(f"{path} is not a file; move it away and fetch the file again")
    return path.read_bytes()
