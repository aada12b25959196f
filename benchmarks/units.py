"""Seconds, bytes and ratios of times as pages show them."""

from __future__ import annotations

RATIO = "peer / mpnn"
"""The head of a column of ratios, in every table that compares times with those of another library."""
MEANING = f"`{RATIO}` is the peer's time divided by mpnn's time: above 1, mpnn is faster."


def times(ratio: float) -> str:
    """A ratio of times with two digits after the point, or one from 10 on."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def memory(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
