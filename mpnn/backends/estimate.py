"""What a backend says about a request before running it."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """Expected seconds of one processor core, and bytes of working memory beyond inputs and outputs."""

    seconds: float
    bytes: float
