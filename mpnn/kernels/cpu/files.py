"""The names of the compiled libraries. Shared with `hatch_build.py`, so it imports neither torch nor mpnn."""

import hashlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def digest(folder: Path = FOLDER) -> str:
    """Twelve hexadecimal digits that identify the C++ sources."""
    sources = sorted((*folder.glob("*.cpp"), *folder.glob("*.h")))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sources)).hexdigest()[:12]


def file_name(processor: str, digest: str, system: str = sys.platform) -> str:
    suffix = {"win32": "dll", "darwin": "dylib"}.get(system, "so")
    return f"kernels-{processor}-{digest}.{suffix}"
