"""Topologies over images, whose nodes are pixels or patches in reading order: node = row * width + column."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from mpnn.graphs.check import at_least
from mpnn.relation import GridOffset
from mpnn.runs import Ints
from mpnn.topology import Topology

Pairs = Iterable[tuple[ArrayLike, ArrayLike]]


def grid(height: int, width: int, connectivity: int = 4) -> Topology:
    """Side neighbours, with connectivity 8 corner neighbours too; a pixel does not hear itself.

    ::

        grid(2, 3)   .#.#..
                     #.#.#.
                     .#...#
                     #...#.
                     .#.#.#
                     ..#.#.
    """
    _check_size(height, width)
    if connectivity not in (4, 8):
        raise ValueError(f"connectivity must be 4 (sides) or 8 (sides and corners); got {connectivity}")
    return Topology.of(_grid, int(height), int(width), connectivity, relation=GridOffset(int(width), 1, 1))


def _grid(i: Ints, num_src: int, height: int, width: int, connectivity: int = 4) -> Pairs:
    y, x = _pixels("grid", i, num_src, height, width)
    beside = 1 if connectivity == 8 else 0
    return [
        *_row_runs(y - 1, x - beside, x + beside, height, width),
        *_row_runs(y, x - 1, x - 1, height, width),
        *_row_runs(y, x + 1, x + 1, height, width),
        *_row_runs(y + 1, x - beside, x + beside, height, width),
    ]


def neighborhood(height: int, width: int, radius: int) -> Topology:
    """A pixel hears those within `radius` rows and columns of it, itself included: a convolution's graph.

    The class of an edge is its relative position, `(dy + radius) * (2 * radius + 1) + (dx + radius)`.

    ::

        neighborhood(2, 3, 1)   ##.##.
                                ######
                                .##.##
                                ##.##.
                                ######
                                .##.##
    """
    _check_size(height, width)
    at_least("radius", radius, 0)
    relation = GridOffset(int(width), int(radius), int(radius))
    return Topology.of(_neighborhood, int(height), int(width), int(radius), relation=relation)


def _neighborhood(i: Ints, num_src: int, height: int, width: int, radius: int) -> Pairs:
    y, x = _pixels("neighborhood", i, num_src, height, width)
    reach = min(radius, height)
    return [
        pair for dy in range(-reach, reach + 1) for pair in _row_runs(y + dy, x - radius, x + radius, height, width)
    ]


def windows(height: int, width: int, size: int, shift: int = 0) -> Topology:
    """Swin's windows: both pixels fall into the same size x size window after a cyclic shift by `shift`, and are
    neighbours before it (Liu et al. 2021: what the shift brings together from opposite edges stays apart).

    The class of an edge is its relative position, `(dy + size - 1) * (2 * size - 1) + (dx + size - 1)`.

    ::

        windows(2, 4, size=2)   ##..##..
                                ##..##..
                                ..##..##
                                ..##..##
                                ##..##..
                                ##..##..
                                ..##..##
                                ..##..##

        windows(1, 4, size=2, shift=1)   #...
                                         .##.
                                         .##.
                                         ...#
    """
    _check_size(height, width)
    at_least("size", size, 1)
    at_least("shift", shift, 0)
    relation = GridOffset(int(width), int(size) - 1, int(size) - 1)
    return Topology.cliques(_windows, int(height), int(width), int(size), int(shift), relation=relation)


def _windows(n: int, height: int, width: int, size: int, shift: int = 0) -> Ints:
    y, x = _pixels("windows", np.arange(n), n, height, width)
    across, down = _window_of(x, width, size, shift), _window_of(y, height, size, shift)
    return down * (int(across.max(initial=0)) + 1) + across


def _window_of(at: Ints, length: int, size: int, shift: int) -> Ints:
    """The window along one axis; pixels that the cyclic shift carried over the edge get windows of their own."""
    moved = at - shift % max(length, 1)
    return np.where(moved < 0, (moved + length) // size + -(-length // size), moved // size)


def _row_runs(y: Ints, first: Ints, last: Ints, height: int, width: int) -> Pairs:
    """The pixels `first..last` of image row `y`, cut at the image's edges."""
    inside = (y >= 0) & (y < height)
    first, last = np.maximum(first, 0), np.minimum(last, width - 1)
    nothing = ~inside | (first > last)
    return [(np.where(nothing, 0, y * width + first), np.where(nothing, 0, y * width + last + 1))]


def _pixels(name: str, i: Ints, num_src: int, height: int, width: int) -> tuple[Ints, Ints]:
    if not len(i) == num_src == height * width:
        raise ValueError(
            f"{name} of {height} x {width} pixels needs {height * width} nodes; the graph is {len(i)} x {num_src}"
        )
    return i // width, i % width


def _check_size(height: int, width: int) -> None:
    at_least("height", height, 0)
    at_least("width", width, 1)
