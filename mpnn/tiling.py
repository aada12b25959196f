"""Tiles: which blocks of (destinations, sources) hold edges, and which hold nothing else; from runs, in O(runs).

Block-sparse kernels walk these lists. Nothing here looks at pairs: a run says by its two ends which tiles it enters and
which it covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpnn.runs import Ints, Runs


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles that hold edges, by rows of tiles: row t has the tiles `ptr[t]:ptr[t+1]`, each in its `column`
    of `across`.

    `full` bool: every pair of the tile is an edge. `low`, `high`: edges lie in these columns of the tile only.
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
    def of(runs: Runs, rows: int, columns: int) -> Tiles:
        """Tiles of `rows` destinations by `columns` sources; those at the end may reach beyond the graph, and a tile
        that reaches beyond the sources is never full."""
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
        low[Runs.of(down, across, [(row, first + 1, last)]).holds(at, column)] = 0
        high[Runs.of(down, across, [(row, first, last - 1)]).holds(at, column)] = columns
        return Tiles(
            rows, columns, across, np.append(0, np.cumsum(touched.degree())), column, _within(here, *covered), low, high
        )

    def transposed(self) -> tuple[Ints, Ints, Ints]:
        """The same tiles by columns of tiles: pointers, the row of each, which it is."""
        order = np.argsort(self.column, kind="stable")
        row = np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))
        ptr = np.append(0, np.cumsum(np.bincount(self.column, minlength=self.across)))
        return ptr, row[order], order

    @property
    def area(self) -> int:
        """How many pairs the tiles span, columns without edges left out."""
        return int((self.high - self.low).sum()) * self.rows


def _covered(row: Ints, first: Ints, last: Ints, across: int, height: Ints) -> tuple[Ints, Ints]:
    """Where the intervals of tiles of all `height[row]` destinations of a row of tiles lie upon one another."""
    real = first < last
    base = row[real] * (across + 1)
    at = np.concatenate([base + first[real], base + last[real]])
    step = np.repeat([1, -1], len(base))
    order = np.argsort(at, kind="stable")
    at, deep = at[order], np.cumsum(step[order])
    whole = (deep[:-1] == height[at[:-1] // (across + 1)]) & (at[1:] > at[:-1])
    return at[:-1][whole], at[1:][whole]


def _within(x: Ints, start: Ints, stop: Ints) -> NDArray[np.bool_]:
    """Which of `x` lie in one of the sorted, disjoint intervals."""
    if len(start) == 0:
        return np.zeros(len(x), bool)
    which = np.searchsorted(start, x, side="right") - 1
    return (which >= 0) & (x < stop[np.maximum(which, 0)])
