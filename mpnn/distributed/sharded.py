"""`sharded`: a context in which operators compute this process's part of every graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from mpnn.distributed.groups import Mesh, group_of
from mpnn.distributed.owners import Owners
from mpnn.distributed.partition import Partition, check_transport
from mpnn.graph import Graph, sharding
from mpnn.graph.topology import Topology

_MOST_PARTS = 64


@contextmanager
def sharded(mesh: Mesh | Partition = None, owners: Owners | None = None, transport: str = "auto") -> Iterator[None]:
    """Within this context, operators take features of this process's nodes, and compute its part of their graphs.

        with mpnn.distributed.sharded():
            logits = gpt(tokens[:, rank * n : (rank + 1) * n])       # a topology binds to the tokens of all processes
            node_mean(losses).backward()

    A topology binds to the number of nodes of all processes and takes this one's rows; so does an explicit graph of all
    nodes. Positions, and dropout of weights, edges and features (`mpnn.dropout`, not `torch.nn.Dropout`), go by the
    numbers of nodes in the whole graph: from the same `torch.manual_seed` on every process, any number of processes
    draws the same. The backward pass must run inside too if it recomputes layers.

    Args:
        mesh: the processes, as in `partition`, or a `Partition`, whose nodes are divided as it says.
        owners: which process has which nodes. Default: each has a block, in the order of ranks; their sizes are
            exchanged with each operator, which costs a small collective operation. Owners save it.
        transport: "halo", "heads" or "auto", as in `partition`, whose own is taken with a `Partition`.

    Raises:
        RuntimeError: if no process group was initialized.
        ValueError: if a process has other nodes than `owners` says.
    """
    check_transport(transport)
    if isinstance(mesh, Partition):
        owners = mesh.dst if owners is None else owners
        transport = mesh.transport if transport == "auto" else transport
        if mesh.group is None:
            raise RuntimeError("this partition was planned without processes; sharded needs one of processes")
        mesh = mesh.group
    group = group_of(mesh)
    if owners is not None and owners.ranks != dist.get_world_size(group):
        raise ValueError(f"owners are for {owners.ranks} ranks; there are {dist.get_world_size(group)} processes")
    sharding.enter(_Sharding(group, owners, transport))
    try:
        yield
    finally:
        sharding.leave()


class _Sharding:
    """What `mpnn.graph.sharding.Sharding` asks for."""

    def __init__(self, group: dist.ProcessGroup, owners: Owners | None, transport: str) -> None:
        self._group, self._given, self._rank, self._transport = group, owners, dist.get_rank(group), transport
        self._latest = owners
        # Parts by graph and division. Processes bind the same graphs in the same order, so all build a part, or none.
        self._parts: OrderedDict[tuple[object, ...], Partition] = OrderedDict()

    def part(self, graph: Topology | Graph, num_dst: int, num_src: int, layer: sharding.Layer | None = None) -> Graph:
        dst = self._owners(num_dst)
        src = dst if num_src == num_dst else self._owners(num_src)
        if not isinstance(graph, Topology) and (graph.num_dst, graph.num_src) != (
            dst.num_nodes,
            src.num_nodes,
        ):
            raise ValueError(
                f"the processes have {dst.num_nodes} destinations and {src.num_nodes} sources in all, and the graph "
                f"has {graph.num_dst} and {graph.num_src}; pass the whole graph, or a shard of a partition"
            )
        key = graph if isinstance(graph, Topology) else id(graph), tuple(dst.sizes), tuple(src.sizes)
        if key not in self._parts:
            whole = graph.bind(dst.num_nodes, src.num_nodes) if isinstance(graph, Topology) else graph
            self._parts[key] = Partition(
                whole, dst, src, self._group, self._transport
            )  # holds the graph, so that its id stays its own
            while len(self._parts) > _MOST_PARTS:
                self._parts.popitem(last=False)
        self._parts.move_to_end(key)
        return self._parts[key].shard(layer=layer)

    def numbers(self, count: int) -> Tensor:
        owners = self._owners(count) if self._latest is None else self._latest
        # rows that are not nodes, such as graphs or a batch, are the same on all processes
        return owners.nodes(self._rank) if owners.sizes[self._rank] == count else torch.arange(count)

    def _owners(self, count: int) -> Owners:
        """The division of nodes of which this process has `count`."""
        if self._given is not None:
            if self._given.sizes[self._rank] != count:
                raise ValueError(
                    f"this process, rank {self._rank}, has {count} nodes, and {self._given} give it "
                    f"{self._given.sizes[self._rank]}"
                )
            return self._given
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(sizes, torch.tensor([count]), group=self._group)
        self._latest = Owners.of_sizes([int(size) for size in sizes])
        return self._latest
