"""A disk that is full from some moment on, for tests that cannot mount one."""

from __future__ import annotations

import errno
import io
import itertools
from collections.abc import Callable
from typing import Any


def full_after(files: int) -> Callable[[Any, str], io.FileIO]:
    """An `open` whose files, after so many, take 10 kB and no more."""
    opened = itertools.count(1)

    class Full(io.FileIO):
        taken = 0

        def write(self, part: Any) -> int:
            self.taken += len(part)
            if self.taken > 10_000:
                raise no_space()
            return super().write(part)

    return lambda path, mode: io.FileIO(path, mode) if next(opened) <= files else Full(path, mode)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
