"""Cached decoding: nodes are processed one after the other, and earlier nodes are not computed again.

If no node attends to a later one, the keys and values of a node do not change when more nodes follow. The cache stores
them, so that a new node costs O(in-degree) instead of O(nodes so far).

    cache = KVCache(length=1024)                     # one for the whole model; its graphs are bound to this length
    for new in pieces:                             # [B, n, dim]: a prompt, then one node at a time
        for layer in layers:
            new = layer(new, cache=cache)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpnn.attention import KeyValue, Recurrent
from mpnn.attention.topk import TopK, block_means
from mpnn.graph import Graph
from mpnn.graph.arguments import at_least, check_form, integer
from mpnn.graph.runs import Runs
from mpnn.graph.sharding import active
from mpnn.graph.topology import Topology
from mpnn.round import Round


class KVCache:
    """Keys and values of the nodes processed so far, for each layer of a model.

    Args:
        length: the maximum number of nodes. Topologies are bound to it. Topologies whose rows depend on the size
            (`bigbird`, `random`) therefore have the same rows as in one pass over `length` nodes, and decoding node by
            node gives the same result.

    Layers are identified by their module, so each module may be called only once for each new node.
    """

    def __init__(self, length: int) -> None:
        self.length = at_least("length", length, 1)
        self._entries: dict[Any, _Entry] = {}  # by layer; the states of recurrences by ("state", layer)
        self._steps: dict[tuple[Graph, int], _Step] = {}

    @property
    def count(self) -> int:
        """Number of cached nodes. Between two calls of a model, it is the same for all layers."""
        return max((entry.count for entry in self._entries.values() if not entry.fixed), default=0)

    def select(self, index: Tensor) -> None:
        """Selects these batch entries, integers [B'], in this order. An entry may be selected more than once.

        Raises:
            ValueError: if the cached features have no batch dimension, [N, d].
            TypeError: if `index` is not a tensor of integers [B'].
            IndexError: if there is no such entry.
        """
        expected = "index must be a tensor of integers [B'], the batch entries to keep"
        check_form(expected, index, ("int64", "int32"), (None,), TypeError)
        stored = [x for entry in self._entries.values() for x in (entry.key, entry.state) if x is not None]
        if any(x.dim() == 3 for x in stored):  # [N, H, D] or [H, D, D_v]
            raise ValueError("this cache holds features [N, d] without a batch, so it has no entries to select")
        for size in {len(x) for x in stored if len(index)}:
            if not 0 <= int(index.min()) <= int(index.max()) < size:
                raise IndexError(f"index must be from 0 to {size - 1}, the entries of the batch; got {index.tolist()}")
        self.select_first(index)

    def select_first(self, index: Tensor) -> None:
        """Selects along the first dimension, unchecked: batch entries, or the nodes of features without a batch."""
        for entry in self._entries.values():
            entry.update(lambda x: x.index_select(0, index))

    def crop(self, count: int) -> None:
        """Truncates the cache to the first `count` nodes. Other nodes may then follow.

        Raises:
            ValueError: if the cache has fewer than `count` nodes, or if a recurrence or a short convolution has
                processed more: it keeps only a state, or the last nodes.
        """
        cached = max([self.count, *(entry.seen for entry in self._entries.values())])
        if not 0 <= integer("count", count) <= cached:
            raise ValueError(f"count must be from 0 to {cached}, the number of nodes in the cache; got {count}")
        partial = [e.count for e in self._entries.values() if e.dropped or e.state is not None]
        if count and count < max(partial, default=0):
            raise ValueError("a recurrence cannot forget nodes: copy the cache before them, or crop(0)")
        for entry in self._entries.values():
            entry.state = entry.state if count else None
            entry.seen = min(entry.seen, count)
            if not entry.fixed:
                entry.count, entry.dropped = entry.seen, min(entry.dropped, count)
            entry.means = None if entry.means is None else entry.means[..., : count // entry.block, :, :]

    def __copy__(self) -> "KVCache":
        """As `__deepcopy__`: new keys are written into the memory of the old ones."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """Returns an independent copy for the same layers, so that one prompt can be continued in several ways."""
        other = KVCache(self.length)
        other._entries = {layer: replace(entry) for layer, entry in self._entries.items()}
        for entry in other._entries.values():
            entry.update(Tensor.clone)
        return other

    def round(
        self, layer: Any, graph: Topology | Graph, x: Tensor, source: Tensor | None, edge_attr: Tensor | None = None
    ) -> Round:
        """Appends the new nodes, and returns the round over the compact graph from cached nodes to them.

        Args:
            layer: the operator to which the keys and values belong.
            graph: the topology or the graph of all `length` nodes, or only the rows of the new nodes: a graph with one
                source for each node so far, the new ones included.
            x: prepared features of the new nodes, [..., n, dim]. Their keys and values are appended to the cache.
            source: features of other nodes to attend to instead, [..., N_src, dim] (cross-attention). Their keys and
                values are cached in the first call, with gradients.

        Raises:
            ValueError: if the attention or the graph cannot be decoded node by node.
        """
        _check_not_divided()
        if edge_attr is not None or layer.mixes_values or (layer.training and layer.edge_dropout):
            raise ValueError("a cache cannot be combined with edge_attr, hops, teleport or edge_dropout")
        attention = layer.attention
        if attention is not None and attention.normalize == "softmax_dst":
            raise ValueError(
                'with normalize="softmax_dst" a node depends on later ones, which a cache does not have yet'
            )
        if isinstance(attention, Recurrent):
            return self._recurrence(layer, graph, x, source)
        if not isinstance(attention, KeyValue) or type(attention).forward not in (KeyValue.forward, TopK.forward):
            raise ValueError(
                "only DotProduct, TopK, BlockTopK, Kernel, Additive, AdditiveV2 and recurrent attention can use a "
                f"cache; got {type(attention).__name__}"
            )
        if torch.compiler.is_compiling():
            raise ValueError("torch.compile does not trace cached decoding; call the uncompiled module with a cache")
        entry = self._entries.setdefault(layer, _Entry(fixed=source is not None))
        if entry.fixed != (source is not None):
            raise ValueError(
                "with one cache, a layer attends either to its own nodes or to a source; it was called with both"
            )
        stop = entry.seen + x.shape[-2]
        num_src = stop if source is None else source.shape[-2]
        if isinstance(graph, Topology):
            graph = graph.bind(self.length, self.length if source is None else num_src).to(x.device)
        step = self._step(graph, entry.seen, stop, num_src)
        new = x if source is None else source[..., entry.count :, :]
        query, key, value = attention.project(x, new, step.edgeless(entry.count, new.shape[-2]))
        entry.append(key, value, self.length if source is None else num_src)
        entry.seen = stop
        key, value = step.gather(entry.key, entry.dropped), step.gather(entry.value, entry.dropped)
        if attention.num_past is not None and not entry.fixed:
            entry.keep_last(attention.num_past)
        options: Any = {} if attention.block is None else {"means": entry.block_means(attention.block)}
        graph = step.graph
        if isinstance(attention, TopK):
            index = attention.to_index_key(new)[..., None, :]
            index, _ = self.append(attention.to_index_key, index, index[..., :0])
            graph = attention.chosen(x, new, graph, step.gather(index, 0).squeeze(-2))
        return attention.round(query, key, value, graph, graph.edge_attr, **options)

    def _recurrence(self, layer: Any, graph: Topology | Graph, x: Tensor, source: Tensor | None) -> Round:
        """The round over the new nodes alone, with the state after the nodes before. `keep_state` gets the new one."""
        entry = self._entries.setdefault(("state", layer), _Entry(fixed=False))
        start = entry.seen
        stop = start + x.shape[-2]
        self._check_length(stop)
        parts = graph.bind(self.length).parts if source is None and isinstance(graph, Topology) else None
        if not isinstance(graph, Topology) or parts is None or not parts.is_causal or parts.count != 1:
            raise ValueError(f"a recurrence decodes node by node over the topology causal() alone; got {graph}")
        new = graph.bind(stop - start).to(x.device)
        # Without positions, the graph is the same for each token.
        if start and getattr(layer.attention, "position", None) is not None:
            positions = torch.arange(start, stop, device=x.device)
            new = new.with_positions(positions, positions)
        round: Round = layer.attention(x, x, new)
        round.state = entry.state
        round.return_state = True
        return round

    def keep_state(self, layer: Any, state: Tensor, nodes: int) -> None:
        """Stores the state of a recurrence after `nodes` more nodes."""
        if state.requires_grad:
            raise ValueError("a cache does not store gradients; decode under torch.no_grad()")
        entry = self._entries.setdefault(("state", layer), _Entry(fixed=False))
        entry.state = state
        entry.seen += nodes
        entry.count = entry.seen

    def state(self, layer: Any) -> Tensor | None:
        """Returns the state that `keep_state` stored last for the layer."""
        entry = self._entries.get(("state", layer))
        return None if entry is None else entry.state

    def seen(self, layer: Any) -> int:
        """Returns the number of nodes that the layer has processed."""
        return self._entries[layer].seen if layer in self._entries else 0

    def append(self, layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values [..., n, H, D] of a layer that makes its own graphs, and returns those of all nodes.

        Raises:
            ValueError: if there would be more than `length` nodes, or the keys or values require gradients.
        """
        _check_not_divided()
        entry = self._entries.setdefault(layer, _Entry(fixed=False))
        self._check_length(stop := entry.seen + key.shape[-3])
        entry.append(key, value, self.length)
        entry.seen = stop
        return entry.key[..., :stop, :, :], entry.value[..., :stop, :, :]

    def _check_length(self, stop: int) -> None:
        if stop > self.length:
            raise ValueError(f"this cache has a length of {self.length} nodes; with the new ones there would be {stop}")

    def _step(self, graph: Graph, start: int, stop: int, num_src: int) -> "_Step":
        """The rows of nodes `start` to `stop`, computed once for all layers with the same graph."""
        self._check_length(stop)
        if any((step.start, step.stop) != (start, stop) for step in self._steps.values()):
            self._steps.clear()
        if (graph, num_src) not in self._steps:
            self._steps[graph, num_src] = _Step.of(graph, start, stop, num_src, self.length)
        return self._steps[graph, num_src]


def _check_not_divided() -> None:
    if active() is not None:
        raise ValueError("a cache cannot be used while nodes are sharded over processes: decode on one process")


@dataclass(eq=False)
class _Entry:
    """Keys and values of one layer, [..., capacity, H_kv, D], of `count` nodes without the first `dropped`.

    `seen`: number of destinations processed; `fixed`: whether the sources are another set of nodes, complete from the
    beginning. `means`: of the keys of blocks of `block` nodes. `state`: that of a recurrence after `count` nodes,
    [..., H, D, D_v], instead of keys and values.
    """

    fixed: bool
    seen: int = 0
    count: int = 0
    dropped: int = 0
    key: Tensor = None  # type: ignore[assignment]
    value: Tensor = None  # type: ignore[assignment]
    block: int = 1
    means: Tensor | None = None
    state: Tensor | None = None

    def update(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Converts all tensors."""
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                setattr(self, name, convert(x))

    def block_means(self, block: int) -> Tensor:
        """The means of keys of whole blocks, [..., count // block, H_kv, D]. Each is computed once."""
        first = 0 if self.means is None else self.means.shape[-3]
        new = block_means(self.key[..., first * block : self.count, :, :], block)
        self.block, self.means = block, new if self.means is None else torch.cat([self.means, new], -3)
        return self.means

    def append(self, key: Tensor, value: Tensor, max_capacity: int) -> None:
        if self.fixed and key.shape[-3] == 0:
            return
        if self.fixed and self.count == 0:  # never written in place, so gradients can flow
            self.key = key
            self.value = value
            self.count = key.shape[-3]
            return
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("a cache does not store gradients; decode under torch.no_grad()")
        stored = self.count - self.dropped
        capacity = min(max(stored + key.shape[-3], 2 * stored), max_capacity)
        self.key, self.value = (
            _append(old, new, stored, capacity) for old, new in ((self.key, key), (self.value, value))
        )
        self.count += key.shape[-3]

    def keep_last(self, nodes: int) -> None:
        """Drops all but the last nodes, and their memory."""
        first = max(self.count - self.dropped - nodes, 0)
        stop = self.count - self.dropped
        self.key, self.value = (x[..., first:stop, :, :].clone() for x in (self.key, self.value))
        self.dropped += first


def _append(old: Tensor | None, new: Tensor, count: int, capacity: int) -> Tensor:
    """Writes `new` after the first `count` entries of `old`, in a new tensor of this capacity if `old` is full."""
    stop = count + new.shape[-3]
    if old is not None and old.shape[:-3] != new.shape[:-3]:
        raise ValueError(f"this cache holds batches of {list(old.shape[:-3])}; got one of {list(new.shape[:-3])}")
    if old is None or old.shape[-3] < stop:
        larger = new.new_empty(*new.shape[:-3], capacity, *new.shape[-2:])
        if old is not None:
            larger[..., :count, :, :] = old[..., :count, :, :]
        old = larger
    old[..., count:stop, :, :] = new
    return old


@dataclass(frozen=True, eq=False)
class _Step:
    """The new nodes `start` to `stop`, the indices of their in-neighbors, and the compact graph over these alone.

    `src_positions`: the positions of all sources, None if they equal the node numbers.
    """

    start: int
    stop: int
    index: slice | Tensor
    graph: Graph
    src_positions: Tensor | None

    @staticmethod
    def of(full: Graph, start: int, stop: int, num_src: int, length: int) -> "_Step":
        rows = full
        if (full.num_dst, full.num_src) != (stop - start, num_src):
            if full.num_dst != length or full.num_src < num_src:
                raise ValueError(
                    f"nodes {start} to {stop - 1} of {length} need a graph of all {length} nodes or of their rows, "
                    f"{stop - start} x {num_src} (destinations x sources); got {full}"
                )
            rows = full.rows(start, stop)
        sources, graph = rows.compact()
        first, last = (int(sources[0]), int(sources[-1]) + 1) if len(sources) else (0, 0)
        if last > num_src:
            raise ValueError(
                f"cached decoding needs a graph in which no node attends to a later one, but in {full} one of the "
                f"first {num_src} nodes attends to node {last - 1}; use causal() & (...)"
            )
        if first == 0 and last == len(sources) and rows.positions is None:
            graph.positions = None  # positions equal node numbers, so offset tables need not be materialized
        index = slice(first, last) if last - first == len(sources) else sources
        return _Step(start, stop, index, graph, None if rows.positions is None else rows.positions[1])

    def gather(self, x: Tensor, dropped: int) -> Tensor:
        """Selects the in-neighbors from keys or values [..., T, H_kv, D] of the nodes after the first `dropped`."""
        first = self.index.start if isinstance(self.index, slice) else self.index[0]
        if dropped and self.graph.num_src and first < dropped:
            raise ValueError(
                f"nodes {self.start} to {self.stop - 1} attend to node {first}, and this attention keeps the nodes "
                f"from {dropped} on; decode over causal() & window(radius) with a radius below its kernel"
            )
        if isinstance(self.index, slice):
            return x[..., self.index.start - dropped : self.index.stop - dropped, :, :]
        return x.index_select(-3, self.index - dropped)

    def edgeless(self, first: int, count: int) -> Graph:
        """A graph without edges of the new nodes and the sources `first` to `first + count`, with their positions."""

        def build() -> Graph:
            dst = self.graph.node_positions()[0]
            src = torch.arange(first, first + count)
            src = src if self.src_positions is None else self.src_positions[first : first + count]
            return Graph.from_runs(Runs.of(len(dst), count, ())).to(dst.device).with_positions(dst, src)

        return self.graph.cached(("edgeless", first, count), build)
