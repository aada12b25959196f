"""The part of a graph that one process computes, and the sources that it fetches for it: its halo.

The halo travels in one all-to-all. In the backward pass, gradients travel back the same way and are added at the
owner, one rank after the other, so that the sum has a fixed order.

The end is shared by the other transports, which compute in pieces: sources in disjoint sets, whose results are merged
by their log-sum-exp.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpnn.aggregate import Sum
from mpnn.attention import Attention
from mpnn.attention.spec import KeyValue
from mpnn.distributed import agreement, disk
from mpnn.distributed.divided import DividedGraph
from mpnn.distributed.groups import Mesh, ask, depart, group_of
from mpnn.distributed.owners import Owners
from mpnn.graph import Graph, rng
from mpnn.graph.exchange import AttendCall, Exchange, Layer, Terms
from mpnn.graph.graph import take, with_sources
from mpnn.kernels import memory
from mpnn.round import Round
from mpnn.round.needs import class_of
from mpnn.scores import Role


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
        data: for a part of `Part.open`, rows of its own nodes by name, mapped from the disk.
        whole: for a part that its own process opened, the graph of all processes, for `mpnn.data.neighbor_batches`.
    """

    graph: Graph
    sources: Tensor
    own: Tensor
    fetched: list[int]
    data: dict[str, Tensor] = field(default_factory=dict)
    whole: DividedGraph | None = None

    @property
    def nodes(self) -> Tensor:
        """The numbers of the own nodes in the whole graph, int64."""
        return self.sources[self.own]

    @staticmethod
    def open(folder: str | os.PathLike[str], rank: int | None = None, mesh: Mesh = None) -> "Part":
        """Opens a part that `mpnn graph cut` wrote, mapped from the disk: edges are neither copied nor sent.

            part = Part.open("cut")                      # of this process
            y = model(part.data["features"], part.graph)

        Args:
            folder: that of the cut. rank: default is this process's, whose graph fetches the halo.
            mesh: the processes, as in `partition`.

        Raises:
            FileNotFoundError, ValueError: if the folder is not a cut, or the cut was not completed or is damaged.
            ValueError: if there are other numbers of processes and ranks, or another process opens another cut.
            RuntimeError: if no process group was initialized and no rank is named.
        """
        folder = Path(folder)
        group = None if rank is not None else group_of(mesh)
        rank = dist.get_rank(group) if rank is None else rank
        if not (folder / "cut.json").exists():
            raise FileNotFoundError(f"{folder} holds no cut; `mpnn graph cut` writes one")
        facts = json.loads((folder / "cut.json").read_text())
        if (facts.get("format"), facts.get("version")) != (disk.FORMAT, disk.VERSION):
            version = f"{facts.get('format')!r}, version {facts.get('version')}"
            raise ValueError(f"{folder} holds no cut that this library reads: {version}")
        ranks = int(facts["ranks"])
        if group is not None and dist.get_world_size(group) != ranks:
            raise ValueError(f"{folder} is cut for {ranks} ranks; there are {dist.get_world_size(group)} processes")
        if not 0 <= rank < ranks:
            raise ValueError(f"there are ranks 0 to {ranks - 1}; got {rank}")
        if not (folder / f"leaving-{ranks - 1}.npy").exists():
            raise ValueError(f"the cut in {folder} was not completed; the same command continues it")

        def mapped(name: str) -> Tensor:
            return torch.from_numpy(np.load(folder / f"rank-{rank}" / f"{name}.npy", mmap_mode="c"))

        nodes, halo, edges = (mapped(name) for name in ("nodes", "halo", "edges"))
        sources = torch.cat([nodes, halo])
        data: dict[str, Any] = {name: mapped(name) for name in facts["data"]}
        edge_data = {name: data.pop(name) for name in sorted(data.keys() & disk.EDGE_DATA)}
        graph = Graph(len(nodes), len(sources), edges=edges, **edge_data).validate().with_positions(nodes, sources)
        graph.name = f"rank {rank} of {folder.name}"
        graph.node_ids = (nodes, sources)
        part = Part(graph, graph.node_positions()[1], torch.arange(len(nodes)), mapped("arriving").tolist(), data)
        if group is not None:
            agreement.gather(f"the cut {facts['sha256']} in {folder}", group)
            leaving = torch.from_numpy(np.load(folder / f"leaving-{rank}.npy")).long()
            sizes = leaving[:ranks].tolist()
            rows = leaving[ranks:]
            fetched = torch.arange(len(nodes), len(sources))
            graph.exchange = HaloExchange(part, fetched, list(rows.split(sizes)), group)
            on_disk, owners = (
                np.load(folder / name, mmap_mode="c") for name in (f"rank-{rank}/edges.npy", "owners.npy")
            )
            part = replace(part, whole=DividedGraph(nodes.long(), part.sources, on_disk, owners, group, edge_data))
        return part

    @staticmethod
    def of(graph: Graph, rank: int, dst: Owners, src: Owners) -> "Part":
        """Returns the part of `rank` of a graph whose destinations and sources have these owners."""
        rows = rows_of(graph, rank, dst)
        nodes = dst.nodes(rank).to(graph.device)
        mine = src.nodes(rank).to(graph.device)
        sources, part = rows.compact(mine)
        owner = src.of(sources.cpu())
        fetched = torch.bincount(owner, minlength=src.ranks)
        fetched[rank] = 0
        if part.is_explicit:
            owner[owner == rank] = -1
            order = owner.argsort(stable=True).to(graph.device)
            sources = sources[order]
            part = with_sources(part, order)
        own = torch.arange(len(mine), device=graph.device) if part.is_explicit else torch.searchsorted(sources, mine)
        part.name = graph.name
        part.node_ids = (nodes.int(), sources.int())
        return Part(part, sources, own, fetched.tolist())


def rows_of(graph: Graph, rank: int, dst: Owners) -> Graph:
    """The destinations of a rank over all sources."""
    block = dst.block(rank)
    return graph.rows(*block) if block is not None else take(graph, dst.nodes(rank).to(graph.device))


class Transport(Exchange):
    """An exchange between the processes of a group."""

    group: dist.ProcessGroup

    def depart(self, rows: Tensor, arriving: list[int], leaving: list[int]) -> Callable[[], Tensor]:
        """Sends rows, those of each process after those of the ones before. So many arrive from each. Returns a
        function that waits for them."""
        flying, arrive = depart(rows, arriving, leaving, self.group)
        here = arriving[dist.get_rank(self.group)]
        self.received += flying.nbytes // max(len(flying), 1) * (len(flying) - here)
        return arrive

    def all_to_all(self, rows: Tensor, arriving: list[int], leaving: list[int]) -> Tensor:
        """Sends rows, as `depart`, and waits for those that arrive."""
        return self.depart(rows, arriving, leaving)()


class HaloExchange(Transport):
    """`exchange(x)` maps features of a process's own nodes to those of all sources of its part: x [..., own, d] ->
    [..., sources, d], or another `dim`. All processes of the group must call it together. See
    `mpnn.graph.exchange.Exchange`.

    An attention whose keys and values depend on single nodes computes those of the own nodes once. Then either they
    travel, or the features, of which keys and values are computed again: whichever are fewer bytes. Features travel
    while those of the own nodes are projected, and so do their gradients.

    Attributes:
        leaving: which of the own rows travel to each rank, int64. arriving: the numbers of rows from each rank.
    """

    def __init__(self, part: Part, fetched: Tensor, leaving: list[Tensor], group: dist.ProcessGroup) -> None:
        """`fetched`: which of the part's sources arrive, in the order of their owners, int64."""
        device = part.graph.device
        self.own = part.own
        self.group = group
        self.rows = part.graph.num_dst, len(part.own)
        # Where the own rows and those of each owner go among the sources. If they stay together, in order, they are
        # concatenated around the own ones, else permuted.
        own_first = int(part.own[0]) if len(part.own) else 0
        self._before = int((fetched < own_first).sum())
        place = torch.cat([fetched[: self._before], part.own, fetched[self._before :]])
        self._order = None if torch.equal(place, torch.arange(len(place), device=device)) else place.argsort()
        of_dst, of_src = part.graph.node_positions()
        self._own_nodes = nodes_at(of_dst, of_src[part.own])
        self._halo, self._nothing = nodes_at(of_dst[:0], of_src[fetched]), nodes_at(of_dst[:0], of_src[:0])
        self.arriving = part.fetched
        self.leaving = leaving
        self.sizes = [len(rows) for rows in leaving]

    def rounds(
        self, attention: Attention, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Round, ...]:
        if (
            isinstance(attention, KeyValue)
            and type(attention).forward is KeyValue.forward
            and attention.depends_on == "node"
        ):
            rounds: tuple[Round, ...] = (attention.round(*self.projected(attention, dst, src), graph, edge_attr),)
        else:
            rounds = (attention(dst, self(src), graph, edge_attr),)
        if attention.training and attention.dropout and rounds[0].graph.node_ids is None:
            raise ValueError(
                "this attention computes over a graph of its own, whose weights the processes do not drop alike: set "
                "its dropout to 0"
            )
        return rounds

    def projected(self, attention: KeyValue, dst: Tensor, src: Tensor) -> Terms:
        """Queries of the own destinations, keys and values of all sources."""
        with torch.no_grad():  # of no node, which says what keys and values are
            _, key, value = attention.project(dst[..., :0, :], src[..., :0, :], self._nothing)
        if sum(math.prod(x.shape[-2:]) * x.itemsize for x in (key, value)) <= src.shape[-1] * src.itemsize:
            return self.placed(attention.project(dst, src, self._own_nodes))
        (own,), arrive = self.share([src], -2)
        query, *terms = attention.project(own if dst is src else dst, own, self._own_nodes)
        (fetched,) = arrive()
        _, *others = attention.project(dst[..., :0, :], fetched, self._halo)
        key, value = (self._placed(x, more, -3) for x, more in zip(terms, others, strict=True))
        return query, key, value

    def terms(self, terms: Terms, round: Callable[..., Round], graph: Graph) -> tuple[Round, ...]:
        return (round(*self.placed(terms), graph),)

    def placed(self, terms: Terms) -> Terms:
        """The queries, and the keys and values of all sources for those of the own nodes."""
        query, *own = terms
        own, arrive = self.share(own, -3)
        key, value = (self._placed(*x, -3) for x in zip(own, arrive(), strict=True))
        return query, key, value

    def __call__(self, x: Tensor, dim: int = -2) -> Tensor:
        (own,), arrive = self.share([x], dim)
        (fetched,) = arrive()
        return self._placed(own, fetched, dim)

    def share(self, own: list[Tensor], dim: int) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
        """The tensors [..., own, ...], to be used in place of the given ones; and a function that waits for the rows
        along `dim` that other processes own, [..., fetched, ...], in the order of their owners. They travel in one
        all-to-all, which has begun."""
        kept, leaving = zip(*(_Take.apply(x.movedim(dim, 0), self) for x in own), strict=True)
        widths = [math.prod(x.shape[1:]) for x in leaving]
        packed = torch.cat([x.reshape(len(x), width) for x, width in zip(leaving, widths, strict=True)], 1)
        arrive = self.depart(packed, self.arriving, self.sizes)

        def fetched() -> list[Tensor]:
            rows = arrive().split(widths, 1)
            each = zip(rows, leaving, strict=True)
            return [y.to(x.dtype).reshape(len(y), *x.shape[1:]).movedim(0, dim) for y, x in each]

        return [x.movedim(0, dim) for x in kept], fetched

    def _placed(self, own: Tensor, fetched: Tensor, dim: int) -> Tensor:
        """The rows of all sources."""
        first, last = fetched.tensor_split([self._before], dim)
        rows = _Join.apply(dim, first, own, last)
        return rows if self._order is None else rows.index_select(dim, self._order)


def lists(part: Part, owners: Owners, group: dist.ProcessGroup) -> tuple[Tensor, list[Tensor]]:
    """Returns the sources of a part that arrive, in the order of their owners, and the own rows that travel to each
    rank: processes exchange lists of the sources that they need."""
    device = part.graph.device
    remote = torch.ones(len(part.sources), dtype=torch.bool, device=device)
    remote[part.own] = False
    wanted = part.sources[remote].cpu()
    by_owner = owners.of(wanted).argsort(stable=True)
    asked, sizes = ask(wanted[by_owner].to(device), part.fetched, group)
    mine = owners.nodes(dist.get_rank(group)).to(device)
    return remote.nonzero().squeeze(1)[by_owner.to(device)], list(torch.searchsorted(mine, asked).split(sizes))


def view_of(part: Part, src: Owners, group: dist.ProcessGroup) -> Graph:
    """The graph of a part, which fetches the sources that other processes own."""
    part.graph.exchange = HaloExchange(part, *lists(part, src, group), group)
    return part.graph


def nodes_at(of_dst: Tensor, of_src: Tensor) -> Graph:
    """A graph without edges, which says the positions of nodes."""
    none = torch.zeros(2, 0, dtype=torch.int64, device=of_src.device)
    return Graph.from_edges(none, len(of_dst), len(of_src)).with_positions(of_dst, of_src)


class OwnExchange(Transport):
    """Computes queries, keys and values of the own nodes before anything travels."""

    def __init__(self, graph: Graph, dst: Owners, src: Owners, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dst.ranks
        self.group = group
        self.rows = dst.sizes[self.rank], src.sizes[self.rank]
        of_dst, of_src = graph.node_positions()
        self._own_nodes = nodes_at(
            of_dst[dst.nodes(self.rank).to(graph.device)], of_src[src.nodes(self.rank).to(graph.device)]
        )

    def rounds(
        self, attention: Attention, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Round, ...]:
        assert isinstance(attention, KeyValue)
        round = partial(attention.round, edge_attr=edge_attr)
        return self.terms(attention.project(dst, src, self._own_nodes), round, graph)


class _Join(torch.autograd.Function):
    """`torch.cat`, in memory of `memory.empty`."""

    @staticmethod
    def forward(ctx: Any, dim: int, *pieces: Tensor) -> Tensor:
        ctx.dim = dim
        ctx.sizes = [x.shape[dim] for x in pieces]
        shape = list(pieces[0].shape)
        shape[dim] = sum(ctx.sizes)
        return torch.cat(pieces, dim, out=memory.empty(pieces[0], *shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *gradient.split(ctx.sizes, ctx.dim)


class _Take(torch.autograd.Function):
    """The own rows, and those that travel."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: HaloExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return rows.view_as(rows), torch.cat([rows.index_select(0, index) for index in exchange.leaving])

    @staticmethod
    def backward(ctx: Any, own: Tensor, leaving: Tensor) -> Any:
        return _Add.apply(own, leaving, ctx.exchange), None


class _Add(torch.autograd.Function):
    """The gradient of `_Take`, and the other way round, so that gradients can be differentiated."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, leaving: Tensor, exchange: HaloExchange) -> Tensor:
        ctx.exchange = exchange
        total = memory.empty(own, *own.shape).copy_(own)
        for index, part in zip(exchange.leaving, leaving.split(exchange.sizes), strict=True):
            total.index_add_(0, index, part)  # an index occurs once here, so the order of the sum is that of the ranks
        return total

    @staticmethod
    def backward(ctx: Any, total: Tensor) -> Any:
        return *_Take.apply(total, ctx.exchange), None


Kind = Literal["dst", "src", "edge", "table", "parameter"]
"""What the rows of a tensor stand for: nodes, edges, types of edges, or none of these."""

Visit = Callable[[Tensor, Kind, int], Tensor]
"""`visit(tensor, kind, trailing)`, where `trailing` dimensions from the heads on follow those of the rows."""


def not_by_node(attention: Any) -> str | None:
    """Why queries, keys and values cannot be sent instead of features, or None if they can."""
    if isinstance(attention, (KeyValue, AttendCall)) and attention.depends_on == "node":
        return None
    what = "a layer without attention" if attention is None else type(attention).__name__
    return f"{what} does not compute queries, keys and values of single nodes, as DotProduct does"


def refusal_in_pieces(layer: Layer) -> str | None:
    """Why a layer cannot be computed in pieces, or None if it can."""
    attention = layer.attention
    return not_by_node(attention) or first_of(
        (attention.normalize != "softmax", "its pieces are merged by the sums of a softmax"),
        (class_of(layer.aggregate) is not Sum, "its pieces are merged by the sums of a softmax"),
        (getattr(attention, "sinks", None) is not None, "it does not support sinks"),
        (layer.mixes_values, "it needs a layer of one hop without teleport"),
        (layer.return_weights, "the weights of its pieces are not returned"),
    )


def first_of(*reasons: tuple[bool, str]) -> str | None:
    """The first of some reasons that holds."""
    return next((sentence for holds, sentence in reasons if holds), None)


def checked_pieces(rounds: tuple[Round, ...], transport: str) -> tuple[Round, ...]:
    """The rounds of pieces, with one seed, so that all drop the edges that the whole graph does.

    Raises:
        ValueError: the round cannot be computed in pieces.
    """
    round = rounds[0]
    modules = [x for x in vars(round.score).values() if isinstance(x, nn.Module)]
    learns = any(True for module in modules for _ in module.parameters())
    reason = first_of(
        (round.sinks is not None, "it does not support sinks"),
        (learns, f"{type(round.score).__name__} holds a module, whose weights would get no gradient"),
    )
    if reason is not None:
        raise ValueError(f'transport="{transport}" cannot run this layer: {reason}; take transport="halo"')
    if not round.dropout or round.seed is not None:
        return rounds
    seed = rng.new_seed(round.value.device)
    return tuple(replace(piece, seed=seed) for piece in rounds)


def mapped(round: Round, visit: Visit) -> Round:
    """The round with `visit` applied to each of its tensors, in a fixed order. Nodes are dimension -1 - trailing."""

    def visited(x: Tensor, name: str, role: Role) -> Tensor:
        if role.of == "none" or (role.of == "parameter" and not x.dim()):
            return x
        return visit(x, role.of, x.dim() if role.of == "parameter" else role.trailing)

    return round.map(visited)


def operands(round: Round) -> list[tuple[Tensor, Kind, int]]:
    """The tensors of a round as `visit` gets them, in the order of `mapped`."""
    seen: list[tuple[Tensor, Kind, int]] = []

    def visit(x: Tensor, kind: Kind, trailing: int) -> Tensor:
        seen.append((x, kind, trailing))
        return x

    mapped(round, visit)
    return seen
