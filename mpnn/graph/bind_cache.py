"""The LRU cache of graphs that layers bind or derive, shared by all layers and steps: limited in number and in bytes.

A bound graph is small, but layers cache derived values on it: edge lists, sorted copies, copies on other devices. The
cache counts all of them, and evicts the least recently used graphs when the total exceeds `limit`.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor, nn

from mpnn.graph import Graph, csr
from mpnn.graph.arguments import at_least
from mpnn.graph.bound import BoundGraph
from mpnn.graph.modes import outside_modes

P = ParamSpec("P")

_MAX_GRAPHS = 256  # graphs
_OBJECT = 4096  # bytes of a graph without any array, roughly
_SURVEY = 8  # values cached for each graph, after which all graphs are measured: to look at one takes 20 us
_LEAST = 8  # graphs, for as many of which values are cached before that, if there are fewer
_SMALL = 1 << 14  # edges of a list, up to which it waits for this
_ATOMS = (str, bytes, int, float, type(None), type, torch.dtype, torch.device, ModuleType, nn.Module)


@dataclass(eq=False)
class _Entry:
    graph: Graph
    nbytes: int = 0
    stamp: int = field(default=-1)


class BindCache:
    """An LRU cache of graphs, keyed by the function and arguments that build them.

    `limit` is the number of bytes of all graphs and the values cached on them, on all devices. The most recently used
    graph is never evicted. Eviction only drops the cache's reference.
    """

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._newest: _Entry | None = None
        self._limit = limit
        self._derived = csr.DERIVATIONS[0]
        self._surveyed = 0
        self._sum = 0
        """Bytes of all entries as they were last measured. A graph under two keys counts twice."""
        self._lock = RLock()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        with self._lock:
            self._limit = at_least("limit", nbytes, 0)
            self._measure(list(self._entries.values()))
            self._evict()

    @property
    def nbytes(self) -> int:
        """Bytes of the cached graphs and the values cached on them, measured now."""
        with self._lock:
            self._measure(list(self._entries.values()))
            return self._total()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Removes all graphs."""
        with self._lock:
            self._entries.clear()
            self._newest = None
            self._sum = 0

    def keep(self, key: Hashable, build: Callable[[], Graph]) -> Graph:
        """Returns `build()`, and the same graph as long as it is cached under this key.

        Concurrent threads may build it twice, but all receive the same graph.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                before = self._newest
                if entry is not before:  # hashing an expression takes as long as the rest of this function
                    self._newest = entry
                    self._entries.move_to_end(key)
                if csr.DERIVATIONS[0] != self._derived:
                    self._account(before, entry)
                return entry.graph
        graph = outside_modes(build)
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(graph))
            before = self._newest
            self._newest = entry
            self._entries.move_to_end(key)
            self._account(before, entry)
            return entry.graph

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Removes the graphs whose keys are unwanted. The garbage collector may call this during any other method."""
        with self._lock:
            for key in [key for key in list(self._entries) if unwanted(key)]:
                entry = self._entries.pop(key, None)
                self._sum -= 0 if entry is None else entry.nbytes
                if entry is self._newest:
                    self._newest = None

    def _account(self, *entries: _Entry | None) -> None:
        """Measures those of the entries that have changed, or all once many values were cached, and evicts.

        The cache does not know which graph has changed. Between two lookups it is most likely the last one looked up,
        so this entry and the current one are passed. To measure one takes as long as a convolution over a batch of
        molecules, which is often gone before the next call.
        """
        self._derived = csr.DERIVATIONS[0]
        if self._derived - self._surveyed >= _SURVEY * max(len(self._entries), _LEAST):
            self._surveyed = self._derived
            self._measure(list(self._entries.values()))
            # An entry may be dropped while it is measured, by the garbage collector.
            self._sum = sum(entry.nbytes for entry in list(self._entries.values()))
        else:
            self._measure(entry for entry in entries if entry is not None and not _is_small(entry.graph))
        self._evict()

    def _measure(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            stamp = _stamp(entry.graph)
            if stamp != entry.stamp:
                before = entry.nbytes
                entry.stamp = stamp
                entry.nbytes = _OBJECT + bytes_of(entry.graph)
                self._sum += entry.nbytes - before

    def _evict(self) -> None:
        while len(self._entries) > 1 and (len(self._entries) > _MAX_GRAPHS or self._is_full()):
            _, entry = self._entries.popitem(last=False)
            self._sum -= entry.nbytes

    def _is_full(self) -> bool:
        return self._sum > self._limit and self._total() > self._limit

    def _total(self) -> int:
        return sum({id(entry.graph): entry.nbytes for entry in list(self._entries.values())}.values())

    def unlock(self) -> None:
        """Replaces the lock: in a forked process, the thread that holds it does not exist."""
        self._lock = RLock()


def _is_small(graph: BoundGraph) -> bool:
    """Whether a graph is a list of few edges."""
    return isinstance(graph, Graph) and graph.is_explicit and graph.stored_edges.shape[1] <= _SMALL


def cached_graph(build: Callable[P, Graph]) -> Callable[P, Graph]:
    """Decorates a function of hashable arguments to keep its graphs in the cache."""

    @wraps(build)
    def cached(*arguments: P.args, **_: P.kwargs) -> Graph:
        return CACHE.keep((build, arguments), partial(build, *arguments))

    return cached


def bytes_of(root: Any) -> int:
    """Bytes of all arrays and tensors reachable from an object. Shared memory counts once."""
    seen: set[int] = set()
    todo = [root]
    total = 0
    while todo:
        x = todo.pop()
        if isinstance(x, _ATOMS) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            total += _storage_bytes(x, seen)
            todo += vars(x).values()
        elif isinstance(x, np.ndarray):
            if isinstance(x.base, (np.ndarray, Tensor)):
                todo.append(x.base)
            else:
                total += x.nbytes
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, (list, tuple, set, frozenset)):
            todo += x
        elif isinstance(x, FunctionType):
            todo += _closure(x)
        else:
            todo += getattr(x, "__dict__", {}).values()
    return total


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _storage_bytes(x: Tensor, seen: set[int]) -> int:
    if (parts := _PARTS.get(x.layout)) is not None:
        return sum(_storage_bytes(getattr(x, part)(), seen) for part in parts)
    if x.is_meta:
        return 0
    storage = x.untyped_storage()
    key = -storage.data_ptr()  # negative, so it differs from every object's id
    if key in seen:
        return 0
    seen.add(key)
    return storage.nbytes()


_PARTS = {
    torch.sparse_coo: ("values", "indices"),
    torch.sparse_csr: ("values", "crow_indices", "col_indices"),
    torch.sparse_csc: ("values", "ccol_indices", "row_indices"),
}
"""The tensors of sparse ones, by layout."""


def _stamp(graph: Graph) -> int:
    """A number that grows with each value cached on the graph."""
    count = 0
    for one in _derived_graphs(graph):
        attributes = vars(one)
        count += len(attributes) + one._memo.added + one._of_users.added
        for name in attributes.keys() & {"csr", "csc"}:
            count += len(vars(attributes[name]))
    return count


def _derived_graphs(graph: BoundGraph) -> Iterator[BoundGraph]:
    """The graph and all graphs cached on it: copies on other devices, and graphs derived by layers."""
    todo = [graph]
    seen = {id(graph)}
    while todo:
        one = todo.pop()
        yield one
        for other in (*one._moved.values(), *one._memo.values(), *one._of_users.values()):
            if isinstance(other, BoundGraph) and id(other) not in seen:
                seen.add(id(other))
                todo.append(other)


CACHE = BindCache(limit=2 << 30)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=CACHE.unlock)
