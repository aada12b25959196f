"""Strips of rows: a structured graph of any size, in memory that depends on its shape and not on its nodes.

A strip is a range of consecutive rows with the same number of runs, in which each end of a run stays where it is or
moves by one source per row. A complete or causal graph is one strip, a window three. The runs of a strip's first and
last row describe all of its rows. Counts are closed formulas, and set algebra costs O(runs of strips); rows of runs
(`mpnn.graph.runs`) are written out when a kernel reads them.

The algebra is that of runs, applied to whole strips. It compares ends of runs, as in `S[k] > T[k-1]`. The difference
of two ends changes by -1, 0 or 1 per row, so a comparison with the same outcome in the first and in the last row has
this outcome in all rows between. A strip in which some outcome changes is cut at the row where it does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mpnn.graph import capacity
from mpnn.graph.runs import RUNS_AT_ONCE, Ints, Runs, check_same_size, distinct, expand, require_room

MAX_BYTES = 2 << 30  # of strips while they are made: a graph that needs more is not small in this form
_RUN_BYTES = 320  # of a run of sources, while strips are cut, sorted and joined; measured
_PERIODS = 4  # periods of a strip from which `split` takes them together


@dataclass(frozen=True, eq=False)
class Strips:
    """Strip k holds the rows `rows[k]:rows[k+1]`, at least one. Its runs begin as row k of `first` and end as row k of
    `last`: run r of `first` becomes run r of `last`."""

    rows: Ints
    first: Runs
    last: Runs

    @staticmethod
    def of(rows: Ints, first: Runs, last: Runs) -> "Strips":
        """Strips between the boundaries `rows`, from the runs of the first and the last row of each.

        Raises:
            ValueError: if a strip's rows differ in their number of runs, or an end moves by anything but 0 or 1 a row.
        """
        if not np.array_equal(first.ptr, last.ptr):
            k = int((np.diff(first.ptr) != np.diff(last.ptr)).argmax())
            raise ValueError(
                f"row {rows[k]} has {first.ptr[k + 1] - first.ptr[k]} runs and row {rows[k + 1] - 1} has "
                f"{last.ptr[k + 1] - last.ptr[k]}; rows of one strip must have as many: add a break between them"
            )
        strips = Strips(rows, first, last)
        _check_moves(strips._intervals())
        return strips

    @staticmethod
    def of_runs(runs: Runs) -> "Strips":
        """The strips that neighboring rows form, in O(runs)."""
        ends = np.stack([runs.start, runs.stop])
        return _strips(runs.num_src, _joined(_Intervals(np.arange(runs.num_dst + 1), runs.row, ends, ends)))

    @staticmethod
    def union(num_src: int, rows: Ints, strip: Ints, first: Ints, last: Ints) -> "Strips":
        """The union of intervals of sources, as they are in the first and in the last row of their strip.

        Args:
            rows: the boundaries of the strips, [S + 1].
            strip: the strip of each interval, [R].
            first, last: start and stop of each interval, [2, R]. Intervals may overlap, be empty or exceed the range.

        Raises:
            ValueError: if an end moves by anything but 0 or 1 per row.
        """
        parts = _Intervals(rows, strip, first, last)
        _check_moves(parts)
        ends = tuple(zip(parts.first, parts.last, strict=True))
        parts = parts.cut(*(parts.change(a - bound, b - bound) for a, b in ends for bound in (0, num_src)))
        parts = _Intervals(parts.rows, parts.strip, *(np.clip(x, 0, num_src) for x in (parts.first, parts.last)))
        parts = parts.cut(parts.change(parts.first[1] - parts.first[0], parts.last[1] - parts.last[0]))
        parts = parts.select(parts.first[0] < parts.first[1])
        return _merged(num_src, parts, overlaps=False)

    @property
    def num_dst(self) -> int:
        return int(self.rows[-1])

    @property
    def num_src(self) -> int:
        return self.first.num_src

    @property
    def height(self) -> Ints:
        """The number of rows of each strip, [S]."""
        return np.diff(self.rows)

    @property
    def num_runs(self) -> int:
        """The number of runs of all rows."""
        return int((self.height * np.diff(self.first.ptr)).sum())

    @property
    def most_runs(self) -> int:
        """The largest number of runs of a row."""
        return int(np.diff(self.first.ptr).max(initial=0))

    @cached_property
    def num_edges(self) -> int:
        height = np.repeat(self.height, np.diff(self.first.ptr))
        ends = (self.first.stop - self.first.start) + (self.last.stop - self.last.start)
        return int(np.where(height % 2, ends // 2 * height, height // 2 * ends).sum())  # a series; ends is even if odd

    def degree_range(self) -> tuple[int, int]:
        """The least and the largest in-degree; degrees change evenly within a strip."""
        degrees = np.append(self.first.degree(), self.last.degree())
        return int(degrees.min(initial=degrees[:1].sum())), int(degrees.max(initial=0))

    @cached_property
    def is_complete(self) -> bool:
        return self._is_one_run_from_zero(self.num_src, self.num_src)

    @cached_property
    def is_causal(self) -> bool:
        """Whether row i receives from exactly the sources 0..i."""
        return self._is_one_run_from_zero(*(np.minimum(row + 1, self.num_src) for row in self._ends()))

    @cached_property
    def cliques(self) -> tuple[Ints, Ints] | None:
        """The cliques of consecutive nodes that make up the graph, as the size and the number of equal ones in a row;
        None if the graph is not made up of them."""
        if self.num_dst != self.num_src or not self._has_one_run_per_row():
            return None
        (top, bottom), (first, last) = self._ends(), (self.first, self.last)
        alone = (first.start == top) & (last.start == bottom) & (last.stop == bottom + 1) & (first.stop == top + 1)
        whole = (first.start == top) & (last.start == top) & (first.stop == bottom + 1) & (last.stop == bottom + 1)
        if not (alone | whole).all():
            return None
        return np.where(alone, 1, self.height), np.where(alone, self.height, 1)

    @cached_property
    def documents(self) -> Ints | None:
        """The lengths of the documents, if each row has as sources the rows of its document up to itself, as in
        `causal() & documents(lengths)`; None if the graph is another."""
        if self.num_dst != self.num_src or not self._has_one_run_per_row():
            return None
        (top, bottom), (first, last) = self._ends(), (self.first, self.last)
        alone = (first.start == top) & (last.start == bottom)
        if not ((first.stop == top + 1) & (last.stop == bottom + 1) & (alone | (first.start == last.start))).all():
            return None
        count = np.where(alone, self.height, 1)
        which = np.repeat(np.arange(len(count)), count)
        below = np.arange(len(which)) - (np.cumsum(count) - count)[which]
        row = top[which] + below
        start = first.start[which] + below
        begins = row == start
        if not (begins[1:] | (start[1:] == start[:-1])).all():
            return None
        return np.diff(row[begins], append=self.num_dst)

    def _ends(self) -> tuple[Ints, Ints]:
        """The first and the last row of each strip."""
        return self.rows[:-1], self.rows[1:] - 1

    def _is_one_run_from_zero(self, first: Ints | int, last: Ints | int) -> bool:
        """Whether rows receive from their first sources, these many in the first and the last row of each strip."""
        ends = ((self.first, first), (self.last, last))
        return self._has_one_run_per_row() and all(
            bool((runs.start == 0).all() and (runs.stop == stop).all()) for runs, stop in ends
        )

    def _has_one_run_per_row(self) -> bool:
        return bool((np.diff(self.first.ptr) == 1).all())

    def runs(self) -> Runs:
        """All rows as runs, in O(runs of rows)."""
        require_room(self.num_dst, self.num_src, self.num_runs)
        ptr = np.zeros(self.num_dst + 1, np.int64)
        np.cumsum(np.repeat(np.diff(self.first.ptr), self.height), out=ptr[1:])
        start, stop = np.empty(ptr[-1], np.int64), np.empty(ptr[-1], np.int64)
        ends = ((self.first.start, self.last.start, start), (self.first.stop, self.last.stop, stop))
        cuts = distinct(np.searchsorted(ptr, np.arange(0, ptr[-1], RUNS_AT_ONCE)), np.array([self.num_dst]))
        for top, bottom in pairwise(cuts.tolist()):
            row = np.arange(top, bottom)
            strip = np.searchsorted(self.rows, row, side="right") - 1
            begin, end = self.first.ptr[strip], self.first.ptr[strip + 1]
            which = expand(begin, end)
            below = np.repeat(row - self.rows[strip], end - begin)
            for first, last, out in ends:
                out[ptr[top] : ptr[bottom]] = first[which] + below * (last > first)[which]
        return Runs(self.num_dst, self.num_src, ptr, start, stop)

    def between(self, start: int, stop: int) -> "Strips":
        """The rows `start` to `stop`."""
        a = np.searchsorted(self.rows, start, side="right") - 1
        b = np.searchsorted(self.rows, stop)
        b = max(a, b)
        inside = slice(self.first.ptr[a], self.first.ptr[b])
        ptr = self.first.ptr[a : b + 1]
        ends = (np.stack([runs.start[inside], runs.stop[inside]]) for runs in (self.first, self.last))
        parts = _Intervals(self.rows[a : b + 1], np.repeat(np.arange(b - a), np.diff(ptr)), *ends)
        parts = parts.cut(np.array([start, stop]))
        first, last = np.searchsorted(parts.rows, [start, stop])
        rows = parts.rows[first : last + 1] - start
        parts = parts.select((parts.strip >= first) & (parts.strip < last))
        return _strips(self.num_src, _Intervals(rows, parts.strip - first, parts.first, parts.last))

    def parts(self, period: int) -> "Iterator[Strips]":
        """The same rows in parts that begin at a multiple of `period` and have some of the runs each."""
        runs = np.arange(0, self.first.num_runs, RUNS_AT_ONCE)
        begins = self.rows[np.searchsorted(self.first.ptr, runs, side="right") - 1] // period * period
        for start, stop in pairwise(distinct(begins, np.array([0, self.num_dst])).tolist()):
            yield self.between(start, stop)

    def split(self, period: int) -> "tuple[Strips, Strips]":
        """The rows of long strips in whole periods, counted from row 0, and the other rows, both renumbered."""
        begin = -(-self.rows[:-1] // period) * period
        end = self.rows[1:] // period * period
        long = end - begin >= _PERIODS * period
        parts = self._intervals().cut(begin[long], end[long])
        inside = np.zeros(len(parts.rows) - 1, bool)
        inside[np.searchsorted(parts.rows, begin[long])] = True
        return _strips(self.num_src, parts.close_up(inside)), _strips(self.num_src, parts.close_up(~inside))

    def grouped(self, size: int) -> Iterator[Runs]:
        """The union of every `size` rows as one row, for some of these groups at a time."""
        step = size * max(1, RUNS_AT_ONCE // max(self.most_runs, 1))
        for start in range(0, self.num_dst, step):
            part = self.between(start, min(start + step, self.num_dst))
            pieces = part._intervals().cut(np.arange(0, part.num_dst, size))
            group = pieces.rows[pieces.strip] // size
            yield Runs.of(-(-part.num_dst // size), self.num_src, [(group, pieces.first[0], pieces.last[1])])

    def complement(self) -> "Strips":
        ptr = self.first.ptr
        bound = self.num_src
        ends = [
            np.stack([np.insert(runs.stop, ptr[:-1], 0), np.insert(runs.start, ptr[1:], bound)])
            for runs in (self.first, self.last)
        ]
        strip = np.repeat(np.arange(len(self.height)), np.diff(ptr) + 1)
        return Strips.union(bound, self.rows, strip, ends[0], ends[1])

    def __or__(self, other: "Strips") -> "Strips":
        return _merged(self.num_src, self._with(other), overlaps=False)

    def __and__(self, other: "Strips") -> "Strips":
        return _merged(self.num_src, self._with(other), overlaps=True)

    def __sub__(self, other: "Strips") -> "Strips":
        return self & other.complement()

    def _with(self, other: "Strips") -> "_Intervals":
        """The intervals of both graphs, in strips that are cut at the boundaries of both."""
        check_same_size(self, other)
        one, two = self._intervals().cut(other.rows), other._intervals().cut(self.rows)
        return _Intervals(
            one.rows,
            np.concatenate([one.strip, two.strip]),
            np.concatenate([one.first, two.first], 1),
            np.concatenate([one.last, two.last], 1),
        )

    def _intervals(self) -> "_Intervals":
        ends = (np.stack([runs.start, runs.stop]) for runs in (self.first, self.last))
        return _Intervals(self.rows, self.first.row, *ends)


@dataclass(frozen=True, eq=False)
class _Intervals:
    """Intervals of sources in strips of rows, in any order; the arguments of `Strips.union`."""

    rows: Ints
    strip: Ints
    first: Ints
    last: Ints

    def select(self, which: NDArray[np.bool_] | Ints) -> "_Intervals":
        return _Intervals(self.rows, self.strip[which], self.first[:, which], self.last[:, which])

    def close_up(self, strips: NDArray[np.bool_]) -> "_Intervals":
        """Only these strips, with rows renumbered."""
        rows = np.append(0, np.cumsum(np.diff(self.rows)[strips]))
        inside = strips[self.strip]
        number = np.cumsum(strips) - 1
        return _Intervals(rows, number[self.strip[inside]], self.first[:, inside], self.last[:, inside])

    def change(self, first: Ints, last: Ints) -> Ints:
        """The rows at which numbers begin or cease to be positive, from their values in the first and in the last row
        of each interval's strip. They change by -1, 0 or 1 per row."""
        return _change(self.rows[self.strip], first, last)

    def cut(self, *at: Ints) -> "_Intervals":
        """The same intervals in strips that are also cut at these rows, sorted by strip."""
        rows = distinct(self.rows, *at)
        if len(rows) == len(self.rows):
            return self
        begin = np.searchsorted(rows, self.rows)
        count = np.diff(begin)[self.strip]
        total = int(count.sum())
        require_strips(len(rows) - 1, total)
        which = np.repeat(np.arange(len(self.strip)), count)
        strip = expand(begin[self.strip], begin[self.strip] + count)
        order = np.argsort(strip, kind="stable")
        which = which[order]
        strip = strip[order]
        begins = self.first[:, which]
        moves = (self.last > self.first)[:, which]
        top = self.rows[self.strip[which]]
        first, last = (np.where(moves, begins + (row - top), begins) for row in (rows[strip], rows[strip + 1] - 1))
        return _Intervals(rows, strip, first, last)


def require_strips(count: int, runs: int) -> None:
    """Raises MemoryError if so many strips, with so many runs, would need more than `MAX_BYTES` or than is available.

    Everything that makes strips asks this first.
    """
    what = f"a graph of {count:,} strips of rows with {runs:,} or more runs of sources"
    advice = "use fewer nodes, or a topology with fewer runs per row"
    capacity.require(_RUN_BYTES * runs, what, advice, MAX_BYTES)


def _check_moves(parts: _Intervals) -> None:
    """Raises ValueError unless each end stays where it is, or moves by one source per row."""
    moved = parts.last - parts.first
    height = np.diff(parts.rows)[parts.strip] - 1
    wrong = ((moved != 0) & (moved != height)).any(0)
    if wrong.any():
        which = int(wrong.argmax())
        first = parts.rows[parts.strip[which]]
        last = parts.rows[parts.strip[which] + 1] - 1
        raise ValueError(
            f"the run {parts.first[:, which].tolist()} of row {first} becomes {parts.last[:, which].tolist()} in row "
            f"{last}, but its ends must stay or grow by one per row; add a break between these rows"
        )


def _change(row: Ints, first: Ints, last: Ints) -> Ints:
    changes = (first > 0) != (last > 0)
    row = row[changes]
    first = first[changes]
    return row + np.where(first > 0, first, 1 - first)


def _merged(num_src: int, parts: _Intervals, overlaps: bool) -> Strips:
    """The union of the intervals, none of which is empty; or, if `overlaps`, what two lists of disjoint intervals have
    in common. See `mpnn.graph.runs` for the comparisons."""
    while True:
        strip = np.sort(parts.strip, kind="stable")
        inside = strip[1:] == strip[:-1]
        top = parts.rows[strip[1:]]
        starts, stops = (_sorted(parts, num_src, end) for end in (0, 1))
        ahead = [start[1:] - stop[:-1] for start, stop in zip(starts, stops, strict=True)]  # in the first, last row
        if overlaps:
            ahead = [-distance for distance in ahead]
        tests = ([x[:-1] - x[1:] for x in starts], [x[:-1] - x[1:] for x in stops], ahead)
        at = [_change(top[inside], first[inside], last[inside]) for first, last in tests]
        if not any(map(len, at)):
            break
        parts = parts.cut(*at)
    holds = inside & (ahead[0] > 0)
    if overlaps:
        begins = np.insert(holds, 0, False)
        ends = np.append(holds, False)
    else:
        begins = np.insert(~inside | holds, 0, True)
        ends = np.append(~inside | holds, True)
    # there may be no interval
    begins = begins[: len(strip)]
    ends = ends[: len(strip)]
    first, last = (np.stack([start[begins], stop[ends]]) for start, stop in zip(starts, stops, strict=True))
    return _strips(num_src, _joined(_Intervals(parts.rows, strip[begins], first, last)))


def _sorted(parts: _Intervals, num_src: int, end: int) -> tuple[Ints, Ints]:
    """The starts or the stops, sorted by strip and by their values in the first row, and their values in the last."""
    order = np.argsort(parts.strip * (num_src + 1) + parts.first[end], kind="stable")
    return parts.first[end][order], parts.last[end][order]


def _joined(parts: _Intervals) -> _Intervals:
    """Joins neighboring strips, cut where an outcome changed without consequence. Intervals are sorted."""
    height = np.diff(parts.rows)
    count = np.bincount(parts.strip, minlength=len(parts.rows) - 1)
    ptr = np.append(0, np.cumsum(count))
    joins = count[1:] == count[:-1]
    if not joins.any():
        return parts
    upper = expand(ptr[:-2][joins], ptr[1:-1][joins])
    lower = upper + np.repeat(count[:-1][joins], count[:-1][joins])
    boundary = np.repeat(np.flatnonzero(joins), count[:-1][joins])
    step = parts.first[:, lower] - parts.last[:, upper]
    moves = parts.last > parts.first
    one_row = height[parts.strip] == 1
    fits = (step == 0) | (step == 1)
    fits &= one_row[upper] | (moves[:, upper] == step)
    fits &= one_row[lower] | (moves[:, lower] == step)
    joins[boundary[~fits.all(0)]] = False
    # A strip of one row joins both neighbors only if its ends move alike on both sides.
    before = np.full((2, len(parts.strip)), -1)
    before[:, lower] = np.where(joins[boundary], step, -1)
    turns = (before[:, upper] >= 0) & (before[:, upper] != step) & one_row[upper]
    joins[boundary[turns.any(0)]] = False
    keep = np.append(True, ~joins)  # strips that begin a joined strip
    number = np.cumsum(keep) - 1
    begins = keep[parts.strip]
    ends = np.append(~joins, True)[parts.strip]
    rows = parts.rows[np.append(keep, True)]
    return _Intervals(rows, number[parts.strip[begins]], parts.first[:, begins], parts.last[:, ends])


def _strips(num_src: int, parts: _Intervals) -> Strips:
    """Strips of intervals that are sorted and disjoint."""
    count = len(parts.rows) - 1
    ptr = np.searchsorted(parts.strip, np.arange(count + 1)).astype(np.int64, copy=False)
    first, last = (Runs(count, num_src, ptr, ends[0], ends[1]) for ends in (parts.first, parts.last))
    return Strips(parts.rows, first, last)
