"""Swin's windows over a grid of any size (Liu et al. 2021, section 3.2).

If windows do not divide the grid, it is padded at the bottom and the right with zero patches. As in the published code,
these are sources of the attention: their keys and values are the maps' biases. A grid that is not larger than a window
is a single window without shift.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, Topology
from mpnn.graph.relations import GridOffset, Taps
from mpnn.graphs import windows
from mpnn.models.layers.images import Size, as_image


def window_topology(
    graph: Topology | None, window: int, shifted: bool, rows: int, columns: int
) -> tuple[Topology, Size, Size, int]:
    """Returns the topology over a grid of patches, the padded size of the grid, the size of windows, and their shift.

    `graph` replaces the windows of `window` x `window` patches. In both cases the edge type is the relative position,
    clipped to the range within a window.
    """
    size, reach = (rows, columns), window - 1
    offset = GridOffset(columns, reach, reach)
    if graph is not None:
        return graph.with_relation(offset), size, size, 0
    side = min(window, *size)
    shift = window // 2 if shifted and min(size) > window else 0
    padded = rows + -rows % side, columns + -columns % side
    if padded == size:
        return windows(*size, side, shift).with_relation(offset), padded, (side, side), shift
    taps = Taps(padded[1], columns, kernel=(2 * reach + 1,) * 2, padding=(reach, reach))
    return Topology.of(_padded_windows, size, padded, side, shift, relation=taps), padded, (side, side), shift


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


def weights_by_window(weights: Tensor, graph: Graph, size: Size, padded: Size, cell: Size, shift: int) -> Tensor:
    """Weights [B, E, H] as matrices [B, windows, H, S, S] over the S positions of each window.

    Patches that the cyclic shift wraps around share a window with patches of the opposite border. The weights between
    the two are zero.
    """
    node = torch.arange(padded[0] * padded[1], device=weights.device)
    y, x = (node // padded[1] - shift) % padded[0], (node % padded[1] - shift) % padded[1]
    across = padded[1] // cell[1]
    window, slot = y // cell[0] * across + x // cell[1], y % cell[0] * cell[1] + x % cell[1]
    src, dst = graph.edge_index
    dst = dst // size[1] * padded[1] + dst % size[1]
    slots = cell[0] * cell[1]
    matrix = weights.new_zeros(len(weights), len(node) // slots, slots, slots, weights.shape[-1])
    matrix[:, window[dst], slot[dst], slot[src]] = weights
    return matrix.movedim(-1, 2)
