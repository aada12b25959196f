"""Sampling from a graph whose rows and features are divided over processes: each asks the owners of nodes for their
rows, as in DistDGL (Zheng et al. 2020, arXiv:2010.05337)."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mpnn.distributed.groups import all_to_all, ask
from mpnn.distributed.owners import Owners
from mpnn.graph import Graph
from mpnn.graph.data import renumbered
from mpnn.graphs.compressed import block_of, gather, sums_of_weights
from mpnn.kernels.edges import sample_neighbors


@dataclass(frozen=True, eq=False)
class DividedGraph:
    """A whole graph of which each process holds the rows of its own nodes: what `mpnn.data.neighbor_batches` samples
    from, by the methods of a `CompressedGraph`. All processes of the group must call them together. A sample is that of
    the whole graph. Created by `Part.open`, as `part.whole`.

    Args:
        nodes: int64 [own], the numbers of the own nodes, ascending.
        sources: int64 [sources], the numbers of the sources of their edges.
        edges: int32 [2, E], sources, as indices into `sources`, and destinations, into `nodes` and ascending.
        owners: int32 [num_nodes], the rank of each node.
        edge_data: "edge_attr" [E, ...] and "edge_type" [E], where edges have them.
    """

    nodes: Tensor
    sources: Tensor
    edges: NDArray[np.int32]
    owners: NDArray[np.int32]
    group: dist.ProcessGroup
    edge_data: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_dst(self) -> int:
        return len(self.owners)

    @property
    def num_src(self) -> int:
        return len(self.owners)

    @property
    def num_own(self) -> int:
        return len(self.nodes)

    @property
    def processes(self) -> tuple[int, int]:
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return np.searchsorted(self.edges[1], np.arange(self.num_own + 1, dtype=np.int32))

    @cached_property
    def _degrees(self) -> Tensor:
        sums = sums_of_weights(self.edge_data.get("edge_attr"), slice(None))
        return torch.from_numpy(np.diff(self._offsets)) if sums is None else sums[self._offsets].diff()

    def degree(self, nodes: Tensor) -> Tensor:
        """The in-degrees of nodes, int64, or float64 sums of weights."""
        return self.gather(self._degrees, nodes)

    def gather(self, features: Tensor | NDArray[Any], nodes: Tensor) -> Tensor:
        """The rows of nodes, [n, ...], for `features` [own, ...] of the own nodes on each process."""
        rows, owners, leaving = self._ask(nodes)
        return owners.in_order(all_to_all(gather(features, rows), owners.sizes, leaving, self.group))

    def sample(self, nodes: Tensor, fanout: int, seed: int = 0) -> tuple[Tensor, Graph, Tensor]:
        """As `CompressedGraph.sample`. The index of an edge is that among the edges that arrived."""
        rows, owners, leaving = self._ask(nodes)
        targets = self.nodes[rows].numpy()
        columns = self.edges[0]
        first, stop = self._offsets[rows.numpy()], self._offsets[rows.numpy() + 1]
        drawn = sample_neighbors(first, stop, columns, len(self.sources), targets, fanout, seed)
        position, mine = torch.from_numpy(drawn.position), torch.from_numpy(np.diff(drawn.ptr))
        counts = all_to_all(mine, owners.sizes, leaving, self.group)
        arrive, leave = ([int(x.sum()) for x in of.split(by)] for of, by in ((counts, owners.sizes), (mine, leaving)))
        sources = self.sources[torch.from_numpy(columns[drawn.position]).long()].int()
        sources = all_to_all(sources, arrive, leave, self.group)
        stop = counts.cumsum(0)
        first, stop = (owners.in_order(at).numpy() for at in (stop - counts, stop))
        whole = sample_neighbors(first, stop, sources.numpy(), self.num_src, nodes.numpy(), -1, 0)
        numbers, block, edges = block_of(whole, len(nodes), fanout)
        data = {
            name: all_to_all(x.index_select(0, position), arrive, leave, self.group).index_select(0, edges)
            for name, x in self.edge_data.items()
        }
        return numbers, renumbered(block, block.stored_edges, name=block.name, **data), edges

    def _ask(self, nodes: Tensor) -> tuple[Tensor, Owners, list[int]]:
        """Tells the owners of nodes that their rows are needed. Returns the own rows that are asked for, by the process
        that asks; the owners of `nodes`, in whose order rows will arrive; and how many each process asks for."""
        owners = Owners.of_nodes(torch.from_numpy(self.owners[nodes.numpy()]).long(), self.processes[1])
        asked, leaving = ask(owners.by_owner(nodes), owners.sizes, self.group)
        return torch.searchsorted(self.nodes, asked), owners, leaving
