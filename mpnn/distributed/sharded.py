"""`sharded`: a context in which operators compute this process's part of every graph."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpnn.distributed import agreement, groups
from mpnn.distributed.groups import Mesh, all_gather, group_of
from mpnn.distributed.owners import Owners
from mpnn.distributed.partition import Partition, check_transport
from mpnn.graph import Graph, sharding
from mpnn.graph.exchange import Layer
from mpnn.graph.topology import Topology

_MAX_PARTS = 64


@contextmanager
def sharded(mesh: Mesh | Partition = None, owners: Owners | None = None, transport: str = "auto") -> Iterator[None]:
    """Divides nodes over processes: within this context, operators take the features of this process's nodes, and
    compute its part of their graphs.

        with mpnn.distributed.sharded():
            logits = gpt(tokens[:, rank * n : (rank + 1) * n])       # a topology binds to the tokens of all processes
            node_mean(losses).backward()

    A topology binds to the number of nodes of all processes and takes this one's rows; so does an explicit graph of all
    nodes. Positions, and dropout of weights, edges and features (`mpnn.update`'s, not `torch.nn`'s), go by the
    numbers of nodes in the whole graph: from the same `torch.manual_seed` on every process, any number of processes
    draws the same. The backward pass must run inside too if it recomputes layers.

    Args:
        mesh: the processes, as in `partition`, or a `Partition`, whose nodes are divided as it says.
        owners: which process has which nodes. Default: each has a block, in the order of ranks; their sizes are
            exchanged with each operator and dropout, which costs a small collective operation. Owners save it, and so
            does a `Partition`, which also keeps its parts for the next time.
        transport: as in `partition`, whose own is taken with a `Partition`.

    Raises:
        RuntimeError: if no process group was initialized.
        ValueError: if a process has other nodes than `owners` says, or other graphs, weights, dtypes or batch
            sizes than others.
    """
    check_transport(transport)
    if isinstance(mesh, Partition):
        if owners is not None:
            raise ValueError("a partition says who owns which nodes: pass a partition, or a mesh and owners")
        divided = _of_partition(mesh, transport)
    else:
        divided = _Sharding(group_of(mesh), transport, None if owners is None else (owners, owners))
    with sharding.use(divided):
        yield


def _of_partition(part: Partition, transport: str) -> "_Sharding":
    """The sharding of a partition, which is kept with it, so that a graph is planned once for all steps."""
    if part.group is None:
        raise RuntimeError("this partition was planned without processes; sharded needs one of processes")
    transport = part.transport if transport == "auto" else transport
    if transport not in part.shardings:
        given = part if transport == part.transport else None
        part.shardings[transport] = _Sharding(part.group, transport, (part.dst, part.src), given)
    return part.shardings[transport]


class _Sharding:
    """Implements `mpnn.graph.sharding.Sharding`.

    Args:
        owners: of destinations and of sources; None: the processes have blocks of nodes, of any size in each call.
        given: a partition of one of the graphs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        transport: str,
        owners: tuple[Owners, Owners] | None,
        given: Partition | None = None,
    ) -> None:
        self._group = group
        self._transport = transport
        self._given_owners = owners
        self._given = given
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        if owners is not None and owners[0].ranks != self.ranks:
            raise ValueError(f"owners are for {owners[0].ranks} ranks; there are {self.ranks} processes")
        # Parts by graph and division. Processes bind the same graphs in the same order, so all build a part, or none.
        # The graph is kept with its part, so that an id stays its own.
        self._parts: OrderedDict[tuple[object, ...], tuple[object, Partition]] = OrderedDict()

    def part(self, graph: Topology | Graph, num_dst: int, num_src: int, layer: Layer | None = None) -> Graph:
        if layer is not None and layer.module is not None:
            self.check(layer.module)
        dst, src = self._owners(num_dst, num_src, layer)
        whole = dst.num_nodes, src.num_nodes
        if not isinstance(graph, Topology) and (graph.num_dst, graph.num_src) != whole:
            raise ValueError(
                f"the processes have {whole[0]} destinations and {whole[1]} sources in all, and the graph has "
                f"{graph.num_dst} and {graph.num_src}; pass the whole graph, or a shard of a partition"
            )
        which: object = graph if isinstance(graph, Topology) else (id(graph), *_versions(graph))
        key = which, tuple(dst.sizes), tuple(src.sizes)
        if key not in self._parts:
            bound = graph.bind(*whole) if isinstance(graph, Topology) else graph
            part = self._given_of(bound) or Partition(bound, dst, src, self._group, self._transport)
            self._parts[key] = graph, part
            while len(self._parts) > _MAX_PARTS:
                self._parts.popitem(last=False)
        self._parts.move_to_end(key)
        return self._parts[key][1].shard(layer=layer)

    def numbers(self, count: int) -> Tensor:
        return self._owners(count, count)[0].nodes(self.rank)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return self._owners(x.shape[dim], x.shape[dim])[0].gather(x, dim, self._group)

    def split(self, total: int) -> list[Tensor]:
        owners = self._given_owners[0] if self._given_owners else Owners.equal(total, self.ranks)
        if owners.num_nodes != total:
            raise ValueError(f"{total} tokens, and owners of {owners.num_nodes}: take sharded() without owners")
        return list(map(owners.nodes, range(owners.ranks)))

    def all_gather(self, x: Tensor) -> Tensor:
        return all_gather(x, self._group)

    def broadcast(self, x: Tensor, rank: int) -> Tensor:
        received = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(received, group=self._group, group_src=rank)
        return received

    def run_in_rank_order(self, count: int, run: Callable[[Tensor], tuple[Tensor, Tensor]], first: Tensor) -> Tensor:
        if (self._owners(count, count)[0].owner.diff() < 0).any():
            raise ValueError(
                "a recurrence passes its state from rank to rank, so each has one block of the nodes in the order of "
                'ranks: take balance="nodes" or "edges"'
            )
        return groups.run_in_rank_order(run, first, self._group)

    def check(self, module: nn.Module) -> None:
        agreement.weights(module, self._group)

    def _given_of(self, graph: Graph) -> Partition | None:
        """The given partition, if it is one of this graph."""
        given = self._given
        if given is None or given.graph is graph:
            return given
        same = not graph.is_explicit and agreement.of_graph(graph) == agreement.of_graph(given.graph)
        return given if same else None

    def _owners(self, num_dst: int, num_src: int, layer: Layer | None = None) -> tuple[Owners, Owners]:
        """The owners of destinations and of sources, of which this process has this many."""
        if self._given_owners is None:
            every = agreement.gather(agreement.features(layer), self._group, (num_dst, num_src))
            dst, src = (Owners.of_sizes(sizes) for sizes in zip(*every, strict=True))
            return dst, src
        dst, src = self._given_owners
        expected = dst.sizes[self.rank], src.sizes[self.rank]
        if (num_dst, num_src) != expected:
            raise ValueError(
                f"rank {self.rank} has features of {num_dst} destinations and {num_src} sources, and the owners give "
                f"it {expected[0]} and {expected[1]}; where layers have other numbers of nodes, name no owners"
            )
        return dst, src


def _versions(graph: Graph) -> list[object]:
    """Returns a key that changes with the data of a graph after a part was made of it: the identity and the version of
    each tensor. Inference tensors have no version, so a new part is made of them in each call."""
    data = [graph.edge_attr, graph._edge_type, *(graph.positions or ()), *(graph.degrees or ())]
    tensors = [x for x in data if x is not None]
    return [(id(x), object() if x.is_inference() else x._version) for x in tensors]
