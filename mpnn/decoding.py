"""Cached decoding: nodes come one after the other, and those that are there are not computed again.

What a layer makes of a node for others to hear, its key and value, does not change once the node is there, as long as
nobody hears the future. So it is kept, and a new node costs what it hears: O(degree), not O(nodes so far).

    cache = Cache(length=1024)                     # one for a whole model; rows of its graphs are those of this length
    for new in pieces:                             # [B, n, dim]: a prompt, then one node after the other
        for layer in layers:
            new = layer(new, cache=cache)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.attention import Attention, KeyValue, Terms
from mpnn.graph import Graph
from mpnn.runs import Runs
from mpnn.topology import Topology


class Cache:
    """Keys and values of the nodes that a model has seen, for each of its layers.

    Args:
        length: how many nodes there will be at most. Topologies are bound to it, so that those whose rows depend on the
            size (`bigbird`, `random`) have the rows of the whole; token by token then equals one pass over that many.

    Every layer that is called with it is told apart by being another module, so each may run once for each new node.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, the number of nodes that there will be; got {length}")
        self.length = length
        self._kept: dict[nn.Module, _Kept] = {}
        self._steps: dict[tuple[Graph, int], _Step] = {}

    @property
    def count(self) -> int:
        """How many nodes it holds; between two calls of a model, all layers agree."""
        return max((kept.count for kept in self._kept.values() if not kept.fixed), default=0)

    def select(self, index: Tensor) -> None:
        """Keeps these members of the batch, int64 [B'], in this order; one may be taken more than once."""
        for kept in self._kept.values():
            kept.key, kept.value = (x.index_select(0, index) for x in (kept.key, kept.value))

    def crop(self, count: int) -> None:
        """Keeps the first `count` nodes; others may come in place of those that were there after them.

        Raises:
            ValueError: there are not so many nodes.
        """
        there = max((kept.seen for kept in self._kept.values()), default=0)
        if not 0 <= count <= there:
            raise ValueError(f"count must be from 0 to {there}, the number of nodes that are there; got {count}")
        for kept in self._kept.values():
            kept.seen = min(kept.seen, count)
            if not kept.fixed:
                kept.count = kept.seen

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        """Another cache of the same layers: a text that goes on in two ways is read once."""
        other = Cache(self.length)
        for layer, kept in self._kept.items():
            if kept.key is not None:
                other._kept[layer] = replace(kept, key=kept.key.clone(), value=kept.value.clone())
        return other

    def hear(
        self, layer: nn.Module, attention: Attention | None, given: Topology | Graph, x: Tensor, source: Tensor | None
    ) -> tuple[Graph, Terms]:
        """What the next nodes hear: a graph over nobody else, and the terms of the layer's attention on it.

        Args:
            layer: whose keys and values they are. attention: its attention.
            given: the topology or the graph of all `length` nodes; or the rows of the new nodes alone, a graph with a
                source for each node that is there by then.
            x: features of the new nodes, prepared, [..., n, dim]; their keys and values are kept.
            source: features of other nodes that are heard instead, [..., N_src, dim], which are kept at the first call,
                with their gradients.

        Raises:
            ValueError: an attention or a graph that cannot be decoded node by node; the sentence says why.
        """
        if not isinstance(attention, KeyValue) or type(attention).forward is not KeyValue.forward:
            raise ValueError(
                f"only DotProduct, Kernel and AdditiveV2 attention keep keys and values; got {type(attention).__name__}"
            )
        if torch.compiler.is_compiling():
            raise ValueError("torch.compile does not trace cached decoding; call what is not compiled with a cache")
        kept = self._kept.setdefault(layer, _Kept(fixed=source is not None))
        if kept.fixed != (source is not None):
            raise ValueError("with one cache a layer hears either its own nodes or a source; it was given both")
        stop = kept.seen + x.shape[-2]
        there = stop if source is None else source.shape[-2]
        if isinstance(given, Topology):
            given = given.bind(self.length, self.length if source is None else there).to(x.device)
        step = self._step(given, kept.seen, stop, there)
        fresh = x if source is None else source[..., kept.count :, :]
        query, key, value = attention.mapped(x, fresh, step.fresh(kept.count, fresh.shape[-2]))
        kept.append(key, value, self.length if source is None else there)
        kept.seen = stop
        key, value = step.heard(kept.key), step.heard(kept.value)
        return step.graph, attention.terms(query, key, value, step.graph, step.graph.edge_attr)

    def _step(self, given: Graph, start: int, stop: int, there: int) -> _Step:
        """The rows of nodes `start` to `stop`, worked out once for all layers over one graph."""
        if stop > self.length:
            raise ValueError(f"this cache was made for {self.length} nodes; with the new ones there would be {stop}")
        if any((step.start, step.stop) != (start, stop) for step in self._steps.values()):
            self._steps.clear()
        if (given, there) not in self._steps:
            self._steps[given, there] = _Step.of(given, start, stop, there, self.length)
        return self._steps[given, there]


@dataclass(eq=False)
class _Kept:
    """Keys and values of one layer, [..., capacity, H_kv, D]: the first `count` of them are there.

    `seen`: how many nodes have heard; `fixed`: whether they hear another set of nodes, all there from the beginning.
    """

    fixed: bool
    seen: int = 0
    count: int = 0
    key: Tensor = None  # type: ignore[assignment]
    value: Tensor = None  # type: ignore[assignment]

    def append(self, key: Tensor, value: Tensor, most: int) -> None:
        if self.fixed and key.shape[-3] == 0:
            return
        if self.fixed and self.count == 0:  # nothing will be written into them, so that gradients may pass
            self.key, self.value, self.count = key, value, key.shape[-3]
            return
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("a cache keeps no gradients; decode under torch.no_grad()")
        stop = self.count + key.shape[-3]
        self.key, self.value = (
            _grown(old, new, self.count, min(max(stop, 2 * self.count), most))
            for old, new in ((self.key, key), (self.value, value))
        )
        self.count = stop


def _grown(old: Tensor | None, new: Tensor, count: int, capacity: int) -> Tensor:
    """`old` with `new` behind its first `count`; moved to twice the room when it is full."""
    stop = count + new.shape[-3]
    if old is not None and old.shape[:-3] != new.shape[:-3]:
        raise ValueError(f"this cache holds batches of {list(old.shape[:-3])}; got one of {list(new.shape[:-3])}")
    if old is None or old.shape[-3] < stop:
        room = new.new_empty(*new.shape[:-3], capacity, *new.shape[-2:])
        if old is not None:
            room[..., :count, :, :] = old[..., :count, :, :]
        old = room
    old[..., count:stop, :, :] = new
    return old


@dataclass(frozen=True, eq=False)
class _Step:
    """The nodes `start` to `stop` and what they hear: the sources in `index`, and the graph over these alone.

    `places`: where all sources stand, None for at their numbers.
    """

    start: int
    stop: int
    index: slice | Tensor
    graph: Graph
    places: Tensor | None

    @staticmethod
    def of(given: Graph, start: int, stop: int, there: int, length: int) -> _Step:
        rows = given
        if (given.num_dst, given.num_src) != (stop - start, there):
            if given.num_dst != length or given.num_src < there:
                raise ValueError(
                    f"nodes {start} to {stop - 1} of {length} need a graph of all of them or of their rows, "
                    f"{stop - start} x {there} (destinations x sources); got {given}"
                )
            rows = given.rows(start, stop)
        heard, graph = rows.heard()
        first, last = (int(heard[0]), int(heard[-1]) + 1) if len(heard) else (0, 0)
        if last > there:
            raise ValueError(
                f"cached decoding needs a graph in which nobody hears what comes later, but in {given} node {last - 1} "
                f"is heard when there are {there}; use causal() & (...)"
            )
        if first == 0 and last == len(heard) and rows.places is None:
            graph.places = None  # all stand at their numbers still, and tables of offsets need not be written out
        index = slice(first, last) if last - first == len(heard) else heard
        return _Step(start, stop, index, graph, None if rows.places is None else rows.places[1])

    def heard(self, x: Tensor) -> Tensor:
        """Those that are heard of keys or values [..., T, H_kv, D]."""
        return x[..., self.index, :, :] if isinstance(self.index, slice) else x.index_select(-3, self.index)

    def fresh(self, first: int, count: int) -> Graph:
        """The new nodes and the `count` sources from `first` on, where they stand, without edges."""
        return self.graph.memo(("fresh", first, count), lambda: self._fresh(first, count))

    def _fresh(self, first: int, count: int) -> Graph:
        of_dst = self.graph.where()[0]
        if self.places is None:
            of_src = torch.arange(first, first + count, device=of_dst.device)
        else:
            of_src = self.places[first : first + count]
        nothing = Graph.from_runs(Runs.of(len(of_dst), count, ())).to(of_dst.device)
        return nothing.placed(of_dst, of_src)
