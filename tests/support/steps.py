"""Bounds on work that are the same on every machine: calls of functions, and bytes."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def at_most(calls: int, megabytes: float) -> Iterator[None]:
    """Fails if the block calls more functions, those of C included, or allocates more at its peak."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    tracemalloc.start()
    sys.setprofile(profile)
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        sys.setprofile(before)
        tracemalloc.stop()
    assert peak < megabytes * 1e6, f"{peak / 1e6:.1f} MB"
    assert count < calls, f"{count:,} calls"
