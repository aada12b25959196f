"""The sizes of tiles, tuned in this one place. A tile is [rows, edges, heads, width], each a power of two, as Triton
requires."""

from __future__ import annotations

from typing import NamedTuple

SHORT = 8  # a row with at most so many edges shares a program with other rows
MAX_WIDTH = 4096  # the widest head
_EDGES = {True: 16, False: 4}  # edges of a row in a tile, of long rows and of short ones
_NUMBERS = 4096  # of a tile, over the four warps of a program: 32 registers a thread
_PAIRS = 256  # the most rows times edges of a tile, so that narrow features leave enough programs
_HEADS_WIDTH = 128  # heads times width of a tile, if more than one head fits


class Tile(NamedTuple):
    """[rows, edges, heads, width]."""

    rows: int
    edges: int
    heads: int
    width: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile(heads: int, width: int, long: bool, tensors: int = 1) -> Tile:
    """The tile for features [heads, width], if a program holds `tensors` tiles at once."""
    width = power_of_two(width)
    heads = min(power_of_two(heads), max(1, _HEADS_WIDTH // width))
    pairs = max(1, min(_PAIRS, _NUMBERS // tensors // (heads * width)))
    edges = min(_EDGES[long], pairs)
    return Tile(pairs // edges, edges, heads, width)
