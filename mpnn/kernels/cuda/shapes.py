"""How large the tiles are that a program works on: plain numbers, so that they can be tuned in one place.

A tile is [rows, edges, heads, width], each a power of two, as Triton wants it.
"""

from __future__ import annotations

from typing import NamedTuple

SHORT = 8  # edges of a row, up to which it shares a program with many others
WIDEST = 4096  # numbers of one head
_AT_ONCE = {True: 16, False: 4}  # edges of a row that are taken at once, in long rows and in short ones
_NUMBERS = 4096  # of a tile, over the four warps of a program: 32 registers a thread
_PLACES = 256  # rows times edges of a tile, so that narrow features leave enough programs
_ACROSS = 128  # numbers of all heads together that a program takes, as far as whole heads fit


class Tile(NamedTuple):
    """[rows, edges, heads, width]."""

    rows: int
    edges: int
    heads: int
    width: int


def power_of_two(n: int) -> int:
    """The least one that is not below n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile(heads: int, width: int, long: bool, tensors: int = 1) -> Tile:
    """The tile for features [heads, width], of which a program holds so many at once."""
    wide = power_of_two(width)
    together = min(power_of_two(heads), max(1, _ACROSS // wide))
    places = max(1, min(_PLACES, _NUMBERS // tensors // (together * wide)))
    edges = min(_AT_ONCE[long], places)
    return Tile(places // edges, edges, together, wide)
