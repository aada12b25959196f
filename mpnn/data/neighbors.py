"""Sampled batches for training on graphs of any size (GraphSAGE, Hamilton et al. 2017, algorithm 2).

The graph and the features may be memory maps. A thread samples and gathers the next batches while the model computes.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn import Graph
from mpnn.graph.arguments import as_integer, at_least, integers, one_set
from mpnn.graph.data import renumbered
from mpnn.graphs import (
    HeteroGraph,
    HeteroSample,
    TemporalGraph,
    compressed,
    sample,
    to_pyg,
)
from mpnn.graphs.compressed import Sampled, check_nodes, check_times, gather
from mpnn.graphs.kinds import EdgeKind

T = TypeVar("T")


@dataclass(frozen=True)
class NeighborBatch:
    """The sampled part of a graph that L layers need to compute the outputs of `nodes`.

    Args:
        nodes: int64 [n], the nodes of the batch, whose outputs the last layer computes.
        sources: int64 [m], the nodes whose features the first layer reads; `nodes` come first.
        graphs: the graph of each layer, the first layer first. The destinations of a graph are its first sources, and
            the sources of the next. Edges keep their attributes and types, nodes their positions and their degrees in
            the whole graph.
        x: the features of `sources`, [m, ...]; None if `neighbor_batches` was given none.
        times: with `before`, the time at which each of `sources` is looked at, [m]; else None.
        ages: with `before`, how long before the time of its destination each edge of each graph was, [E]; else empty.
    """

    nodes: Tensor
    sources: Tensor
    graphs: tuple[Graph, ...]
    x: Tensor | None = None
    times: Tensor | None = None
    ages: tuple[Tensor, ...] = ()

    def to(self, device: torch.device | str) -> "NeighborBatch":
        def moved(value: Any) -> Any:
            return tuple(map(moved, value)) if isinstance(value, tuple) else None if value is None else value.to(device)

        return replace(self, **{field.name: moved(getattr(self, field.name)) for field in fields(self)})


def neighbor_batches(
    graph: Graph | Sampled,
    nodes: Tensor,
    fanouts: Sequence[int],
    features: Tensor | NDArray[Any] | None = None,
    *,
    batch_size: int,
    before: Tensor | None = None,
    seed: int = 0,
    shuffle: bool = True,
    prefetch: int = 2,
    rank: int = 0,
    world: int = 1,
) -> Iterator[NeighborBatch]:
    """Yields one epoch over `nodes` in batches, each with sampled in-neighbors. Pass another `seed` in each epoch.

    ::

        for batch in neighbor_batches(graph, train_nodes, [15, 10], features, batch_size=1024, seed=epoch):
            h = batch.x
            for layer, sampled in zip(layers, batch.graphs):
                h = layer(h[: sampled.num_dst], sampled, source=h)
            loss = cross_entropy(h, labels[batch.nodes])

    A node's sample depends on the seed, the layer and the node, not on its batch, the number of threads, or whether the
    graph and the features are in memory or on disk.

    Args:
        graph: its sources and destinations must be one set of nodes. A `Graph` is compressed first, once. With `whole`
            of a `mpnn.distributed.Part`, rows and features of other processes' nodes are fetched from these: all
            processes must take each batch together, and no batch is prepared in advance.
        nodes: int64 [n], distinct; with `before`, they may repeat.
        fanouts: the number of in-neighbors that the first, second, ... layer receives from; -1 for all of them.
        features: [num_nodes, ...], a tensor or an array; of a memory map, rows are read in ascending order. Those of
            the part's own nodes with `part.whole`.
        batch_size: the number of nodes of a batch; the last may have fewer.
        before: [n], the time of each node, for a `TemporalGraph`: it receives along edges before this time only, and
            degrees count these.
        shuffle: whether to visit the nodes in an order drawn from the seed.
        prefetch: the number of batches that a thread prepares in advance; 0 prepares each when it is asked for.
        rank, world: the number of this process, and how many there are. All pass the same other arguments, and each
            gets its share of the nodes, in the same number of batches.

    Raises:
        ValueError: an argument does not fit; before the first batch. Errors of the thread are raised at its batch.
    """
    if isinstance(graph, HeteroGraph):
        raise TypeError(
            "neighbor_batches samples one kind of nodes; got a HeteroGraph: hetero_batches(graph, (kind, nodes), "
            "fanouts) samples it"
        )
    one_set("neighbor_batches", graph)
    fanouts = checked_fanouts(fanouts)
    seed = as_integer("seed", seed)
    batch_size, prefetch = at_least("batch_size", batch_size, 1), at_least("prefetch", prefetch, 0)
    whole = Whole.of(graph)
    together = whole.rows.processes
    own = whole.rows.num_own
    if features is not None and len(features) != own:
        raise ValueError(f"features must have a row for each of the {own} nodes; got {len(features)}")
    if together is not None and together != (rank, world):
        raise ValueError(
            f"this is the graph of rank {together[0]} of world {together[1]}; got rank {rank} of world {world}"
        )
    if isinstance(graph, TemporalGraph) != (before is not None):
        raise ValueError(f"before= and a graphs.TemporalGraph need each other; got {graph} and before={before}")
    check_nodes(nodes.cpu().numpy(), graph.num_dst, distinct=before is None)
    if isinstance(graph, TemporalGraph) and before is not None:
        check_times("before", before, len(nodes), graph.times.dtype)
    order = visit_order(len(nodes), shuffle, seed)
    parts = _shares(order, batch_size, rank, world) if len(nodes) else ()
    prepared = (
        sampled_batch(whole, nodes[part], fanouts, features, seed, None if before is None else before[part])
        for part in parts
    )
    return in_advance(prepared, prefetch if together is None else 0)


@dataclass(frozen=True)
class HeteroBatch(HeteroSample):
    """A sample for a batch of nodes of one kind.

    Args:
        x: {kind: [n, ...]}, the features of `nodes`; empty if `hetero_batches` was given none.
        batch_size: the number of nodes of the batch, which are the first of their kind.
    """

    x: dict[str, Tensor]
    batch_size: int

    def to_pyg(self) -> Any:
        """Returns a `HeteroData` as PyTorch Geometric's `NeighborLoader` yields: with x, n_id, and `batch_size` of the
        kind."""
        data = to_pyg(self.graph, n_id=self.nodes, **({"x": self.x} if self.x else {}))
        for relation, ids in self.edge_ids.items():
            data[relation].e_id = ids
        data.batch_size = self.batch_size
        return data


def hetero_batches(
    graph: HeteroGraph,
    seeds: tuple[str, Tensor],
    fanouts: Sequence[int | Mapping[EdgeKind, int]],
    features: Mapping[str, Tensor | NDArray[Any]] | None = None,
    *,
    batch_size: int,
    time: Tensor | None = None,
    latest: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    prefetch: int = 2,
) -> Iterator[HeteroBatch]:
    """Yields one epoch over nodes of one kind in batches, each with the sample that `graphs.sample` draws. Pass another
    `seed` in each epoch.

    Args:
        graph, seeds, fanouts, time, latest, seed: as of `graphs.sample`. What a node receives does not depend on the
            other nodes of its batch.
        features: {kind: [number of nodes, ...]}, tensors or arrays, which may be memory maps.
        batch_size: the number of nodes of a batch; the last may have fewer.
        shuffle: whether to visit the nodes in an order drawn from the seed.
        prefetch: the number of batches that a thread prepares in advance.

    Raises:
        ValueError: an argument does not fit; at the first batch.
    """
    kind, nodes = seeds
    order = visit_order(len(nodes), shuffle, as_integer("seed", seed))
    at_least("prefetch", prefetch, 0)

    def batch(part: Tensor) -> HeteroBatch:
        moments = None if time is None else time[part]
        sampled = sample(graph, (kind, nodes[part]), fanouts, time=moments, latest=latest, seed=seed)
        x = {name: gather(rows, sampled.nodes[name]) for name, rows in (features or {}).items()}
        return HeteroBatch(**vars(sampled), x=x, batch_size=len(part))

    batches = map(batch, order.split(at_least("batch_size", batch_size, 1)) if len(order) else ())
    return in_advance(batches, prefetch)


def _shares(nodes: Tensor, batch_size: int, rank: int, world: int) -> Sequence[Tensor]:
    """The indices of the nodes of each batch of one process. Each node is in one batch of one process."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be from 0 to world - 1; got rank {rank} of world {world}")
    if world == 1:
        return nodes.split(batch_size)
    count = -(-len(nodes) // (batch_size * world))
    if len(nodes) // world < count:
        raise ValueError(
            f"{len(nodes)} nodes make no {count} batches for each of {world} processes: pass a multiple of {world} "
            "nodes, or a larger batch_size"
        )
    return nodes[rank::world].tensor_split(count)


@dataclass(frozen=True)
class Whole:
    """The graph that batches are sampled from: its compressed rows; data of its edges in their order, and their
    numbers; the positions of its nodes (of destinations, of sources), if they are others than those of the rows; and
    whether `edge_attr` holds the shifts of a cell."""

    rows: Sampled
    data: dict[str, Tensor]
    edge_ids: NDArray[np.int64] | None = None
    positions: tuple[Tensor, Tensor] | None = None
    periodic: bool = False

    @staticmethod
    def of(graph: Graph | Sampled) -> "Whole":
        of_times, graph = (graph, graph.whole) if isinstance(graph, TemporalGraph) else (None, graph)
        if not isinstance(graph, Graph):
            return Whole(graph, {})
        graph = graph.to("cpu")
        data = {"edge_attr": graph.edge_attr, "edge_type": graph.edge_type}
        rows = of_times or graph.cached("compressed", lambda: compressed(graph))
        return Whole(
            rows,
            {name: values for name, values in data.items() if values is not None},
            rows.edge_ids,
            graph.node_positions(),
            graph.periodic,
        )

    def carried(self, block: Graph, nodes: Tensor, degrees: Tensor, edges: Tensor) -> Graph:
        """The block with the data of its sources `nodes`, and of its edges, which are at `edges` in the rows."""
        data = {}
        if self.edge_ids is not None and self.data:
            edges = torch.from_numpy(self.edge_ids)[edges]
            data = {name: values[edges] for name, values in self.data.items()}
        dst, src = (nodes, nodes) if self.positions is None else (at[nodes] for at in self.positions)
        n = block.num_dst
        of_block = {"positions": (dst[:n], src), "name": block.name, "periodic": self.periodic}
        block = renumbered(block, block.stored_edges, **of_block, **data)
        block.degrees = degrees[:n], degrees[: block.num_src]
        return block


def sampled_batch(
    whole: Whole,
    nodes: Tensor,
    fanouts: Sequence[int],
    features: Tensor | NDArray[Any] | None = None,
    seed: int = 0,
    before: Tensor | None = None,
) -> NeighborBatch:
    """One batch of `neighbor_batches`."""
    rows = whole.rows
    sources = nodes.cpu()
    times = None if before is None else before.cpu()
    layers: list[tuple[Graph, Tensor, Tensor]] = []
    ages: tuple[Tensor, ...] = ()
    for layer in reversed(range(len(fanouts))):
        drawn = fanouts[layer], seed * len(fanouts) + layer
        if isinstance(rows, TemporalGraph) and times is not None:
            sources, times, block, edges, age = rows.sample_before(sources, times, *drawn)
            ages = age, *ages
        else:
            sources, block, edges = rows.sample(sources, *drawn)
        layers.insert(0, (block, sources, edges))
    degrees = rows.degree(sources, times) if isinstance(rows, TemporalGraph) else rows.degree(sources)
    graphs = tuple(whole.carried(block, inputs, degrees, edges) for block, inputs, edges in layers)
    x = None if features is None else rows.gather(features, sources)
    return NeighborBatch(nodes, sources, graphs, x, times, ages)


def checked_fanouts(fanouts: Sequence[int]) -> Sequence[int]:
    """Returns the numbers of in-neighbors of each layer. Raises ValueError if there are none, or one is below -1."""
    fanouts = integers("fanouts", fanouts)
    if not fanouts or min(fanouts) < -1:
        raise ValueError(f"fanouts must hold a number for each layer, -1 for all in-neighbors; got {list(fanouts)}")
    return fanouts


def visit_order(count: int, shuffle: bool, seed: int) -> Tensor:
    """Returns the order of an epoch over `count` items, int64: drawn from the seed, or ascending."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)) if shuffle else torch.arange(count)


def in_advance(values: Iterator[T], count: int) -> Iterator[T]:
    """Yields `values`, which a thread computes up to `count` in advance. Its exceptions are raised here, in their turn.
    The thread ends with the iterator: at its end, when it is closed, and after an exception such as Ctrl-C."""
    if not count:
        yield from values
        return
    end = object()
    with ThreadPoolExecutor(1, "mpnn-batches") as worker:
        ready = deque(worker.submit(next, values, end) for _ in range(count))
        try:
            while (value := ready.popleft().result()) is not end:
                ready.append(worker.submit(next, values, end))
                yield cast(T, value)
        finally:
            for future in ready:
                future.cancel()
