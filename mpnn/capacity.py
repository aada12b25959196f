"""Whether a large array fits into memory, asked before it is built.

Linux grants more memory than there is, so an allocation that cannot be filled rarely fails: it runs until the process
is killed. A sentence at the start costs a glance at the system's own estimate.
"""

from __future__ import annotations

import os
from pathlib import Path

_SMALL = 1 << 28  # bytes that need no question


def require(nbytes: int, what: str, advice: str) -> None:
    """Returns if `nbytes` bytes are available.

    Raises:
        MemoryError: they are not. The sentence names `what` needs them, and ends with `advice`.
    """
    if nbytes < _SMALL:
        return
    free = available_bytes()
    if nbytes > free:
        raise MemoryError(
            f"{what} would need about {nbytes / 2**30:,.1f} GiB, but {free / 2**30:,.1f} GiB are available; {advice}"
        )


def available_bytes() -> int:
    """The bytes that a new array can use without swapping: what the system states, or else all of its memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return 1 << 62
