"""The part of a graph that one process computes, and the sources that it fetches for it: its halo.

The halo travels in one all-to-all. In the backward pass, gradients travel back the same way and are added at the
owner, one rank after the other, so that the sum has a fixed order.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpnn.attention import Attention
from mpnn.attention.spec import KeyValue
from mpnn.distributed.groups import all_to_all
from mpnn.distributed.owners import Owners
from mpnn.graph import Graph, subgraphs
from mpnn.graph.exchange import Exchange
from mpnn.round import Round


@dataclass(frozen=True, eq=False)
class Part:
    """The part of one rank.

    Attributes:
        graph: its destinations over its sources. Positions are those of the whole graph.
        sources: the numbers of the sources in the whole graph, int64: the rank's own nodes and its halo. Those of a
            structured graph are ascending; those of an explicit one begin with the own nodes, so that features need no
            permutation.
        own: which of the sources are the rank's own nodes.
        fetched: the number of sources that it fetches from each rank; 0 from itself.
    """

    graph: Graph
    sources: Tensor
    own: Tensor
    fetched: list[int]

    @staticmethod
    def of(graph: Graph, rank: int, dst: Owners, src: Owners) -> "Part":
        """The part of `rank`, whose destinations and sources have these owners."""
        rows, nodes = rows_of(graph, rank, dst), dst.nodes(rank).to(graph.device)
        mine = src.nodes(rank).to(graph.device)
        sources, part = rows.compact(mine)
        owner = src.of(sources.cpu())
        fetched = torch.bincount(owner, minlength=src.ranks)
        fetched[rank] = 0
        if part.is_explicit:
            owner[owner == rank] = -1
            order = owner.argsort(stable=True).to(graph.device)
            sources, part = sources[order], subgraphs.with_sources(part, order)
        own = torch.arange(len(mine), device=graph.device) if part.is_explicit else torch.searchsorted(sources, mine)
        part.name = graph.name
        part.node_ids = (nodes.int(), sources.int())
        return Part(part, sources, own, fetched.tolist())


def rows_of(graph: Graph, rank: int, dst: Owners) -> Graph:
    """The destinations of a rank over all sources."""
    block = dst.block(rank)
    return graph.rows(*block) if block is not None else subgraphs.take(graph, dst.nodes(rank).to(graph.device))


class HaloExchange(Exchange):
    """`exchange(x)` maps features of a process's own nodes to those of all sources of its part: x [..., own, d] ->
    [..., sources, d], or another `dim`. All processes of the group must call it together. See
    `mpnn.graph.exchange.Exchange`.

    Attributes:
        leaving: which of the own rows travel to each rank, int64. arriving: the numbers of rows from each rank.
    """

    def __init__(self, part: Part, owners: Owners, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        device = part.graph.device
        self.own, self.group = part.own, group
        self.rows = part.graph.num_dst, len(part.own)
        remote = torch.ones(len(part.sources), dtype=torch.bool, device=device)
        remote[part.own] = False
        wanted = part.sources[remote].cpu()
        by_owner = owners.of(wanted).argsort(stable=True)
        # Where the own rows and those of each owner go among the sources. If they stay together, in order, they are
        # concatenated around the own ones, else permuted.
        fetched = remote.nonzero().squeeze(1)[by_owner.to(device)]
        own_first = int(part.own[0]) if len(part.own) else 0
        self._before = int((fetched < own_first).sum())
        place = torch.cat([fetched[: self._before], part.own, fetched[self._before :]])
        self._order = None if torch.equal(place, torch.arange(len(place), device=device)) else place.argsort()
        self.arriving = part.fetched
        leaving = torch.empty(owners.ranks, dtype=torch.int64, device=device)
        dist.all_to_all_single(leaving, torch.tensor(part.fetched, device=device), group=group)
        self._sizes = leaving.tolist()
        asked = torch.empty(sum(self._sizes), dtype=torch.int64, device=device)
        dist.all_to_all_single(asked, wanted[by_owner].to(device), self._sizes, self.arriving, group=group)
        mine = owners.nodes(rank).to(device)
        self.leaving = list(torch.searchsorted(mine, asked).split(self._sizes))
        assert self._sizes[rank] == 0

    def rounds(
        self, attention: Attention, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Round, ...]:
        rounds: tuple[Round, ...] = super().rounds(attention, dst, src, graph, edge_attr)
        if attention.training and attention.dropout and rounds[0].graph.node_ids is None:
            raise ValueError(
                "this attention computes over a graph of its own, whose weights the processes do not drop alike: set "
                "its dropout to 0"
            )
        return rounds

    def __call__(self, x: Tensor, dim: int = -2) -> Tensor:
        rows = x.movedim(dim, 0)
        fetched = _Fetch.apply(rows, self)
        rows = torch.cat([fetched[: self._before], rows, fetched[self._before :]])
        rows = rows if self._order is None else rows.index_select(0, self._order)
        return rows.movedim(0, dim)

    def send(self, rows: Tensor) -> Tensor:
        """The rows that other processes own, in the order of their owners: [own, ...] -> [fetched, ...]."""
        leaving = torch.cat([rows.index_select(0, index) for index in self.leaving])
        arrived = all_to_all(leaving, self.arriving, self._sizes, self.group)
        self.received += arrived.nbytes
        return arrived

    def send_back(self, gradient: Tensor, own: int) -> Tensor:
        """The sum of the gradients that other processes have for the own rows: [fetched, ...] -> [own, ...]."""
        arrived = all_to_all(gradient.contiguous(), self._sizes, self.arriving, self.group)
        total = arrived.new_zeros(own, *arrived.shape[1:])
        for index, part in zip(self.leaving, arrived.split(self._sizes), strict=True):
            total.index_add_(0, index, part)  # an index occurs once here, so the order of the sum is that of the ranks
        return total


class OwnExchange(Exchange):
    """Computes queries, keys and values of the own nodes before anything travels."""

    def __init__(self, graph: Graph, dst: Owners, src: Owners, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks, self.group = dist.get_rank(group), dst.ranks, group
        self.rows = dst.sizes[self.rank], src.sizes[self.rank]
        none = torch.zeros(2, 0, dtype=torch.int64, device=graph.device)
        self._own_nodes = Graph.from_edges(none, *self.rows)  # which says their positions
        self._own_nodes.positions = tuple(  # type: ignore[assignment]
            at[owners.nodes(self.rank).to(graph.device)]
            for at, owners in zip(graph.node_positions(), (dst, src), strict=True)
        )

    def rounds(
        self, attention: Attention, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Round, ...]:
        assert isinstance(attention, KeyValue)
        return (attention.round(*attention.project(dst, src, self._own_nodes), graph, edge_attr),)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: HaloExchange) -> Tensor:
        ctx.exchange, ctx.own = exchange, len(rows)
        return exchange.send(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Return.apply(gradient, ctx.exchange, ctx.own), None


class _Return(torch.autograd.Function):
    """The gradient of `_Fetch`, and the other way round, so that gradients can be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, exchange: HaloExchange, own: int) -> Tensor:
        ctx.exchange = exchange
        return exchange.send_back(gradient, own)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> Any:
        return _Fetch.apply(rows, ctx.exchange), None, None
