"""Swin's windows over a grid of any size (Liu et al. 2021, section 3.2).

If windows do not divide the grid, it is padded at the bottom and the right with zero patches. As in the published code,
these are sources of the attention: their keys and values are the maps' biases. A grid that is not larger than a window
is a single window without shift.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from mpnn import Topology
from mpnn.graph.relations import GridOffset, Taps
from mpnn.graphs import windows
from mpnn.models.layers.images import Size, as_image


def window_topology(
    graph: Topology | None, window: int, shifted: bool, rows: int, columns: int
) -> tuple[Topology, Size]:
    """Returns the topology over a grid of patches, and the padded size of the grid.

    `graph` replaces the windows of `window` x `window` patches. In both cases the edge type is the relative position,
    clipped to the range within a window.
    """
    size, reach = (rows, columns), window - 1
    offset = GridOffset(columns, reach, reach)
    if graph is not None:
        return graph.with_relation(offset), size
    side = min(window, *size)
    shift = window // 2 if shifted and min(size) > window else 0
    padded = rows + -rows % side, columns + -columns % side
    if padded == size:
        return windows(*size, side, shift).with_relation(offset), padded
    taps = Taps(padded[1], columns, kernel=(2 * reach + 1,) * 2, padding=(reach, reach))
    return Topology.of(_padded_windows, size, padded, side, shift, relation=taps), padded


def pad_nodes(x: Tensor, size: Size, padded: Size) -> Tensor:
    """Pads nodes [B, N, dim] of a grid of `size` with zeros to a grid of size `padded`."""
    image = F.pad(as_image(x, *size), (0, padded[1] - size[1], 0, padded[0] - size[0]))
    return image.flatten(2).mT


def _padded_windows(i: Any, num_src: int, size: Size, padded: Size, side: int, shift: int) -> Iterator[tuple[Any, Any]]:
    """`windows` of a padded grid: destinations are the patches of the grid, sources those of the padded grid."""
    (top, bottom), (left, right) = (
        _window(at, length, side, shift) for at, length in ((i // size[1], padded[0]), (i % size[1], padded[1]))
    )
    for row in range(side):
        base = (top + row) * padded[1]
        yield base + left, np.where(top + row < bottom, base + right, 0)


def _window(at: Any, length: int, side: int, shift: int) -> tuple[Any, Any]:
    """Start and stop, along one axis, of the window that contains position `at`."""
    start = shift + (at - shift) // side * side
    return np.maximum(start, 0), np.minimum(start + side, np.where(at < shift, shift, length))
