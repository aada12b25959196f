"""The block mask of a graph, computed from runs in O(runs).

Block-sparse kernels iterate over the blocks of (destinations, sources) that hold edges. The ends of a run determine
which blocks it overlaps and which it covers, so no single pair is visited.
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpnn.graph.runs import Ints, Runs, expand
from mpnn.graph.strips import Strips


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


def grid(documents: Ints, size: int) -> Ints:
    """Where blocks begin, and the last one's end: every `size` nodes from the beginning of each document on.
    `documents`: where documents begin, and the last one's end."""
    count = -(-np.diff(documents) // size)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.append(np.repeat(documents[:-1], count) + number * size, documents[-1])


def documents(runs: Runs) -> tuple[Ints, Ints]:
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


def count_blocks(edges: Strips | Runs, rows: int, columns: int) -> tuple[int, int]:
    """The number of blocks that hold edges, and of pairs in them, without the columns outside `low` to `high` and
    without a list of the blocks.

    Time is O(runs), and for strips O(runs of strips). Memory does not depend on the number of blocks.
    """
    if isinstance(edges, Runs):
        blocks, width = _count_by_row(edges, rows, columns)
        return blocks, width * rows
    blocks = 0
    width = 0
    period = lcm(rows, columns)
    for part in edges.parts(period):
        periods, others = part.split(period)
        for counts in (_count_in_periods(periods, rows, columns), _count_by_row(others, rows, columns)):
            blocks = blocks + counts[0]
            width = width + counts[1]
    return blocks, width * rows


def _count_by_row(edges: Strips | Runs, rows: int, columns: int) -> tuple[int, int]:
    """Blocks and their columns `low` to `high`, one row of blocks after the other."""
    blocks = 0
    width = 0
    for group in edges.grouped(rows):
        counts = _count(group.ptr, group.start, group.stop, columns)
        blocks = blocks + int(counts[0].sum())
        width = width + int(counts[1].sum())
    return blocks, width


def _count_in_periods(strips: Strips, rows: int, columns: int) -> tuple[int, int]:
    """Blocks and their columns `low` to `high`, for strips of whole periods of lcm(rows, columns) rows.

    From one period to the next, an end of a run stays or moves by whole blocks. If two runs share as many blocks or
    none both in the first and in the last period, counts grow evenly from one to the other, and their sum is a series.
    Otherwise the periods are halved.
    """
    period = lcm(rows, columns)
    blocks = 0
    width = 0
    runs = strips.first
    final = strips.last
    moves = (final.start > runs.start).astype(np.int64), (final.stop > runs.stop).astype(np.int64)
    strip = np.arange(len(strips.height))
    first = np.zeros_like(strips.height)
    last = strips.height // period - 1
    while len(strip):
        count = np.diff(runs.ptr)[strip]
        ptr = np.append(0, np.cumsum(count))
        which = expand(runs.ptr[strip], runs.ptr[strip + 1])
        total, differ = np.zeros((2, len(strip)), np.int64), np.zeros(len(which), bool)
        for top in range(0, period, rows):
            shares = []
            for number in (first, last):
                row = np.repeat(number * period + top, count)
                start = runs.start[which] + moves[0][which] * row
                stop = runs.stop[which] + moves[1][which] * (row + rows - 1)
                *both, share = _count(ptr, start, stop, columns)
                total += both
                shares.append(share)
            differ |= shares[0] != shares[1]
        settled = _sums(ptr, differ) == 0
        series = (total * (last - first + 1) // 2)[:, settled].sum(1)
        blocks = blocks + int(series[0])
        width = width + int(series[1])
        middle = ((first + last) // 2)[~settled]
        strip = np.tile(strip[~settled], 2)
        first, last = np.append(first[~settled], middle + 1), np.append(middle, last[~settled])
    return blocks, width


def _count(ptr: Ints, start: Ints, stop: Ints, columns: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """For runs that are the unions of a row of blocks each, sorted, and overlapping at most as far as they are sorted:
    the number of blocks of each row, their columns `low` to `high`, and whether a run shares a block with the next."""
    first = start // columns
    last = (stop - 1) // columns
    shared = np.zeros(len(start), np.int64)
    shared[:-1] = np.maximum(last[:-1] - first[1:] + 1, 0)
    shared[ptr[1:][np.diff(ptr) > 0] - 1] = 0  # the last run of a row has no next one
    gap = np.append(start[1:], 0) - stop
    blocks = _sums(ptr, last - first + 1 - shared)
    return blocks, _sums(ptr, stop - start + np.where(shared > 0, gap, 0)), shared > 0


def _sums(ptr: Ints, x: NDArray[Any]) -> Ints:
    """The sum of each row's numbers."""
    total = np.append(0, np.cumsum(x))
    return total[ptr[1:]] - total[ptr[:-1]]
