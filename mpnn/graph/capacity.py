"""Checks whether a large array fits into memory before it is allocated.

Linux overcommits memory, so an allocation that is too large rarely fails: the process is killed while filling it. This
check compares the size with the system's own estimate of available memory, and raises an error instead.
"""

import os
from contextlib import suppress
from pathlib import Path

_SMALL = 1 << 28  # bytes below which nothing is checked
_UNKNOWN = 1 << 62


def require(nbytes: int, what: str, advice: str) -> None:
    """Raises unless `nbytes` bytes are available.

    Raises:
        MemoryError: if less memory is available. The message names `what` needs it and ends with `advice`.
    """
    if nbytes < _SMALL:
        return
    free = available_bytes()
    if nbytes > free:
        raise MemoryError(
            f"{what} would need about {nbytes / 2**30:,.1f} GiB, but {free / 2**30:,.1f} GiB are available; {advice}"
        )


def available_bytes() -> int:
    """The bytes that a new array can use: without swapping, as reported by the system, otherwise all of its memory; and
    within the limit of this process (`ulimit -v`)."""
    return min(_of_system(), _of_process())


def _of_process() -> int:
    with suppress(ImportError, AttributeError, OSError, ValueError):
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            return limit - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN


def _of_system() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN
