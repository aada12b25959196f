"""The sides of tiles, and how each kernel runs on them, by dtype and width of heads; measured on an H100 (Triton 3.6).

Small tiles follow the edges of a graph, and small steps let more programs wait for memory side by side: both help
where a row has few tiles. Large tiles load less for each product, which helps where a row has many. Called by
`mpnn/backends/tiles.py`.
"""

from typing import NamedTuple

import torch

from mpnn.kernels.cuda.schedule import power_of_two


class Launch(NamedTuple):
    """The sides of a tile, destinations by sources; the keys (queries in the pass by key) that a program takes at a
    time; its warps; its stages of loads; and the most registers of a thread, so that several programs fit on a
    multiprocessor."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    registers: int | None = None


class Config(NamedTuple):
    """The launch of each kernel; that of `by_offset` is that of `by_query`."""

    forward: Launch
    by_query: Launch
    by_key: Launch


_CONFIGS = {
    (2, 64): Config(Launch(64, 64, 32, 4, 3), Launch(64, 64, 64, 4, 3), Launch(64, 64, 64, 4, 3)),
    (2, 128): Config(Launch(64, 64, 64, 4, 3), Launch(64, 64, 64, 4, 2), Launch(64, 64, 32, 4, 2)),
    (2, 256): Config(Launch(64, 64, 32, 4, 2), Launch(64, 64, 32, 4, 2), Launch(64, 64, 32, 8, 2)),
    (4, 64): Config(Launch(64, 64, 32, 4, 2), Launch(64, 64, 32, 4, 2), Launch(64, 64, 32, 4, 2)),
    (4, 128): Config(Launch(64, 64, 32, 4, 1), Launch(64, 64, 32, 4, 1), Launch(64, 64, 32, 8, 1)),
}  # bytes of a number, width
_FORWARD_OF_MANY = {(2, 64): Launch(128, 64, 64, 4, 3)}
_MANY = 32.0  # tiles of a row


def widest(dtype: torch.dtype) -> int:
    """The widest head of a dtype."""
    return max(width for size, width in _CONFIGS if size == dtype.itemsize)


def choose(dtype: torch.dtype, width: int, tiles_of_row: float = 0.0) -> Config:
    """The configuration for heads up to `width` wide and rows of this number of tiles of 64 sources."""
    key = size(dtype, width)
    if tiles_of_row >= _MANY and key in _FORWARD_OF_MANY:
        return _CONFIGS[key]._replace(forward=_FORWARD_OF_MANY[key])
    return _CONFIGS[key]


def size(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """The bytes of a number, and the width for which kernels are tuned."""
    return dtype.itemsize, max(64, power_of_two(width))
