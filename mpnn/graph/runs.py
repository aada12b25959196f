"""Rows of runs: the physical form of every structured graph.

The in-neighbors of each destination are stored as sorted, disjoint half-open runs `[start, stop)`. A complete, causal
or window graph needs one run per row where an edge list needs up to N entries, so set algebra, degrees, block masks
and transposition cost O(runs), not O(edges).

All algorithms here use one representation. The rows are concatenated to a single line, with one unused column after
each row, and a graph is a sorted list of intervals on this line. Sort all starts and all stops of a set of intervals
into `S` and `T`. Before `S[k]`, exactly k intervals have started, so `T[k-1] < S[k]` means that all of them have ended
(a gap in the union). For two lists of disjoint intervals, `S[k] < T[k-1]` means that two are open (the intersection).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mpnn.graph import capacity

Ints = NDArray[np.int64]

_RUNS_AT_ONCE = 1 << 16  # runs that are processed at a time where there may be very many
_UNCHECKED = 1 << 23  # number of runs below which available memory is not checked


@dataclass(frozen=True, eq=False)
class Runs:
    """Sorted, disjoint, non-touching runs of sources for each of `num_dst` rows.

    `ptr` [num_dst + 1] delimits the runs of each row in `start` and `stop` [num_runs]; all int64. The result of a set
    operation holds its intervals on the line until one of these arrays is read: operations that follow need no rows.
    """

    num_dst: int
    num_src: int
    ptr: Ints
    start: Ints
    stop: Ints

    @classmethod
    def on_line(cls, num_dst: int, num_src: int, start: Ints, stop: Ints) -> "Runs":
        """The runs of sorted, disjoint intervals on the line."""
        runs = object.__new__(cls)
        runs.__dict__.update(num_dst=num_dst, num_src=num_src, _line=(start, stop))
        return runs

    def make_rows(self) -> None:
        """Makes the rows now, and not when they are first read."""
        _ = self.start

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__
        line = known.get("_line")
        if name in ("ptr", "start", "stop") and line is not None:
            known.update(_rows(self.num_dst, self.num_src, *line))
            known.pop("_line", None)
        if name not in known:  # another thread may have made the rows
            raise AttributeError(name)
        return known[name]

    def __getstate__(self) -> dict[str, Any]:
        """Sizes and tensors, so that `torch.load(weights_only=True)` works."""
        arrays = {name: torch.tensor(getattr(self, name)) for name in ("ptr", "start", "stop")}
        return {"num_dst": self.num_dst, "num_src": self.num_src, **arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Validates the runs, because kernels do not check indices.

        Raises:
            ValueError: if the runs are not sorted, disjoint and within the sizes.
        """
        try:
            arrays = {name: np.array(state[name].cpu().numpy()) for name in ("ptr", "start", "stop")}
            self.__dict__.update(arrays, num_dst=state["num_dst"], num_src=state["num_src"])
            valid = self._is_valid()
        except (KeyError, AttributeError, TypeError, ValueError, IndexError):
            valid = False
        if not valid:
            raise ValueError("a pickle holds a graph whose runs are damaged; save the graph again")

    def _is_valid(self) -> bool:
        ptr = self.ptr
        start = self.start
        stop = self.stop
        if not all(type(n) is int and n >= 0 for n in self._size()):
            return False
        if not all(array.ndim == 1 and array.dtype == np.int64 for array in (ptr, start, stop)):
            return False
        check_line(self.num_dst, self.num_src)
        if not len(start) == len(stop) == ptr[-1] or len(ptr) != self.num_dst + 1:
            return False
        ascends = ptr[0] == 0 and (np.diff(ptr) >= 0).all()
        if not ascends or not ((start >= 0) & (start < stop) & (stop <= self.num_src)).all():
            return False
        start, stop = self._flat()
        return bool((start[1:] > stop[:-1]).all())

    @staticmethod
    def of(num_dst: int, num_src: int, intervals: Iterable[tuple[ArrayLike, ArrayLike, ArrayLike]]) -> "Runs":
        """The union of intervals `(row, start, stop)` of integers that broadcast.

        Intervals may be in any order, overlap, be empty or exceed the range; they are clipped, sorted and merged.
        """
        check_line(num_dst, num_src)
        starts = [np.zeros(0, np.int64)]
        stops = [np.zeros(0, np.int64)]
        count = 0
        checked = _UNCHECKED
        for interval in intervals:
            row, start, stop = (np.asarray(part, np.int64) for part in interval)
            start = np.maximum(start, 0)
            stop = np.minimum(stop, num_src)
            base = row * (num_src + 1)
            # Sums broadcast last: one number for all rows takes no memory before.
            first, last, is_filled = np.broadcast_arrays(base + start, base + stop, start < stop)
            is_whole = bool(is_filled.all())
            starts.append(first.ravel() if is_whole else first[is_filled])
            stops.append(last.ravel() if is_whole else last[is_filled])
            count += len(starts[-1])
            if count > checked:  # builders yield any number of intervals
                checked = 2 * count
                require_room(num_dst, num_src, count)
        return _union(num_dst, num_src, _sort(np.concatenate(starts)), _sort(np.concatenate(stops)))

    @staticmethod
    def from_edges(num_dst: int, num_src: int, dst: Ints, src: Ints) -> "Runs":
        """The runs that cover exactly these edges; repeated edges count once."""
        return Runs.of(num_dst, num_src, [(dst, src, src + 1)])

    @staticmethod
    def from_dense(allowed: NDArray[np.bool_]) -> "Runs":
        """The runs of True in each row of a matrix, bool [num_dst, num_src]."""
        rows, columns = allowed.shape
        line = np.zeros(rows * (columns + 1) + 1, bool)  # a False before the first row, and after each
        line[1:].reshape(rows, columns + 1)[:, :-1] = allowed
        ends = np.flatnonzero(line[1:] != line[:-1])
        return Runs.on_line(rows, columns, ends[0::2], ends[1::2])

    @staticmethod
    def from_labels(labels: Ints) -> "Runs":
        """Disjoint cliques: every node receives from all nodes of its clique, as runs of consecutive nodes."""
        n = len(labels)
        _, clique = np.unique(labels, return_inverse=True)
        order = np.argsort(clique, kind="stable")
        begins = np.ones(n, bool)
        begins[1:] = (np.diff(order) != 1) | (np.diff(clique[order]) != 0)
        first = np.flatnonzero(begins)
        start = order[first]
        stop = start + np.diff(np.append(first, n))
        ptr = np.append(0, np.cumsum(np.bincount(clique[start], minlength=int(clique.max(initial=-1)) + 1)))
        return Runs(len(ptr) - 1, n, ptr, start, stop).take(clique)

    @staticmethod
    def stack(parts: "Sequence[Runs]") -> "Runs":
        """Disjoint union: rows and columns are numbered part by part."""
        column = np.cumsum([0] + [p.num_src for p in parts])
        first = np.cumsum([0] + [len(p.start) for p in parts])
        return Runs(
            sum(p.num_dst for p in parts),
            int(column[-1]),
            np.concatenate([[0]] + [p.ptr[1:] + f for p, f in zip(parts, first[:-1], strict=True)]),
            np.concatenate([p.start + c for p, c in zip(parts, column[:-1], strict=True)]),
            np.concatenate([p.stop + c for p, c in zip(parts, column[:-1], strict=True)]),
        )

    def take(self, rows: Ints) -> "Runs":
        """The runs of the given rows, in that order. Rows may repeat."""
        count = self.ptr[rows + 1] - self.ptr[rows]
        require_room(len(rows), self.num_src, int(count.sum()))
        which = expand(self.ptr[rows], self.ptr[rows + 1])
        ptr = np.append(0, np.cumsum(count))
        return Runs(len(rows), self.num_src, ptr, self.start[which], self.stop[which])

    @cached_property
    def num_edges(self) -> int:
        return int((self.stop - self.start).sum())

    @property
    def num_runs(self) -> int:
        return len(self.start)

    @property
    def most_runs(self) -> int:
        """The largest number of runs of a row."""
        return int(np.diff(self.ptr).max(initial=0))

    @property
    def has_one_run_each(self) -> bool:
        """Whether each row has one run."""
        return self.num_runs == self.num_dst and bool((np.diff(self.ptr) == 1).all())

    def grouped(self, size: int) -> "Iterator[Runs]":
        """The union of every `size` rows as one row, for some of these groups at a time."""
        step = size * max(1, self.num_dst * _RUNS_AT_ONCE // (max(self.num_runs, 1) * size))
        for first in range(0, self.num_dst, step):
            last = min(first + step, self.num_dst)
            ptr = self.ptr[first : last + 1]
            group = np.repeat(np.arange(last - first) // size, np.diff(ptr))
            inside = slice(ptr[0], ptr[-1])
            yield Runs.of(-(-(last - first) // size), self.num_src, [(group, self.start[inside], self.stop[inside])])

    @property
    def row(self) -> Ints:
        """The row of each run, [num_runs]."""
        return np.repeat(np.arange(self.num_dst), np.diff(self.ptr))

    def degree(self) -> Ints:
        """The in-degree of each row, [num_dst]."""
        total = np.concatenate([[0], np.cumsum(self.stop - self.start)])
        return total[self.ptr[1:]] - total[self.ptr[:-1]]

    def degree_range(self) -> tuple[int, int]:
        """The least and the largest in-degree; 0 without rows."""
        degrees = self.degree()
        return int(degrees.min(initial=degrees[:1].sum())), int(degrees.max(initial=0))

    def edges(self) -> tuple[Ints, Ints]:
        """Materializes all edges as (dst, src), row by row with ascending sources: O(edges)."""
        what = f"writing out {self.num_edges:,} pairs of a graph of {self.num_dst} x {self.num_src}"
        capacity.require(32 * self.num_edges, what, "use fewer nodes, or a topology with longer runs")
        return np.repeat(np.arange(self.num_dst), self.degree()), expand(self.start, self.stop)

    def contains(self, dst: Ints, src: Ints) -> NDArray[np.bool_]:
        """Whether each of these edges exists, bool with the shape of `dst`."""
        start, stop = self._flat()
        at = dst * (self.num_src + 1) + src
        before = np.searchsorted(start, at, side="right")
        return at < np.append(-1, stop)[before]

    def dense(self) -> NDArray[np.bool_]:
        """The adjacency matrix, bool [num_dst, num_src]."""
        step = np.zeros(self.num_dst * (self.num_src + 1), np.int8)
        start, stop = self._flat()
        step[start], step[stop] = 1, -1
        inside = np.cumsum(step, dtype=np.int8).reshape(self.num_dst, self.num_src + 1)
        return inside[:, :-1] > 0

    @staticmethod
    def full(num_dst: int, num_src: int) -> "Runs":
        """The complete graph: every row receives from every source."""
        return Runs.of(num_dst, num_src, [(np.arange(num_dst), 0, num_src)])

    def complement(self) -> "Runs":
        start, stop = self._flat()
        gap_start = np.insert(stop, 0, 0)
        gap_stop = np.append(start, self.num_dst * (self.num_src + 1))
        gap = gap_start < gap_stop
        row_start, row_stop = Runs.full(*self._size())._flat()
        return _intersect(*self._size(), _merge(gap_start[gap], row_start), _merge(gap_stop[gap], row_stop))

    def __or__(self, other: "Runs") -> "Runs":
        return _union(*self._size(), *self._merged(other))

    def __and__(self, other: "Runs") -> "Runs":
        return _intersect(*self._size(), *self._merged(other))

    def __sub__(self, other: "Runs") -> "Runs":
        return self & other.complement()

    def __xor__(self, other: "Runs") -> "Runs":
        return (self | other) - (self & other)

    def sources(self) -> "Runs":
        """One row with all sources that have at least one edge."""
        return _union(1, self.num_src, np.sort(self.start), np.sort(self.stop))

    def over_sources(self, sources: "Runs") -> "Runs":
        """The same rows with sources renumbered; `sources` is one row that contains all sources of this graph."""
        length = sources.stop - sources.start
        which = np.searchsorted(sources.start, self.start, side="right") - 1
        offset = (np.cumsum(length) - length - sources.start)[which]
        base = self.row * (sources.num_edges + 1) + offset
        return _union(self.num_dst, sources.num_edges, base + self.start, base + self.stop)

    def columns(self, sources: NDArray[np.int64]) -> "Runs":
        """The columns `sources`, ascending and distinct, renumbered. Sources that are kept side by side stay so."""
        kept = np.zeros(self.num_src + 1, np.int64)
        kept[sources + 1] = 1
        before = np.cumsum(kept)
        return Runs.of(self.num_dst, len(sources), [(self.row, before[self.start], before[self.stop])])

    def transpose(self) -> "Runs":
        """The same edges with rows and columns exchanged, in O(input runs + output runs).

        A run of a column begins or ends where two adjacent rows differ. The symmetric difference of the rows and the
        rows shifted down by one is therefore the set of ends of the transposed runs.
        """
        below = Runs(self.num_dst + 1, self.num_src, np.append(self.ptr, self.ptr[-1]), self.start, self.stop)
        above = Runs(self.num_dst + 1, self.num_src, np.insert(self.ptr, 0, 0), self.start, self.stop)
        row, column = (below ^ above).edges()
        order = np.argsort(column, kind="stable")
        row = row[order]
        column = column[order]
        ptr = np.concatenate([[0], np.cumsum(np.bincount(column[::2], minlength=self.num_src))])
        return Runs(self.num_src, self.num_dst, ptr, row[::2].copy(), row[1::2].copy())

    def same_as(self, other: "Runs") -> bool:
        return (
            self._size() == other._size()
            and np.array_equal(self.ptr, other.ptr)
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.stop, other.stop)
        )

    @cached_property
    def is_complete(self) -> bool:
        return self._is_prefix_of(np.full(self.num_dst, self.num_src))

    @cached_property
    def is_causal(self) -> bool:
        """Whether row i receives from exactly the sources 0..i."""
        return self._is_prefix_of(np.minimum(np.arange(self.num_dst) + 1, self.num_src))

    def edge_from_later(self) -> tuple[int, int] | None:
        """A row and a later source that it receives from; None if there is none, as in a causal graph."""
        late = (self.stop > self.row + 1).nonzero()[0]
        return (int(self.row[late[0]]), int(self.stop[late[0]]) - 1) if len(late) else None

    def _is_prefix_of(self, length: Ints) -> bool:
        """Whether row i receives from exactly its first `length[i]` > 0 sources."""
        return self.has_one_run_each and bool((self.start == 0).all() and (self.stop == length).all())

    def _size(self) -> tuple[int, int]:
        return self.num_dst, self.num_src

    def _flat(self) -> tuple[Ints, Ints]:
        line = self.__dict__.get("_line")
        if line is not None:
            return line[0], line[1]
        base = self.row * (self.num_src + 1)
        return base + self.start, base + self.stop

    def _merged(self, other: "Runs") -> tuple[Ints, Ints]:
        check_same_size(self, other)
        (s1, t1), (s2, t2) = self._flat(), other._flat()
        return _merge(s1, s2), _merge(t1, t2)


def in_steps(num_src: int, first: Ints, count: Ints, step: int, width: int, last: tuple[Ints, Ints]) -> Runs:
    """Rows of runs in equal steps: row r has `count[r]` runs of `width` sources, `step` apart from `first[r]` on, and
    after them the run `last[r]`, a start and a stop, unless it is empty. Runs of a row do not touch; those that exceed
    the sources are cut off. Raises MemoryError before anything is written if they do not fit into memory.
    """
    has_last = last[0] < np.minimum(last[1], num_src)
    require_room(len(count), num_src, int(count.sum() + has_last.sum()))
    ptr = np.append(0, np.cumsum(count + has_last))
    start = np.arange(ptr[-1])
    start -= np.repeat(ptr[:-1], np.diff(ptr))
    start *= step
    start += np.repeat(first, np.diff(ptr))
    at = ptr[1:][has_last] - 1
    stop = start + width
    start[at], stop[at] = last[0][has_last], last[1][has_last]
    return Runs(len(count), num_src, ptr, start, np.minimum(stop, num_src, out=stop))


def check_same_size(one: Any, other: Any) -> None:
    """Raises ValueError unless both have the same number of destinations and of sources."""
    if (one.num_dst, one.num_src) != (other.num_dst, other.num_src):
        raise ValueError(
            f"set algebra needs graphs of the same size; got {one.num_dst} x {one.num_src} and "
            f"{other.num_dst} x {other.num_src} (destinations x sources)"
        )


def check_line(num_dst: int, num_src: int) -> None:
    """Raises ValueError if positions on the line of concatenated rows exceed int64."""
    if num_dst * (num_src + 1) >= 2**63:
        raise ValueError(
            f"a graph of {num_dst} x {num_src} (destinations x sources) is too large: its pairs must number less than "
            "2**63"
        )


def require_room(num_dst: int, num_src: int, count: int) -> None:
    """Raises MemoryError if `count` runs, with the buffers for sorting them, do not fit into memory."""
    what = f"a graph of {num_dst} x {num_src} (destinations x sources) with {count:,} or more runs of sources"
    capacity.require(48 * count, what, "use fewer nodes, or a topology with fewer runs per row")


def expand(start: Ints, stop: Ints) -> Ints:
    """Concatenates the integers of all intervals: `[start[0], ..., stop[0]-1, start[1], ...]`."""
    length = stop - start
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(int(length.sum()))


def _sort(x: Ints) -> Ints:
    """Sorts in place and returns `x`."""
    x.sort(kind="stable")  # numpy's stable sort merges sorted runs in linear time
    return x


def _merge(a: Ints, b: Ints) -> Ints:
    return _sort(np.concatenate([a, b]))


def _union(num_dst: int, num_src: int, starts: Ints, stops: Ints) -> Runs:
    gaps = starts[1:] > stops[:-1]
    if gaps.all():
        return Runs.on_line(num_dst, num_src, starts, stops)
    # A merged interval ends before the next one begins; the last one ends last.
    return Runs.on_line(num_dst, num_src, starts[np.append(True, gaps)], stops[np.append(gaps, True)])


def _intersect(num_dst: int, num_src: int, starts: Ints, stops: Ints) -> Runs:
    both = starts[1:] < stops[:-1]
    return Runs.on_line(num_dst, num_src, starts[1:][both], stops[:-1][both])


def _rows(num_dst: int, num_src: int, start: Ints, stop: Ints) -> dict[str, Ints]:
    """The rows of intervals on the line, as fields of `Runs`."""
    row = start // (num_src + 1)
    ptr = np.zeros(num_dst + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=num_dst), out=ptr[1:])
    row *= num_src + 1  # now where the row begins
    return {"ptr": ptr, "start": start - row, "stop": stop - row}
