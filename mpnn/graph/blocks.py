"""The block mask of a graph, computed from runs in O(runs).

Block-sparse kernels iterate over the blocks of (destinations, sources) that hold edges. The ends of a run determine
which blocks it overlaps and which it covers, so no single pair is visited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpnn.graph.runs import Ints, Runs


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The blocks that hold edges, sorted by row of blocks: row t has the blocks `ptr[t]:ptr[t+1]`.

    `column` is the column of each block, out of `across` columns. `full` is True if every pair of the block is an edge.
    All edges of a block are in its columns `low` to `high`.
    """

    rows: int
    columns: int
    across: int
    ptr: Ints
    column: Ints
    full: NDArray[np.bool_]
    low: Ints
    high: Ints

    @staticmethod
    def of(runs: Runs, rows: int, columns: int) -> BlockMask:
        """Blocks of `rows` destinations by `columns` sources.

        The last blocks may exceed the graph. A block that exceeds the sources is never full.
        """
        across, down = -(-runs.num_src // columns), -(-runs.num_dst // rows)
        row, first, last = runs.row // rows, runs.start // columns, -(-runs.stop // columns)
        touched = Runs.of(down, across, [(row, first, last)])
        at, column = touched.edges()
        here = at * (across + 1) + column

        height = np.minimum(rows, runs.num_dst - np.arange(down) * rows)
        covered = _covered(row, -(-runs.start // columns), runs.stop // columns, across, height)
        low, high = np.full(len(here), columns), np.zeros(len(here), np.int64)
        np.minimum.at(low, np.searchsorted(here, row * (across + 1) + first), runs.start - first * columns)
        np.maximum.at(high, np.searchsorted(here, row * (across + 1) + last - 1), runs.stop - (last - 1) * columns)
        low[Runs.of(down, across, [(row, first + 1, last)]).contains(at, column)] = 0
        high[Runs.of(down, across, [(row, first, last - 1)]).contains(at, column)] = columns
        return BlockMask(
            rows, columns, across, np.append(0, np.cumsum(touched.degree())), column, _within(here, *covered), low, high
        )

    def transposed(self) -> tuple[Ints, Ints, Ints]:
        """The same blocks sorted by column of blocks: pointers, the row of each block, the index of each tile."""
        order = np.argsort(self.column, kind="stable")
        row = np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))
        ptr = np.append(0, np.cumsum(np.bincount(self.column, minlength=self.across)))
        return ptr, row[order], order

    @property
    def area(self) -> int:
        """The number of pairs in all blocks, without the columns outside `low` to `high`."""
        return int((self.high - self.low).sum()) * self.rows


def _covered(row: Ints, first: Ints, last: Ints, across: int, height: Ints) -> tuple[Ints, Ints]:
    """The intervals of blocks that all `height[row]` destinations of a row of blocks cover."""
    nonempty = first < last
    base = row[nonempty] * (across + 1)
    at = np.concatenate([base + first[nonempty], base + last[nonempty]])
    step = np.repeat([1, -1], len(base))
    order = np.argsort(at, kind="stable")
    at, depth = at[order], np.cumsum(step[order])
    full = (depth[:-1] == height[at[:-1] // (across + 1)]) & (at[1:] > at[:-1])
    return at[:-1][full], at[1:][full]


def _within(x: Ints, start: Ints, stop: Ints) -> NDArray[np.bool_]:
    """Whether each `x` is in one of the sorted, disjoint intervals."""
    if len(start) == 0:
        return np.zeros(len(x), bool)
    which = np.searchsorted(start, x, side="right") - 1
    return (which >= 0) & (x < stop[np.maximum(which, 0)])
