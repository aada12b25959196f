"""The block mask of a graph, computed from runs in O(runs).

Block-sparse kernels iterate over the blocks of (destinations, sources) that hold edges. The ends of a run determine
which blocks it overlaps and which it covers, so no single pair is visited.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpnn.graph.runs import Ints, Runs


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The blocks that hold edges, sorted by row of blocks: row t has the blocks `ptr[t]:ptr[t+1]`.

    `column` is the column of each block, out of `across` columns. `full` is True if every pair of the block is an edge.
    All edges of a block are in its columns `low` to `high`.
    """

    across: int
    ptr: Ints
    column: Ints
    full: NDArray[np.bool_]
    low: Ints
    high: Ints

    @staticmethod
    def of(runs: Runs, rows: int, columns: int) -> "BlockMask":
        """Blocks of `rows` destinations by `columns` sources. The last blocks may be smaller."""
        return BlockMask.on(runs, grid(np.array([0, runs.num_dst]), rows), grid(np.array([0, runs.num_src]), columns))

    @staticmethod
    def on(runs: Runs, dst: Ints, src: Ints) -> "BlockMask":
        """Blocks between the destinations `dst[t]:dst[t+1]` and the sources `src[u]:src[u+1]`."""
        height, width = np.diff(dst), np.diff(src)
        down, across = len(height), len(width)
        row = np.searchsorted(dst, runs.row, side="right") - 1
        first = np.searchsorted(src, runs.start, side="right") - 1
        last = np.searchsorted(src, runs.stop, side="left")
        touched = Runs.of(down, across, [(row, first, last)])
        at, column = touched.edges()
        here = at * (across + 1) + column

        begun = src[first] < runs.start
        unended = runs.stop < src[last]
        covered = _covered(row, first + begun, last - unended, across, height)
        low = width[column]
        high = np.zeros(len(here), np.int64)
        np.minimum.at(low, np.searchsorted(here, row * (across + 1) + first), runs.start - src[first])
        np.maximum.at(high, np.searchsorted(here, row * (across + 1) + last - 1), runs.stop - src[last - 1])
        low[Runs.of(down, across, [(row, first + 1, last)]).contains(at, column)] = 0
        inner = Runs.of(down, across, [(row, first, last - 1)]).contains(at, column)
        high[inner] = width[column[inner]]
        ptr = np.append(0, np.cumsum(touched.degree()))
        return BlockMask(across, ptr, column, _within(here, *covered), low, high)

    def transposed(self) -> tuple[Ints, Ints, Ints]:
        """The same blocks sorted by column of blocks: pointers, the row of each block, the index of each tile."""
        order = np.argsort(self.column, kind="stable")
        row = np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))
        ptr = np.append(0, np.cumsum(np.bincount(self.column, minlength=self.across)))
        return ptr, row[order], order


def grid(bounds: Ints, size: int) -> Ints:
    """Where blocks begin, and the last one's end: every `size` nodes from each of the `bounds` on, which are
    nodes, ascending, from the first to the end of the last."""
    count = -(-np.diff(bounds) // size)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.append(np.repeat(bounds[:-1], count) + number * size, bounds[-1])


def boundaries(runs: Runs) -> tuple[Ints, Ints]:
    """The destinations and the sources at which the parts of a graph begin that have no edges to one another, and the
    numbers of both: lengths of documents, where the graph has them. A row without edges belongs to the part before."""
    begins, ends = runs.ptr[:-1], runs.ptr[1:]
    row = np.flatnonzero(begins < ends)
    reached = np.maximum.accumulate(runs.stop[ends[row] - 1])
    needed = np.minimum.accumulate(runs.start[begins[row]][::-1])[::-1]
    is_first = np.append(True, reached[:-1] <= needed[1:])[: len(row)]
    dst = np.concatenate([[0], row[is_first], [runs.num_dst]])
    src = np.concatenate([[0], needed[is_first], [runs.num_src]])
    return np.unique(dst), np.unique(src)


def _covered(row: Ints, first: Ints, last: Ints, across: int, height: Ints) -> tuple[Ints, Ints]:
    """The intervals of blocks that all `height[row]` destinations of a row of blocks cover."""
    nonempty = first < last
    base = row[nonempty] * (across + 1)
    at = np.concatenate([base + first[nonempty], base + last[nonempty]])
    step = np.repeat([1, -1], len(base))
    order = np.argsort(at, kind="stable")
    at = at[order]
    depth = np.cumsum(step[order])
    full = (depth[:-1] == height[at[:-1] // (across + 1)]) & (at[1:] > at[:-1])
    return at[:-1][full], at[1:][full]


def _within(x: Ints, start: Ints, stop: Ints) -> NDArray[np.bool_]:
    """Whether each `x` is in one of the sorted, disjoint intervals."""
    if len(start) == 0:
        return np.zeros(len(x), bool)
    which = np.searchsorted(start, x, side="right") - 1
    return (which >= 0) & (x < stop[np.maximum(which, 0)])


def count_blocks(runs: Runs, rows: int, columns: int) -> tuple[int, int]:
    """The number of blocks that hold edges, and of pairs in them, without the columns outside `low` to `high` and
    without a list of the blocks. Time is O(runs). Memory does not depend on the number of blocks.
    """
    blocks = 0
    width = 0
    for group in runs.grouped(rows):
        counts = _count(group.ptr, group.start, group.stop, columns)
        blocks = blocks + int(counts[0].sum())
        width = width + int(counts[1].sum())
    return blocks, width * rows


def _count(ptr: Ints, start: Ints, stop: Ints, columns: int) -> tuple[Ints, Ints]:
    """For runs that are the unions of a row of blocks each: the number of blocks of each row, and their columns `low`
    to `high`."""
    first = start // columns
    last = (stop - 1) // columns
    shared = np.zeros(len(start), np.int64)
    shared[:-1] = np.maximum(last[:-1] - first[1:] + 1, 0)
    shared[ptr[1:][np.diff(ptr) > 0] - 1] = 0  # the last run of a row has no next one
    gap = np.append(start[1:], 0) - stop
    blocks = _sums(ptr, last - first + 1 - shared)
    return blocks, _sums(ptr, stop - start + np.where(shared > 0, gap, 0))


def _sums(ptr: Ints, x: NDArray[Any]) -> Ints:
    """The sum of each row's numbers."""
    total = np.append(0, np.cumsum(x))
    return total[ptr[1:]] - total[ptr[:-1]]


def density(runs: Runs, rows: int, columns: int) -> NDArray[np.float64]:
    """The share of pairs that are edges in each of `rows` x `columns` tiles of a graph, [rows, columns].

    O(runs + tiles). In a row of tiles, the number of destinations that receive from source j is a step function of j:
    +1 at the start of each run, -1 at its stop. A step contributes to the rest of its tile and to all later tiles.
    """
    edges = _bounds(runs.num_src, columns)
    height = np.diff(_bounds(runs.num_dst, rows))
    width = np.diff(edges)
    tile_row = runs.row * rows // max(runs.num_dst, 1)
    partial, full = (np.zeros(rows * (columns + 1)) for _ in range(2))
    for ends, sign in ((runs.start, 1.0), (runs.stop, -1.0)):
        tile = np.searchsorted(edges, ends, side="right") - 1
        cell = tile_row * (columns + 1) + tile
        size = len(partial)
        partial += sign * np.bincount(cell, edges[np.minimum(tile + 1, columns)] - ends, minlength=size)
        full += sign * np.bincount(cell, minlength=size)
    partial, full = (x.reshape(rows, columns + 1)[:, :columns] for x in (partial, full))
    before = np.cumsum(full, axis=1) - full
    return (partial + before * width) / np.maximum(height[:, None] * width, 1)


def _bounds(n: int, parts: int) -> Ints:
    """The boundaries of the parts of 0..n, such that i is in part `i * parts // n`."""
    return -(-np.arange(parts + 1) * n // max(parts, 1))
