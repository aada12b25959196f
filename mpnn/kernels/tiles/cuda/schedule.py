"""The tiles of a graph of runs, and the order in which programs visit them.

A graph is cut into tiles of `rows` destinations by `columns` sources. Tiles without edges are not listed. A full tile
needs no mask. A partial one refers to a pattern, one bit per pair, and equal patterns are stored once: a window has a
handful of them at any length. Kernels test the bit of a pair, so rows may have any number of runs, and one compiled
program serves all graphs and lengths.

A program takes a unit: some tiles of one row of tiles, the full ones first. A row of many tiles is divided into several
units, so that a global node delays no other row. Each of its units writes a part, and a second kernel joins the parts
in their order. Gradients of keys and values visit the same tiles, column by column; those of a table by offset visit
them diagonal by diagonal.

    for each row of tiles:                    a row, a column or a diagonal
        for each unit of the row:             one program for each head of each batch entry
            for each tile of the unit:        `number`: full tiles `first:middle`, partial tiles `middle:last`

Called by `attention`. Time is O(runs + tiles), with numpy, once for each graph.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.kernels.cuda.launch import Launches

Runs = Any  # `mpnn.graph.runs.Runs`: kernels do not import graphs
Ints = NDArray[np.int64]
WORD = 32  # bits
_LEAST = 16  # tiles of a unit
_PROGRAMS = 512  # programs that fill a GPU
_PAIRS_AT_ONCE = 1 << 20  # (run, partial tile) pairs whose bits are set at a time


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles that hold edges, sorted by row and column; `row` and `column` [tiles] count tiles.

    A partial tile t has the pattern `words[pattern[t]]`, of `words` int32 [patterns, columns / 32, rows]: bit j % 32 of
    word j // 32 of row i is set if the pair (i, j) of the tile is an edge. `pattern` is -1 for full tiles. A tile that
    exceeds the graph is never full.
    """

    rows: int
    columns: int
    row: Ints
    column: Ints
    pattern: Ints
    words: NDArray[np.int32]

    @staticmethod
    def of(runs: Runs, rows: int, columns: int) -> "Tiles":
        """Tiles of `rows` by `columns`, powers of two; `columns` is at least 32."""
        across = -(-runs.num_src // columns)
        shift = columns.bit_length() - 1
        row_of_run = runs.row
        line = (row_of_run >> rows.bit_length() - 1) * (across + 1)  # of tiles, one row of tiles after the other
        first = line + (runs.start >> shift)
        last = line + (runs.stop + columns - 1 >> shift)
        here = _union(first, last)
        inside = line + (runs.start + columns - 1 >> shift), line + (runs.stop >> shift)
        some = inside[0] < inside[1]
        opened, closed = (np.sort(x[some]) for x in inside)
        depth = np.searchsorted(opened, here, side="right") - np.searchsorted(closed, here, side="right")
        row, column = np.divmod(here, across + 1)
        is_partial = depth < rows
        before = np.append(0, np.cumsum(is_partial))
        partial_of_run = before[np.searchsorted(here, first)], before[np.searchsorted(here, last)]
        pattern = np.full(len(here), -1)
        pattern[is_partial], words = _patterns(
            runs, row_of_run, row[is_partial], column[is_partial], partial_of_run, rows, columns
        )
        return Tiles(rows, columns, row, column, pattern, words)


def _union(start: Ints, stop: Ints) -> Ints:
    """All numbers that are in some of the intervals, ascending."""
    start, stop = np.sort(start), np.sort(stop)
    begins = np.ones(len(start), bool)
    begins[1:] = start[1:] > stop[:-1]
    return _expand(start[begins], stop[np.roll(begins, -1)])


def _expand(start: Ints, stop: Ints) -> Ints:
    """The integers of all intervals, one interval after the other."""
    length = stop - start
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(int(length.sum()))


def _patterns(
    runs: Runs, row_of_run: Ints, row: Ints, column: Ints, of_run: tuple[Ints, Ints], rows: int, columns: int
) -> tuple[Ints, NDArray[np.int32]]:
    """The number of each partial tile's pattern, and the distinct patterns.

    row, column [partial tiles]: sorted. of_run: the first and last + 1 partial tile of each run.
    """
    factors = np.random.default_rng(0).integers(1, 2**63, columns // WORD * rows, np.uint64) | np.uint64(1)
    words = [np.zeros((0, columns // WORD, rows), np.uint32)]
    hashes = [np.zeros(0, np.uint64)]
    numbers = [np.zeros(0, np.int64)]
    distinct = 0
    down = -(-runs.num_dst // rows)
    step = max(1, down * _PAIRS_AT_ONCE // max(len(row) * rows, 1))
    for top in range(0, down, step):
        rows_now = runs.ptr[[top * rows, min((top + step) * rows, runs.num_dst)]]
        tiles_now = np.searchsorted(row, [top, top + step])
        chunk = slice(*rows_now)
        left = column[slice(*tiles_now)] * columns
        first, last = (x[chunk] - tiles_now[0] for x in of_run)
        some = _words(row_of_run[chunk], runs.start[chunk], runs.stop[chunk], first, last, left, rows, columns)
        number, which = _distinct(some, hashed := (some.reshape(len(some), len(factors)) * factors).sum(1))
        words.append(some[which])
        hashes.append(hashed[which])
        numbers.append(number + distinct)
        distinct += len(which)
    all_words = np.concatenate(words)
    number, which = _distinct(all_words, np.concatenate(hashes))
    return number[np.concatenate(numbers)], all_words[which].view(np.int32)


def _distinct(words: NDArray[np.uint32], hashes: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """The number of each pattern among the distinct ones, and which these are."""
    _, which, number = np.unique(hashes, return_index=True, return_inverse=True)
    if (words[which][number] != words).any():  # two patterns share a hash, so that all are kept
        which = number = np.arange(len(words))
    return number, which


def _words(
    row: Ints, start: Ints, stop: Ints, first: Ints, last: Ints, left: Ints, rows: int, columns: int
) -> NDArray[np.uint32]:
    """The patterns [tiles, columns / 32, rows] of partial tiles that begin at the sources `left` [tiles], from runs:
    their row, start, stop, and first and last + 1 partial tile."""
    tile = _expand(first, last)
    run = np.repeat(np.arange(len(row)), last - first)
    begin = left[tile]
    low, high = (np.clip(x[run] - begin, 0, columns) for x in (start, stop))
    place = tile * rows + (row & (rows - 1))[run]
    words = np.empty((len(left), columns // WORD, rows), np.uint32)
    for w in range(columns // WORD):
        ones = (1 << np.clip(np.arange(columns + 1) - WORD * w, 0, WORD)) - 1  # of a run from the first source
        # Runs of a row are disjoint, so that sums of their bits are unions. A float64 holds them exactly.
        bits = np.bincount(place, ones[high] - ones[low], len(left) * rows)
        words[:, w] = bits.astype(np.uint32).reshape(len(left), rows)
    return words


class Schedule(NamedTuple):
    """The visits of one launch, on its device; int32.

    `units` [units, 8]: the row; the first, middle and last visit; the slot of the unit's part, -1 if the unit is the
    whole row; the place along the row of the first and of the middle visit, and the pattern of the middle one, which
    are here too so that a program can load their features at once. Rows are rows of tiles, columns of tiles, or
    diagonals. `row`, `column`, `pattern` and `number` [visits + 1] describe the visited tile; one more than there are,
    because kernels read one ahead. `divided` [divided rows, 3]: a row, and its first and last + 1 slot.
    """

    units: Tensor
    row: Tensor
    column: Tensor
    pattern: Tensor
    number: Tensor
    divided: Tensor
    slots: int


def _schedule(
    tiles: Tiles, group: Ints, along: Ints, groups: int, limit: int, device: Any, divide_all: bool = False
) -> Schedule:
    """Visits of the tiles group by group, at most about `limit` a unit. `group`, `along` [tiles]: the row of each visit
    and its place in the row. `divide_all`: every unit has a slot."""
    is_partial = tiles.pattern >= 0
    order = np.argsort(2 * group + is_partial, kind="stable")
    count = np.bincount(group, minlength=groups)
    ptr = np.append(0, np.cumsum(count))
    pieces = np.maximum(-(-count // limit), 1)
    row = np.repeat(np.arange(groups), pieces)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = ptr[row] + rank * count[row] // pieces[row]
    last = ptr[row] + (rank + 1) * count[row] // pieces[row]
    full = np.append(0, np.cumsum(~is_partial[order]))
    middle = first + full[last] - full[first]
    is_divided = pieces > 1 if not divide_all else np.ones(groups, bool)
    slot = np.where(is_divided[row], np.cumsum(is_divided[row]) - 1, -1)
    after = np.cumsum(pieces * is_divided)
    divided = np.stack([np.arange(groups), after - pieces, after], 1)[is_divided]
    # Long units come first, so that none is left at the end.
    visits = [np.append(x[order], 0) for x in (tiles.row, tiles.column, tiles.pattern, np.arange(len(order)))]
    place = np.append(along[order], 0)
    units = np.stack([row, first, middle, last, slot, place[first], place[middle], visits[2][middle]], 1)
    units = units[np.argsort(first - last, kind="stable")]
    return Schedule(*_to_device([units, *visits, divided], device), slots=int(slot.max(initial=-1)) + 1)


def _to_device(arrays: list[NDArray[Any]], device: Any) -> list[Tensor]:
    """The arrays as int32, in one copy; each begins at a multiple of 16 bytes."""
    starts = np.cumsum([0, *(-(-x.size // 4) * 4 for x in arrays)])
    packed = np.zeros(int(starts[-1]), np.int32)
    for x, start in zip(arrays, starts[:-1], strict=True):
        packed[start : start + x.size] = x.ravel()
    on_device = torch.from_numpy(packed).to(device)
    return [on_device[a : a + x.size].view(x.shape) for x, a in zip(arrays, starts[:-1].tolist(), strict=True)]


@dataclass(eq=False)
class TileGraph:
    """A graph as kernels of tiles of one size visit it; schedules are made when they are first used."""

    runs: Runs
    rows: int
    columns: int
    device: Any
    _made: dict[Any, Any] = field(default_factory=dict)

    @property
    def tiles(self) -> Tiles:
        return self._once("tiles", lambda: Tiles.of(self.runs, self.rows, self.columns))

    @property
    def words(self) -> Tensor:
        """`Tiles.words` on the device."""
        return self._once("words", lambda: _to_device([self.tiles.words], self.device)[0])

    def by_row(self, copies: int) -> Schedule:
        """For this many heads times batch entries, of queries."""
        return self._visits(copies, 1, self.tiles.row, self.tiles.column, -(-self.runs.num_dst // self.rows))

    def by_column(self, copies: int, heads: int = 1) -> Schedule:
        """For this many heads times batch entries, of keys; for each of them, tiles are visited `heads` times."""
        return self._visits(copies, heads, self.tiles.column, self.tiles.row, -(-self.runs.num_src // self.columns))

    def by_diagonal(self, copies: int) -> "Diagonals":
        """For this many heads."""
        limit = _limit(len(self.tiles.row), 1, copies, 1)
        return self._once(("by diagonal", limit), lambda: Diagonals.of(self, limit))

    def _visits(self, copies: int, heads: int, group: Ints, along: Ints, groups: int) -> Schedule:
        limit = _limit(len(group), groups, copies, heads)
        make = lambda: _schedule(self.tiles, group, along, groups, limit, self.device)  # noqa: E731
        return self._once((group is self.tiles.row, limit), make)

    @property
    def edges_before(self) -> Tensor:
        """The number of edges before the first source of each word, in the order of rows: int64 [tiles, columns / 32,
        rows]. An edge is that number plus the number of lower bits of its word."""
        return self._once("edges before", lambda: torch.from_numpy(self._count_before()).to(self.device))

    def _count_before(self) -> Ints:
        runs = self.runs
        tiles = self.tiles
        width = self.runs.num_src + 1
        start = runs.row * width + runs.start
        length = runs.stop - runs.start
        before = np.append(0, np.cumsum(length))
        shape = len(tiles.row), self.columns // WORD, self.rows
        counts = np.zeros(shape, np.int64)
        step = max(1, _PAIRS_AT_ONCE // (shape[1] * shape[2]))
        for at in range(0, shape[0], step):
            top, left = (x[at : at + step, None, None] for x in (tiles.row, tiles.column))
            i = np.minimum(top * self.rows + np.arange(self.rows), runs.num_dst - 1)
            j = np.minimum(left * self.columns + np.arange(shape[1])[:, None] * WORD, runs.num_src)
            place = i * width + j
            run = np.searchsorted(start, place, side="right") - 1
            begun = np.minimum(place - start[run], length[run])  # of the run that begins last before the place
            counts[at : at + step] = np.where(run >= 0, before[run] + begun, 0)
        return counts

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class TileGraphs:
    """A graph as kernels of tiles of all sizes visit it."""

    def __init__(self, runs: Runs, device: Any) -> None:
        self.launches = Launches()
        self._runs = runs
        self._device = device
        self._by_size: dict[tuple[int, int], TileGraph] = {}

    def of(self, rows: int, columns: int) -> TileGraph:
        """With tiles of `rows` by `columns`."""
        if (rows, columns) not in self._by_size:
            self._by_size[rows, columns] = TileGraph(self._runs, rows, columns, self._device)
        return self._by_size[rows, columns]


class Diagonals(NamedTuple):
    """The tiles by the offset i - j of their first pair. All tiles of a diagonal have the same offsets.

    `first` int32 [slots]: the index of the first pair of each slot's tiles in the table by i - j + num_src - 1.
    `ranges` int32 [blocks, 2]: the first and last + 1 slot that hold offsets of each block of `OFFSETS` of the table.
    """

    schedule: Schedule
    first: Tensor
    ranges: Tensor

    @staticmethod
    def of(graph: TileGraph, limit: int) -> "Diagonals":
        tiles = graph.tiles
        runs = graph.runs
        offset, group = np.unique(tiles.row * tiles.rows - tiles.column * tiles.columns, return_inverse=True)
        schedule = _schedule(tiles, group, tiles.column, len(offset), limit, graph.device, divide_all=True)
        pieces = np.maximum(-(-np.bincount(group, minlength=len(offset)) // limit), 1)
        first = np.repeat(offset + runs.num_src - 1, pieces)
        begin = np.arange(0, runs.num_dst + runs.num_src - 1, OFFSETS)
        low = np.searchsorted(first, begin - tiles.rows, side="right")
        high = np.searchsorted(first, begin + OFFSETS + tiles.columns - 1, side="left")
        return Diagonals(schedule, *_to_device([first, np.stack([low, high], 1)], graph.device))


OFFSETS = 64  # of the table that one program sums


def _limit(tiles: int, groups: int, copies: int, heads: int) -> int:
    """The most tiles of a unit: so many that programs fill a GPU, and at most twice the average of a group. It is a
    power of two, so that schedules for other batches are the same."""
    fair = min(-(-2 * tiles // max(groups, 1)), -(-tiles * copies // _PROGRAMS))
    return max(1, _LEAST // heads, 1 << max(fair - 1, 0).bit_length())
