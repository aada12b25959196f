"""Topologies over images. Nodes are pixels or patches in row-major order: node = row * width + column.

Topologies from an image to a smaller one (`convolution` with a stride, `pooling`) have fewer destinations than sources.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any

import numpy as np

from mpnn.graph import Graph
from mpnn.graph.arguments import as_integer, at_least
from mpnn.graph.relations import GridOffset, KernelOffset, Offset, Relation
from mpnn.graph.runs import Ints, Runs
from mpnn.graph.topology import Pairs, Topology


def grid(height: int, width: int, connectivity: int = 4) -> Topology:
    """Each pixel receives from its 4 side neighbors, with connectivity 8 from the corner neighbors too; no self-loops.

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
    shape = height, width
    _check_nodes("grid", len(i), num_src, shape, shape)
    y, x = _coordinates(i, shape)
    beside = 1 if connectivity == 8 else 0
    above, below = (_inside(at, 1, height) for at in (y - 1, y + 1))
    left, right = (_inside(at, 1, width) for at in (x - 1, x + 1))
    near = _inside(x - beside, 2 * beside + 1, width)
    pairs = [(above, near), (_inside(y, 1, height), left), (_inside(y, 1, height), right), (below, near)]
    return chain.from_iterable(_product(spans, shape, (1, 1)) for spans in pairs)


def neighborhood(
    *shape: int,
    radius: int | Sequence[int] | None = None,
    kernel_size: int | Sequence[int] | None = None,
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    border: str = "cut",
    causal: bool | Sequence[bool] = False,
    height: int | None = None,
    width: int | None = None,
) -> Topology:
    """Each node of a line, an image or a volume receives from its neighbors along each axis, itself included: a
    convolution's graph, or neighborhood attention's (Hassani et al. 2023, arXiv:2204.07143).

    Options are one value for all axes, or one for each. Nodes are numbered in row-major order. The last of `shape` is
    the radius if neither radius nor kernel_size is given: `neighborhood(height, width, 1)`.

    Args:
        shape: the size along each axis; any number of them. `height` and `width` are those of an image, by name.
        radius: neighbors on either side along an axis, a kernel of 2 * radius + 1.
        kernel_size: neighbors along an axis. For an even number, one more lies before the node than after it.
        dilation: the distance from neighbor to neighbor. Nodes of other remainders by it are not connected.
        stride: nodes in groups of this many share the neighbors of the one at their center, or of the last if causal.
        border: "cut": neighbors beyond the border are absent. "natten": the kernel is moved inward until it lies
            inside, so that each node has the same number of neighbors (NATTEN 0.21).
        causal: only neighbors at or before the node.

    The type of an edge of an image without dilation is its relative position, as in `GridOffset`: for a border that is
    cut, `(dy + radius) * (2 * radius + 1) + (dx + radius)`; that of a line is its `Offset`.

    ::

        neighborhood(2, 3, 1)   ##.##.
                                ######
                                .##.##
                                ##.##.
                                ######
                                .##.##

        neighborhood(5, kernel_size=3, border="natten")   ###..
                                                          ###..
                                                          .###.
                                                          ..###
                                                          ..###

    Raises:
        ValueError: a size is out of range; a stride exceeds its kernel; or, with border="natten", kernel_size *
            dilation exceeds a size. When bound: the number of nodes is not the product of the shape.
    """
    named = tuple(n for n in (height, width) if n is not None)
    shape = named + shape if len(named) == 2 else shape + named
    if radius is None and kernel_size is None and shape:
        *shape, radius = shape  # type: ignore[assignment]
    if radius is not None and kernel_size is not None:
        raise ValueError(f"pass radius or kernel_size, not both; got {radius!r} and {kernel_size!r}")
    sizes = tuple(at_least(f"shape[{k}]", n, 0 if k == 0 else 1) for k, n in enumerate(shape))
    if not sizes:
        raise ValueError("neighborhood needs the size along each axis, as neighborhood(height, width, radius=1)")
    axes = len(sizes)
    if kernel_size is None:
        kernels = tuple(2 * r + 1 for r in _each("radius", radius, 0, axes))
    else:
        kernels = _each("kernel_size", kernel_size, 1, axes)
    apart, steps = _each("dilation", dilation, 1, axes), _each("stride", stride, 1, axes)
    if border not in ("cut", "natten"):
        raise ValueError(f'border must be "cut" or "natten"; got {border!r}')
    masks: tuple[Any, ...] = tuple(causal) if isinstance(causal, (list, tuple)) else (causal,) * axes
    if len(masks) != axes or any(type(c) is not bool for c in masks):
        raise ValueError(f"causal must be a truth value, or one for each of {axes} axes; got {causal!r}")
    if any(s > k for s, k in zip(steps, kernels, strict=True)):
        raise ValueError(f"stride must not exceed the kernel; got {list(steps)} and kernels of {list(kernels)}")
    if border == "natten" and any(k * d > n for k, d, n in zip(kernels, apart, sizes, strict=True)):
        raise ValueError(
            f'with border="natten", kernel_size * dilation must not exceed the shape; got {list(kernels)} * '
            f"{list(apart)} for {list(sizes)}"
        )
    return _Neighborhood(sizes, kernels, apart, steps, border, masks)


@dataclass(frozen=True, repr=False)
class _Neighborhood(Topology):
    shape: tuple[int, ...]
    kernels: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    border: str
    causal: tuple[bool, ...]

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        _check_nodes("neighborhood", num_dst, num_src, self.shape, self.shape)
        nodes = num_dst
        at = _coordinates(np.arange(nodes), self.shape)
        axes: Iterable[Any] = zip(at, self.shape, self.kernels, self.dilation, self.stride, self.causal, strict=True)
        spans = [_neighbors(self.border == "natten", *axis) for axis in axes]
        row = np.arange(nodes)
        pairs = ((row, start, stop) for start, stop in _product(spans, self.shape, self.dilation))
        return Graph.from_runs(Runs.of(nodes, nodes, pairs), relation=self._relation())

    def _relation(self) -> Relation | None:
        """Relative positions along a line or in an image; None in more dimensions and between dilated neighbors."""
        if len(self.shape) > 2 or max(self.dilation) > 1:
            return None
        is_centered = self.border == "cut" and max(self.stride) == 1 and not any(self.causal)
        reach = [k // 2 if is_centered else k - 1 for k in self.kernels]
        return Offset(reach[0]) if len(reach) == 1 else GridOffset(self.shape[1], *reach)

    def __repr__(self) -> str:
        """A call that builds this; options at their defaults are left out."""
        options = [("dilation", self.dilation, 1), ("stride", self.stride, 1), ("causal", self.causal, False)]
        shown = [f"{name}={_briefly(values)!r}" for name, values, usual in options if set(values) != {usual}]
        shown += [] if self.border == "cut" else [f"border={self.border!r}"]
        kernel = _briefly(self.kernels)
        if len(self.shape) == 2 and not shown and isinstance(kernel, int) and kernel % 2:
            return f"neighborhood({self.shape[0]}, {self.shape[1]}, {kernel // 2})"
        return f"neighborhood({', '.join([*map(str, self.shape), f'kernel_size={kernel!r}', *shown])})"


def _briefly(values: tuple[Any, ...]) -> Any:
    """One value if all axes have it, or a list of them."""
    return values[0] if len(set(values)) == 1 else list(values)


def _coordinates(i: Ints, shape: tuple[int, ...]) -> tuple[Ints, ...]:
    """The coordinate of nodes along each axis."""
    coordinates = []
    for n in reversed(shape):
        coordinates.append(i % n)
        i = i // n
    return tuple(reversed(coordinates))


def _neighbors(
    moves_inward: bool, at: Ints, size: int, kernel: int, dilation: int, stride: int, causal: bool
) -> tuple[Ints, Ints]:
    """The first neighbor along an axis, and their number; they are `dilation` apart."""
    phase = at % dilation
    place = at // dilation
    count = (size - phase + dilation - 1) // dilation  # of the nodes of this remainder
    leader = np.minimum(place // stride * stride + (stride - 1 if causal else stride // 2), count - 1)
    first = leader - (kernel - 1 if causal else kernel // 2)
    if moves_inward and not causal:
        first = np.clip(first, 0, count - kernel)
    first, taps = _inside(first, place + 1 - first if causal else kernel, count)
    return first * dilation + phase, taps


def _inside(first: Ints, count: Ints | int, size: Ints | int, dilation: int = 1) -> tuple[Ints, Ints]:
    """Of `count` places along an axis, `dilation` apart from `first` on, the first from 0 to size - 1, and how many."""
    skipped = np.maximum(-(first // dilation), 0)
    stop = np.minimum(count, (size - 1 - first) // dilation + 1)
    return first + skipped * dilation, np.maximum(stop - skipped, 0)


def _product(spans: Sequence[tuple[Ints, Ints]], shape: tuple[int, ...], dilation: tuple[int, ...]) -> Pairs:
    """The runs of the nodes whose coordinate along each axis is one of a span."""
    *outer, (first, count) = spans
    width = 1 if dilation[-1] > 1 else None
    taps = [range(int(n.max(initial=0))) for _, n in (spans if width else outer)]
    for tap in product(*taps):
        row = np.zeros_like(first)
        present = np.ones(len(first), bool)
        for k, (begin, n) in enumerate(outer):
            row = row * shape[k] + begin + tap[k] * dilation[k]
            present &= tap[k] < n
        start = row * shape[-1] + first + (tap[-1] * dilation[-1] if width else 0)
        length = np.where(tap[-1] < count, 1, 0) if width else count
        yield start, start + np.where(present, length, 0)


def convolution(
    height: int,
    width: int,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Topology:
    """Returns the graph of `torch.nn.Conv2d`: each output pixel receives from the pixels under the kernel.

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
    size = _size(height, width)
    taps = _each("kernel", kernel, 1, 2)
    step, pad, apart = _each("stride", stride, 1, 2), _each("padding", padding, 0, 2), _each("dilation", dilation, 1, 2)
    relation = KernelOffset(size[1], convolved(*size, taps, step, pad, apart)[1], taps, step, pad, apart)
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
    shape = height, width
    out = convolved(height, width, kernel, stride, padding, dilation)
    _check_nodes("convolution", len(i), num_src, out, shape)
    axes = zip(_coordinates(i, out), shape, kernel, stride, padding, dilation, strict=True)
    return _product([_inside(at * s - p, k, n, d) for at, n, k, s, p, d in axes], shape, dilation)


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
    (height, width), cell = _size(height, width), _each("size", size, 1, 2)
    return Topology.of(_pooling, height, width, cell, relation=KernelOffset(width, -(-width // cell[1]), cell, cell))


def _pooling(i: Ints, num_src: int, height: int, width: int, size: tuple[int, int]) -> Pairs:
    shape = height, width
    cells = -(-height // size[0]), -(-width // size[1])
    _check_nodes("pooling", len(i), num_src, cells, shape)
    axes = zip(_coordinates(i, cells), size, shape, strict=True)
    return _product([_inside(at * k, k, n) for at, k, n in axes], shape, (1, 1))


def windows(height: int, width: int, size: int, shift: int = 0) -> Topology:
    """i receives from j if both pixels are in the same size x size window of Swin (Liu et al. 2021) after a cyclic
    shift by `shift`, unless the shift brought them together from opposite edges of the image.

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
    _check_nodes("windows", n, n, (height, width), (height, width))
    y, x = _coordinates(np.arange(n), (height, width))
    across, down = _window_of(x, width, size, shift), _window_of(y, height, size, shift)
    return down * (int(across.max(initial=0)) + 1) + across


def _window_of(at: Ints, length: int, size: int, shift: int) -> Ints:
    """The window index along one axis. Pixels that the cyclic shift wraps around get separate windows."""
    shifted = at - shift % max(length, 1)
    return np.where(shifted < 0, (shifted + length) // size + -(-length // size), shifted // size)


def _check_nodes(name: str, num_dst: int, num_src: int, dst: tuple[int, ...], src: tuple[int, ...]) -> None:
    """Raises ValueError unless there is a destination for each node of one shape, and a source for each of another."""
    if (num_dst, num_src) == (prod(dst), prod(src)):
        return
    pixels = f"{name} of {' x '.join(map(str, src))} pixels"
    if dst == src:
        raise ValueError(
            f"{pixels} needs {prod(src)} nodes, but the graph is {num_dst} x {num_src}; use bind({prod(src)}), or the "
            "height and width, or the shape, of the nodes"
        )
    raise ValueError(
        f"{pixels} gives {' x '.join(map(str, dst))}, so it binds to {prod(dst)} x {prod(src)} nodes; the graph is "
        f"{num_dst} x {num_src}"
    )


def _each(name: str, size: Any, least: int, axes: int) -> Any:
    """Validates one integer, or one for each axis, and returns one for each axis."""
    values = list(size) if isinstance(size, (list, tuple)) else [size] * axes
    if len(values) != axes:
        raise ValueError(f"{name} must be one integer, or one for each of {axes} axes; got {size!r}")
    return tuple(at_least(name, value, least) for value in values)


def _size(height: int, width: int) -> tuple[int, int]:
    return at_least("height", height, 0), at_least("width", width, 1)
