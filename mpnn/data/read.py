"""Reads files of data sets, whose digests are known: a damaged or other file is refused before anything parses it."""

from hashlib import sha256
from pathlib import Path

from mpnn.data.errors import DamagedFile, DatasetNotFound
from mpnn.data.locate import locate
from mpnn.data.sources import SOURCES


def read(name: str, file: str) -> bytes:
    """The bytes of a file of a data set, which is downloaded if it is missing and possible."""
    (digest,) = (known.sha256 for known in SOURCES[name].files if known.name == file)
    return read_verified(locate(name, file) / file, str(digest))


def read_bytes(path: Path) -> bytes:
    """The bytes of a file."""
    if not path.exists():
        raise DatasetNotFound(f"there is no {path}; fetch it again")
    if not path.is_file():  # reading a pipe could block forever
        raise DamagedFile(f"{path} is not a file; move it away and fetch the file again")
    return path.read_bytes()


def read_verified(path: Path, digest: str) -> bytes:
    """The bytes of a file with this SHA-256, in hexadecimal."""
    content = read_bytes(path)
    if (actual := sha256(content).hexdigest()) != digest:
        raise DamagedFile(f"{path} has the SHA-256 {actual}, expected {digest}; delete it and fetch it again")
    return content
