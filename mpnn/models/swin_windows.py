"""Swin's windows over a grid of any size (Liu et al. 2021, section 3.2).

Where windows do not divide the grid, it is filled up at the bottom and the right with patches that say nothing but the
maps' biases, and are heard, as in the published code. Grids no larger than a window are one window, which does not
shift.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graphs import windows
from mpnn.models.parts.images import Size, as_image
from mpnn.relation import GridOffset, Taps
from mpnn.topology import Topology


def hears(
    graph: Topology | None, window: int, shifted: bool, rows: int, columns: int
) -> tuple[Topology, Size, Size, int]:
    """Who hears whom over a grid of patches; the size that it is filled up to, that of windows, and their shift.

    `graph` takes the place of windows of `window` patches a side; in both, the class of an edge is the relative
    position, clipped to those that a window has.
    """
    size, reach = (rows, columns), window - 1
    offset = GridOffset(columns, reach, reach)
    if graph is not None:
        return graph.related(offset), size, size, 0
    side = min(window, *size)
    shift = window // 2 if shifted and min(size) > window else 0
    whole = rows + -rows % side, columns + -columns % side
    if whole == size:
        return windows(*size, side, shift).related(offset), whole, (side, side), shift
    taps = Taps(whole[1], columns, kernel=(2 * reach + 1,) * 2, padding=(reach, reach))
    return Topology.of(_filled_windows, size, whole, side, shift, relation=taps), whole, (side, side), shift


def filled_up(x: Tensor, size: Size, whole: Size) -> Tensor:
    """Nodes [B, N, dim] of a grid, and zeros for those that fill it up to a larger one."""
    filled = F.pad(as_image(x, *size), (0, whole[1] - size[1], 0, whole[0] - size[0]))
    return filled.flatten(2).mT


def _filled_windows(i: Any, num_src: int, size: Size, whole: Size, side: int, shift: int) -> Iterator[tuple[Any, Any]]:
    """`windows` of a grid that is filled up to a larger one: destinations are its own patches, sources all."""
    (top, bottom), (left, right) = (
        _window(at, length, side, shift) for at, length in ((i // size[1], whole[0]), (i % size[1], whole[1]))
    )
    for row in range(side):
        base = (top + row) * whole[1]
        yield base + left, np.where(top + row < bottom, base + right, 0)


def _window(at: Any, length: int, side: int, shift: int) -> tuple[Any, Any]:
    """Along one axis, where the window begins and ends that holds `at`."""
    start = shift + (at - shift) // side * side
    return np.maximum(start, 0), np.minimum(start + side, np.where(at < shift, shift, length))


def by_window(weights: Tensor, graph: Graph, size: Size, whole: Size, cell: Size, shift: int) -> Tensor:
    """Weights [B, E, H] as matrices [B, windows, H, S, S] over the S places of each window; what the shift carries over
    the edge stands in one window with what it meets there, and does not hear it."""
    place = torch.arange(whole[0] * whole[1], device=weights.device)
    y, x = (place // whole[1] - shift) % whole[0], (place % whole[1] - shift) % whole[1]
    across = whole[1] // cell[1]
    window, slot = y // cell[0] * across + x // cell[1], y % cell[0] * cell[1] + x % cell[1]
    src, dst = graph.edge_index
    dst = dst // size[1] * whole[1] + dst % size[1]
    places = cell[0] * cell[1]
    matrix = weights.new_zeros(len(weights), len(place) // places, places, places, weights.shape[-1])
    matrix[:, window[dst], slot[dst], slot[src]] = weights
    return matrix.movedim(-1, 2)
