"""The cache of bound graphs, which every layer and every step shares: limited in number and in bytes.

A bound graph is small, but layers store on it what they derive: edge lists, sorted copies, copies on other devices. The
cache counts all of that, and lets go of the graphs that were used longest ago once the total passes `limit`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor, nn

from mpnn import edges
from mpnn.graph import Graph

P = ParamSpec("P")

_MOST = 256  # graphs
_OBJECT = 4096  # bytes of a graph without any array, roughly
_ATOMS = (str, bytes, int, float, type(None), type, torch.dtype, torch.device, ModuleType, nn.Module)


@dataclass(eq=False)
class _Entry:
    graph: Graph
    nbytes: int = _OBJECT
    stamp: int = field(default=-1)


class BindCache:
    """Graphs by what built them; the least recently used leave first.

    `limit`: bytes of all graphs together, with everything derived from them, on any device. The graph that was asked
    for last always stays. Graphs that somebody else still holds live on outside the cache.
    """

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._newest: _Entry | None = None
        self._limit, self._derived = limit, edges.derivations()
        self._lock = RLock()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)):
            raise TypeError(f"limit must be an integer, a number of bytes; got {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"limit must not be negative; got {nbytes}")
        with self._lock:
            self._limit = int(nbytes)
            self._measure(self._entries.values())
            self._evict()

    @property
    def nbytes(self) -> int:
        """Bytes of the cached graphs and of everything derived from them, measured now."""
        with self._lock:
            self._measure(self._entries.values())
            return self._total()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Lets go of all graphs."""
        with self._lock:
            self._entries.clear()
            self._newest = None

    def get(self, build: Callable[..., Graph], *arguments: Hashable) -> Graph:
        """`build(*arguments)`, the same graph as long as it is cached. Threads that ask at the same time may build it
        twice; all get the same one."""
        key = build, arguments
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._use(key, entry)
                return entry.graph
        graph = build(*arguments)
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(graph))
            self._newest = entry
            self._entries.move_to_end(key)
            self._account(self._entries.values())
            return entry.graph

    def _use(self, key: Hashable, entry: _Entry) -> None:
        before = self._newest
        if entry is not before:  # hashing an expression takes as long as all else here
            self._newest = entry
            self._entries.move_to_end(key)
        if edges.derivations() != self._derived:
            self._account((entry,) if before is None else (before, entry))

    def _account(self, entries: Iterable[_Entry]) -> None:
        """Measures these entries as far as they changed, and evicts. Which graphs changed is not known: between two
        lookups it is likely the one that was looked up last, and a new graph, which is expensive anyway, asks about
        all."""
        self._derived = edges.derivations()
        self._measure(entries)
        self._evict()

    def _measure(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            stamp = _stamp(entry.graph)
            if stamp != entry.stamp:
                entry.stamp, entry.nbytes = stamp, _OBJECT + bytes_of(entry.graph)

    def _evict(self) -> None:
        while len(self._entries) > 1 and (len(self._entries) > _MOST or self._total() > self._limit):
            self._entries.popitem(last=False)

    def _total(self) -> int:
        return sum({id(entry.graph): entry.nbytes for entry in self._entries.values()}.values())

    def unlock(self) -> None:
        """Forgets who holds the lock: in a forked process that thread does not exist."""
        self._lock = RLock()


def cached_graph(build: Callable[P, Graph]) -> Callable[P, Graph]:
    """Decorates a function of hashable arguments, whose graphs then stay in the cache."""

    @wraps(build)
    def cached(*arguments: P.args, **_: P.kwargs) -> Graph:
        return CACHE.get(build, *arguments)

    return cached


def bytes_of(root: Any) -> int:
    """Bytes of all arrays and tensors that can be reached from an object; those that share memory count once."""
    seen: set[int] = set()
    todo, total = [root], 0
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
    if x.layout != torch.strided:
        return sum(_storage_bytes(part, seen) for part in (x.values(), *_indices(x)))
    if x.is_meta:
        return 0
    storage = x.untyped_storage()
    at = -storage.data_ptr()  # no object's id, which is positive
    if at in seen:
        return 0
    seen.add(at)
    return storage.nbytes()


def _indices(x: Tensor) -> tuple[Tensor, ...]:
    if x.layout == torch.sparse_coo:
        return (x.indices(),)
    return (x.crow_indices(), x.col_indices())


def _stamp(graph: Graph) -> int:
    """A number that grows with each thing that is derived from the graph."""
    count = 0
    for one in _derived_graphs(graph):
        kept = vars(one)
        count += len(kept) + len(one._memo) + sum(len(vars(kept[name])) for name in ("csr", "csc") if name in kept)
    return count


def _derived_graphs(graph: Graph) -> Iterator[Graph]:
    """The graph, and all graphs that it keeps: on other devices, and what layers made of it."""
    todo, seen = [graph], {id(graph)}
    while todo:
        one = todo.pop()
        yield one
        for other in (*one._moved.values(), *one._memo.values()):
            if isinstance(other, Graph) and id(other) not in seen:
                seen.add(id(other))
                todo.append(other)


CACHE = BindCache(limit=2 << 30)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=CACHE.unlock)
