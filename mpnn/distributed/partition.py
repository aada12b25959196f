"""`partition`: which process computes which nodes of a graph, what it fetches for them, and how even that is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpnn.attention import DotProduct
from mpnn.distributed import agreement, halo, heads, queries, stream
from mpnn.distributed.groups import Mesh, group_of
from mpnn.distributed.halo import Part, not_by_node, refusal_in_pieces
from mpnn.distributed.owners import Owners
from mpnn.graph import Graph
from mpnn.graph.arguments import INTEGERS, check_form
from mpnn.graph.exchange import Layer
from mpnn.graph.topology import Topology

_NODE_COST = 16.0  # edges that cost as much as a node's own maps, for layers of some 64 features
BALANCES = ("edges", "nodes", "zigzag", "metis")


def partition(
    graph: Graph | Topology,
    mesh: Mesh | int = None,
    *,
    parts: Tensor | None = None,
    balance: str = "edges",
    transport: str = "auto",
    node_cost: float | nn.Module = _NODE_COST,
) -> "Partition":
    """Divides the destinations of a graph over processes. Sources are divided alike, or in equal blocks if the graph
    has another number of them.

        part = mpnn.distributed.partition(graph)
        y = model(part.scatter(x), part.shard())

    Every process passes the same graph. It is not sent anywhere.

    Args:
        graph: a bound graph; bind a topology first: `causal().bind(n)`.
        mesh: a `DeviceMesh` of one dimension, a process group, or None for all processes. A number of ranks plans
            without processes: all but `scatter`, `gather` and the exchange of a shard works.
        parts: the rank of each destination, integers [num_dst], instead of `balance`.
        balance: "edges" cuts at equal sums of edges + `node_cost` * nodes. "nodes" cuts into equal numbers of nodes.
            "zigzag" gives each rank a block from the front and one from the back, which evens out a causal graph.
            "metis" lets METIS (Karypis & Kumar 1998) minimize the edges between ranks; for explicit graphs, with the
            package pymetis.
        transport: "halo": each rank fetches the sources it needs in one all-to-all, for any layer. "heads": each rank
            computes its share of the heads over the whole graph, for layers such as `DotProduct` whose heads the ranks
            divide; what travels does not depend on the graph. "stream": keys and values of one rank after the other, in
            bounded memory, for softmax attention such as `DotProduct`; the backward pass fetches them again. "queries":
            a halo, but destinations that attend to most of the graph send their queries instead, for such attention.
            "auto" takes the halo, the heads or the queries, by which the busiest rank receives the fewest bytes.
        node_cost: the cost of a node in edges, or the model, from which it follows: 2 operations for each
            number of a map and node, 4 for each number of a head and edge. 16 is for GAT of some 64 features; a
            transformer layer of width d has about 6 d.

    Raises:
        TypeError: if `graph` is a topology, or the model has no `DotProduct`.
        ValueError: if an option is unknown, or `parts` does not fit.
    """
    if isinstance(graph, Topology):
        raise TypeError(f"partition needs a bound graph; got a topology: pass ({graph}).bind(n)")
    if balance not in BALANCES:
        raise ValueError(f"balance must be one of {', '.join(BALANCES)}; got {balance!r}")
    check_transport(transport)
    planned = isinstance(mesh, int) and not isinstance(mesh, bool)
    group = None if planned else group_of(mesh)  # type: ignore[arg-type]
    ranks = mesh if planned else dist.get_world_size(group)
    assert isinstance(ranks, int)
    if ranks < 1:
        raise ValueError(f"a number of ranks must be at least 1; got {ranks}")
    cost = cost_of_node(node_cost) if isinstance(node_cost, nn.Module) else node_cost
    dst = _owners(graph, ranks, parts, balance, cost)
    src = dst if graph.num_src == graph.num_dst else Owners.equal(graph.num_src, ranks)
    return Partition(graph, dst, src, group, transport)


def check_transport(transport: str) -> None:
    """Raises ValueError if there is no such transport."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}; got {transport!r}")


def cost_of_node(model: nn.Module) -> float:
    """How many edges cost as much as a node: the operations of the maps of a model for a node, over those of its
    attentions for an edge.

    Raises:
        TypeError: if the model has no `DotProduct`.
    """
    attentions = [part for part in model.modules() if isinstance(part, DotProduct)]
    if not attentions:
        raise TypeError(
            f"{type(model).__name__} has no DotProduct, by which the cost of its nodes is known; pass node_cost as a "
            "number of edges"
        )
    per_node = sum(2 * part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    return per_node / sum(4 * part.heads * part.head_dim for part in attentions)


def _owners(graph: Graph, ranks: int, parts: Tensor | None, balance: str, node_cost: float) -> Owners:
    if parts is not None:
        parts = torch.as_tensor(parts).cpu()
        expected = f"parts must hold {graph.num_dst} integers, the rank of each destination"
        check_form(expected, parts, (*INTEGERS, "bool"), (graph.num_dst,))
        if len(parts) and not 0 <= int(parts.min()) <= int(parts.max()) < ranks:
            raise ValueError(f"parts must lie in 0..{ranks - 1}; got {int(parts.min())} to {int(parts.max())}")
        return Owners.of_nodes(parts.long(), ranks)
    if balance == "nodes":
        return Owners.equal(graph.num_dst, ranks)
    if balance == "zigzag":
        return Owners.zigzag(graph.num_dst, ranks)
    if balance == "metis":
        return Owners.of_nodes(_metis(graph, ranks), ranks)
    return Owners.of_cost(graph.degree().cpu() + node_cost, ranks)


def _metis(graph: Graph, ranks: int) -> Tensor:
    """The rank of each node by METIS, which cuts few edges between about equal parts."""
    if not graph.is_explicit or graph.num_dst != graph.num_src:
        raise ValueError(f'balance="metis" is for explicit graphs of one set of nodes; for {graph}, take "edges"')
    try:
        import pymetis
    except ImportError:
        raise ImportError('balance="metis" needs the package pymetis: pip install pymetis') from None
    both = graph.undirected().csr
    src, ptr = both.col.cpu(), both.ptr.cpu()
    dst = torch.repeat_interleave(ptr.diff())
    keep = src != dst
    ptr = torch.cat([ptr.new_zeros(1), torch.bincount(dst[keep], minlength=graph.num_dst).cumsum(0)])
    weights = (graph.degree().cpu() + int(_NODE_COST)).tolist()
    adjacency = pymetis.CSRAdjacency(ptr.tolist(), src[keep].tolist())
    _, owner = pymetis.part_graph(ranks, adjacency, vweights=weights)
    return torch.tensor(owner)


@dataclass(frozen=True)
class RankPlan:
    """The work of one rank in a round: `nodes` it owns, `edges` it aggregates, and sources that it `fetches` from and
    `sends` to other ranks."""

    nodes: int
    edges: int
    fetches: int
    sends: int


class Partition:
    """The parts of a graph. Created by `partition`."""

    def __init__(
        self, graph: Graph, dst: Owners, src: Owners, group: dist.ProcessGroup | None, transport: str = "auto"
    ) -> None:
        self.graph = graph
        self.dst = dst
        self.src = src
        self.group = group
        self.transport = transport
        self._shards: dict[str, Graph] = {}  # of this process, by transport
        self._most_by_queries: dict[tuple[int, int, int], int] = {}  # bytes of the busiest rank, by widths
        self.shardings: dict[str, Any] = {}  # of `sharded`, by transport: they keep the parts of other graphs

    @property
    def ranks(self) -> int:
        return self.dst.ranks

    @property
    def rank(self) -> int:
        """This process.

        Raises:
            RuntimeError: if the partition was planned without processes.
        """
        if self.group is None:
            raise RuntimeError(f"this partition was planned for {self.ranks} ranks without processes: name a rank")
        return dist.get_rank(self.group)

    def shard(self, rank: int | None = None, layer: Layer | None = None) -> Graph:
        """Returns the part of a rank: its destinations over the sources it needs. Default: this process's, which
        fetches them.

        Operators take it in place of the whole graph, with the features of this process's nodes. The first call
        exchanges the lists of nodes, so all processes must make it. Under transport="heads" it is the whole graph, of
        which the process computes some heads. "auto" chooses for a `layer`, which models inside `sharded` pass; without
        one it takes the halo.
        """
        if rank is not None and (self.group is None or rank != self.rank):
            return self._part(rank).graph
        transport = self.transport_of(layer)
        if transport not in self._shards:
            self._agree(transport, layer)
            self._shards[transport] = _VIEWS[transport](self)
        return self._shards[transport]

    def transport_of(self, layer: Layer | None = None) -> str:
        """Returns the transport of a layer: the partition's own, or with "auto" the one by which the busiest rank
        receives the fewest bytes in the forward pass of a dot-product attention. Each process plans its own part, so
        all must call it."""
        if self.transport != "auto":
            return self.transport
        if layer is None or not_by_node(layer.attention) is not None or not hasattr(layer.attention, "head_dim"):
            return "halo"
        attention = layer.attention
        num_heads, kv_heads = heads.heads_of(attention)
        shape = (num_heads, kv_heads, attention.head_dim)
        width = 2 * kv_heads * attention.head_dim
        if isinstance(attention, DotProduct):
            width = min(width, attention.to_key.in_features)
        most = {"halo": 4 * width * self._fetched}
        if heads.refusal(layer, self.ranks) is None:
            most["heads"] = max(self.head_bytes(*shape))
        if refusal_in_pieces(layer) is None and not layer.drops_edges and self._hubs.any():
            size = width, num_heads, attention.head_dim
            if size not in self._most_by_queries:
                self._most_by_queries[size] = self._most(lambda rank: self._query_bytes(rank, *size))
            most["queries"] = self._most_by_queries[size]
        return min(most, key=lambda name: most[name])

    def scatter(self, x: Tensor, dim: int = -2, *, rank: int | None = None) -> Tensor:
        """Returns this process's rows of x, which has a row for each destination along `dim`. Nothing is sent."""
        rank = self.rank if rank is None else rank
        self._check(x, dim, self.dst.num_nodes, "all destinations")
        block = self.dst.block(rank)
        if block is not None:
            return x.narrow(dim, block[0], block[1] - block[0])
        return x.index_select(dim, self.dst.nodes(rank).to(x.device))

    def gather(self, x: Tensor, dim: int = -2) -> Tensor:
        """Returns the rows of all processes in the order of the whole graph, on every process. For results; it has no
        gradient."""
        self._check(x, dim, self.dst.sizes[self.rank], "this process's destinations")
        assert self.group is not None
        return self.dst.gather(x, dim, self.group)

    def plans(self) -> list[RankPlan]:
        """Returns the work of each rank."""
        return list(self._plans)

    @cached_property
    def _plans(self) -> list[RankPlan]:
        parts = (self._part(rank) for rank in range(self.ranks))
        edges, fetched = zip(*((part.graph.num_edges, part.fetched) for part in parts), strict=True)
        fetches, sends = (torch.tensor(fetched).sum(dim).tolist() for dim in (1, 0))
        return [RankPlan(*of_rank) for of_rank in zip(self.dst.sizes, edges, fetches, sends, strict=True)]

    def fetched_bytes(self, width: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> list[int]:
        """Returns the bytes that arrive at each rank in the forward pass of a layer: fetched sources * width * batch *
        size of a number. As many leave it in the backward pass."""
        return [plan.fetches * width * batch * dtype.itemsize for plan in self.plans()]

    def head_bytes(
        self,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
    ) -> list[int]:
        """Returns the bytes that arrive at each rank in the forward pass of a layer under transport="heads".

        Raises:
            ValueError: if the ranks do not divide the heads.
        """
        if num_heads % self.ranks or (kv_heads % self.ranks and self.ranks % kv_heads):
            raise ValueError(f"{self.ranks} ranks do not divide {num_heads} heads of queries and {kv_heads} of keys")
        query = num_heads // self.ranks
        shared = max(1, kv_heads // self.ranks)
        numbers = [
            (self.dst.num_nodes - mine) * query  # queries of other ranks' nodes
            + mine * (num_heads - query)  # results of the other heads
            + (self.src.num_nodes - sources) * 2 * shared
            for mine, sources in zip(self.dst.sizes, self.src.sizes, strict=True)
        ]
        return [n * head_dim * batch * dtype.itemsize for n in numbers]

    def query_bytes(self, width: int, num_heads: int, head_dim: int) -> list[int]:
        """Returns the bytes that arrive at each rank in the forward pass of a layer of float32 under
        transport="queries", where `width` is that of the sources' features."""
        return [self._query_bytes(rank, width, num_heads, head_dim) for rank in range(self.ranks)]

    def _query_bytes(self, rank: int, width: int, num_heads: int, head_dim: int) -> int:
        asked, results = queries.hub_traffic(self._hubs, self.dst)[rank]
        sources = queries.fetched(self.graph, self._hubs, self.dst, self.src, rank)
        # results travel with their lse
        return 4 * (sources * width + asked * num_heads * head_dim + results * num_heads * (head_dim + 1))

    @cached_property
    def _hubs(self) -> Tensor:
        received = partial(queries.received, self.graph, dst=self.dst, src=self.src)
        return queries.choose_hubs(self.graph, self.ranks, lambda hubs: self._most(partial(received, hubs)))

    @cached_property
    def _fetched(self) -> int:
        return self._most(lambda rank: sum(self._part(rank).fetched))

    def _most(self, of_rank: Callable[[int], int]) -> int:
        """The largest number of a rank. Each process computes its own; without processes, this one computes all."""
        if self.group is None:
            return max(map(of_rank, range(self.ranks)))
        return max(map(max, agreement.gather("a plan", self.group, [of_rank(self.rank)])))

    def explain(
        self, width: int = 64, dtype: torch.dtype = torch.float32, batch: int = 1, *, num_heads: int | None = None
    ) -> str:
        """Returns a table of nodes, edges and bytes of each rank, for features of `width` numbers in a layer. With
        `num_heads` of width / num_heads also the bytes of transport="heads"."""
        plans = self.plans()
        nbytes = self.fetched_bytes(width, dtype, batch)
        whole = max(1, self.src.num_nodes - self.src.num_nodes // self.ranks)
        lines = [
            f"{self.graph} over {self.ranks} ranks",
            f"{'rank':>4}  {'nodes':>12}  {'edges':>16}  {'fetches':>12}  {'of all others':>13}  {'bytes a layer':>14}",
        ]
        for rank, (plan, size) in enumerate(zip(plans, nbytes, strict=True)):
            lines.append(
                f"{rank:>4}  {plan.nodes:>12,}  {plan.edges:>16,}  {plan.fetches:>12,}  {plan.fetches / whole:>13.1%}  "
                f"{size:>14,}"
            )
        mean = sum(plan.edges for plan in plans) / self.ranks
        busiest = max(plan.edges for plan in plans) / mean if mean else 1.0
        lines.append(f"the busiest rank has {busiest:.2f} times the mean edges; bytes are for {width} x {dtype}")
        if num_heads is not None:
            try:
                by_heads = max(self.head_bytes(num_heads, num_heads, width // num_heads, dtype, batch))
                less = "less" if by_heads < max(nbytes) else "no less"
                lines.append(f'transport="heads" brings {by_heads:,} bytes to the busiest rank, {less} than the halo')
            except ValueError as error:
                lines.append(f'transport="heads" cannot run: {error}')
        return "\n".join(lines)

    def _part(self, rank: int) -> Part:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there are ranks 0 to {self.ranks - 1}; got {rank}")
        if self.group is None or rank != self.rank:
            return Part.of(self.graph, rank, self.dst, self.src)
        return self._own_part

    @cached_property
    def _own_part(self) -> Part:
        return Part.of(self.graph, self.rank, self.dst, self.src)

    def _agree(self, transport: str, layer: Layer | None) -> None:
        """Raises ValueError on every process unless all divide the same graph alike, for the same features."""
        assert self.group is not None
        owners = tuple(x for of in (self.dst, self.src) for x in (of.bounds, of.owner))
        edges = f"{agreement.of_graph(self.graph)[:8]} and {agreement.digest(owners)[:8]}"
        facts = f"{self.graph} (edges and owners: {edges}), transport {transport!r}, {agreement.features(layer)}"
        agreement.gather(facts, self.group)

    @staticmethod
    def _check(x: Any, dim: int, expected: int, whose: str) -> None:
        if x.shape[dim] != expected:
            raise ValueError(f"x must hold the rows of {whose}, {expected}, along dimension {dim}; got {list(x.shape)}")

    def __repr__(self) -> str:
        return f"Partition({self.graph} over {self.ranks} ranks)"


_VIEWS: dict[str, Callable[[Any], Graph]] = {
    "halo": lambda whole: halo.view_of(whole._own_part, whole.src, whole.group),
    "heads": lambda whole: heads.view_of(whole.graph, whole.dst, whole.src, whole.group),
    "queries": lambda whole: queries.view_of(whole.graph, whole._hubs, whole.dst, whole.src, whole.group),
    "stream": lambda whole: stream.view_of(whole.graph, whole.dst, whole.src, whole.group),
}
"""The graph of this process by transport, from the partition."""

TRANSPORTS = ("auto", *_VIEWS)
