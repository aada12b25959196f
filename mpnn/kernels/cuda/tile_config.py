"""The sides of tiles, and how each kernel runs on them, by dtype and width of heads; measured, see docs/gpu.md.

Small tiles follow a graph's edges closely, large ones load less for each product. The table has the shapes for each
width, and `choose` takes the one that computes a graph's tiles fastest. Called by `mpnn/backends/tiles/cuda.py`.
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


def widest(dtype: torch.dtype) -> int:
    """The widest head of a dtype."""
    return max(width for size, width in _CONFIGS if size == dtype.itemsize)


def choose(dtype: torch.dtype, width: int) -> Config:
    """The configuration for heads up to `width` wide."""
    return _CONFIGS[size(dtype, width)]


def size(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """The bytes of a number, and the width for which kernels are tuned."""
    return dtype.itemsize, max(64, power_of_two(width))
