"""What a backend says about a request before running it."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """Expected time in seconds and working memory in bytes, beyond inputs and outputs."""

    seconds: float
    bytes: float
