"""Topologies over images. Nodes are pixels or patches in row-major order: node = row * width + column.

Topologies from an image to a smaller one (`convolution` with a stride, `pooling`) have fewer destinations than sources.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpnn.graph.arguments import as_integer, at_least
from mpnn.graph.relations import GridOffset, Taps
from mpnn.graph.runs import Ints
from mpnn.graph.topology import Pairs, Topology


def grid(height: int, width: int, connectivity: int = 4) -> Topology:
    """The 4 side neighbors of each pixel, or with connectivity 8 the corner neighbors too, without self-loops.

    ::

        grid(2, 3)   .#.#..
                     #.#.#.
                     .#...#
                     #...#.
                     .#.#.#
                     ..#.#.
    """
    height, width = _size(height, width)
    if as_integer("connectivity", connectivity) not in (4, 8):
        raise ValueError(f"connectivity must be 4 (sides) or 8 (sides and corners); got {connectivity}")
    return Topology.of(_grid, height, width, int(connectivity), relation=GridOffset(width, 1, 1))


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
    """Each pixel receives from the pixels within `radius` rows and columns, itself included: a convolution's graph.

    The type of an edge is its relative position, `(dy + radius) * (2 * radius + 1) + (dx + radius)`.

    ::

        neighborhood(2, 3, 1)   ##.##.
                                ######
                                .##.##
                                ##.##.
                                ######
                                .##.##
    """
    (height, width), radius = _size(height, width), at_least("radius", radius, 0)
    return Topology.of(_neighborhood, height, width, radius, relation=GridOffset(width, radius, radius))


def _neighborhood(i: Ints, num_src: int, height: int, width: int, radius: int) -> Pairs:
    y, x = _pixels("neighborhood", i, num_src, height, width)
    reach = min(radius, height)
    return [
        pair for dy in range(-reach, reach + 1) for pair in _row_runs(y + dy, x - radius, x + radius, height, width)
    ]


def convolution(
    height: int,
    width: int,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Topology:
    """The graph of `torch.nn.Conv2d`: each output pixel receives from the pixels under the kernel.

    Sizes are one integer or two (vertical, horizontal); 1-D is an image of height 1. Destinations are the output
    pixels: `(height + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1` rows, and columns by the same formula.
    Padding adds no sources. The type of an edge is the index of its kernel weight in row-major order.

    ::

        convolution(1, 6, kernel=[1, 3], padding=[0, 1])   ##....
                                                           ###...
                                                           .###..
                                                           ..###.
                                                           ...###
                                                           ....##

        convolution(1, 6, kernel=[1, 2], stride=2).bind(3, 6)   ##....
                                                                ..##..
                                                                ....##
    """
    size, taps = _size(height, width), _pair("kernel", kernel, 1)
    step, pad, apart = _pair("stride", stride, 1), _pair("padding", padding, 0), _pair("dilation", dilation, 1)
    relation = Taps(size[1], convolved(*size, taps, step, pad, apart)[1], taps, step, pad, apart)
    return Topology.of(_convolution, *size, taps, step, pad, apart, relation=relation)


def _convolution(
    i: Ints,
    num_src: int,
    height: int,
    width: int,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Pairs:
    rows, columns = convolved(height, width, kernel, stride, padding, dilation)
    _check_nodes("convolution", i, num_src, (rows, columns), (height, width))
    y, x = i // columns * stride[0] - padding[0], i % columns * stride[1] - padding[1]
    down, across = (_taps(at, k, d, n) for at, k, d, n in zip((y, x), kernel, dilation, (height, width), strict=True))
    spans = [(0, kernel[1] - 1)] if dilation[1] == 1 else [(b * dilation[1],) * 2 for b in across]
    return [
        pair
        for a in down
        for first, last in spans
        for pair in _row_runs(y + a * dilation[0], x + first, x + last, height, width)
    ]


def _taps(at: Ints, kernel: int, dilation: int, length: int) -> range:
    """The kernel taps along one axis that overlap the image for any of the kernel offsets `at`."""
    first, last = int(at.min()), int(at.max())
    return range(max(0, -(last // dilation)), min(kernel, (length - 1 - first) // dilation + 1))


def convolved(
    height: int,
    width: int,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> tuple[int, int]:
    """The rows and columns of a convolution's output.

    Raises:
        ValueError: if the kernel does not fit into the image.
    """
    rows, columns = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip((height, width), kernel, stride, padding, dilation, strict=True)
    )
    if rows < 1 or columns < 1:
        raise ValueError(
            f"a kernel of {kernel[0]} x {kernel[1]} with dilation {list(dilation)} does not fit into "
            f"{height} x {width} pixels with padding {list(padding)}"
        )
    return rows, columns


def pooling(height: int, width: int, size: int | Sequence[int]) -> Topology:
    """Cuts an image of `height` x `width` into cells of `size` pixels (one integer or two: vertical, horizontal). Each
    cell is a destination that receives from its pixels.

    There are `ceil(height / size)` x `ceil(width / size)` destinations; the last cells may be smaller. The type of an
    edge is the index of the pixel in its cell, in row-major order. Patch embedding and patch merging use these graphs.

    ::

        pooling(3, 3, size=2).bind(4, 9)   ##.##....
                                           ..#..#...
                                           ......##.
                                           ........#
    """
    (height, width), cell = _size(height, width), _pair("size", size, 1)
    return Topology.of(_pooling, height, width, cell, relation=Taps(width, -(-width // cell[1]), cell, cell))


def _pooling(i: Ints, num_src: int, height: int, width: int, size: tuple[int, int]) -> Pairs:
    rows, columns = -(-height // size[0]), -(-width // size[1])
    _check_nodes("pooling", i, num_src, (rows, columns), (height, width))
    y, x = i // columns * size[0], i % columns * size[1]
    deep = min(size[0], height)
    return [pair for a in range(deep) for pair in _row_runs(y + a, x, x + size[1] - 1, height, width)]


def windows(height: int, width: int, size: int, shift: int = 0) -> Topology:
    """Swin's windows (Liu et al. 2021): i receives from j if both pixels are in the same size x size window after a
    cyclic shift by `shift`, unless only the wrap-around brings them together from opposite edges of the image.

    The type of an edge is its relative position, `(dy + size - 1) * (2 * size - 1) + (dx + size - 1)`.

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
    (height, width), size, shift = _size(height, width), at_least("size", size, 1), at_least("shift", shift, 0)
    return Topology.cliques(_windows, height, width, size, shift, relation=GridOffset(width, size - 1, size - 1))


def _windows(n: int, height: int, width: int, size: int, shift: int = 0) -> Ints:
    y, x = _pixels("windows", np.arange(n), n, height, width)
    across, down = _window_of(x, width, size, shift), _window_of(y, height, size, shift)
    return down * (int(across.max(initial=0)) + 1) + across


def _window_of(at: Ints, length: int, size: int, shift: int) -> Ints:
    """The window index along one axis. Pixels that the cyclic shift wraps around get separate windows."""
    shifted = at - shift % max(length, 1)
    return np.where(shifted < 0, (shifted + length) // size + -(-length // size), shifted // size)


def _row_runs(y: Ints, first: Ints, last: Ints, height: int, width: int) -> Pairs:
    """The pixels `first..last` of image row `y`, clipped to the image."""
    inside = (y >= 0) & (y < height)
    first, last = np.maximum(first, 0), np.minimum(last, width - 1)
    empty = ~inside | (first > last)
    return [(np.where(empty, 0, y * width + first), np.where(empty, 0, y * width + last + 1))]


def _pixels(name: str, i: Ints, num_src: int, height: int, width: int) -> tuple[Ints, Ints]:
    if not len(i) == num_src == height * width:
        raise ValueError(
            f"{name} of {height} x {width} pixels needs {height * width} nodes, but the graph is {len(i)} x "
            f"{num_src}; use bind({height * width}), or the height and width of the image"
        )
    return i // width, i % width


def _check_nodes(name: str, i: Ints, num_src: int, dst: tuple[int, int], src: tuple[int, int]) -> None:
    if (len(i), num_src) != (dst[0] * dst[1], src[0] * src[1]):
        raise ValueError(
            f"{name} of {src[0]} x {src[1]} pixels gives {dst[0]} x {dst[1]}, so it binds to {dst[0] * dst[1]} x "
            f"{src[0] * src[1]} nodes; the graph is {len(i)} x {num_src}"
        )


def _pair(name: str, size: int | Sequence[int], least: int) -> tuple[int, int]:
    """Validates one integer or two and returns a pair (vertical, horizontal)."""
    both: list[Any] = list(size) if isinstance(size, (list, tuple)) else [size, size]
    if len(both) != 2:
        raise ValueError(f"{name} must be one integer or two, vertical and horizontal; got {size!r}")
    return at_least(name, both[0], least), at_least(name, both[1], least)


def _size(height: int, width: int) -> tuple[int, int]:
    return at_least("height", height, 0), at_least("width", width, 1)
