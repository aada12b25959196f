"""A halo in which hubs do not fetch: destinations that attend to most of the graph, such as Longformer's global nodes,
send their queries to every process, and get partial results back, which are merged by their log-sum-exp. All other
destinations fetch their sources.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mpnn import ops
from mpnn.attention import Attention
from mpnn.attention.spec import KeyValue
from mpnn.distributed.halo import HaloExchange, Part, checked_pieces, lists, refusal_in_pieces
from mpnn.distributed.owners import Owners
from mpnn.graph import Graph
from mpnn.graph.exchange import Layer, Terms
from mpnn.graph.graph import take, without_rows
from mpnn.round import Round

Run = Callable[[Round], tuple[Tensor, "Tensor | None"]]
_THRESHOLDS = 8  # that `choose_hubs` tries


def choose_hubs(graph: Graph, ranks: int, most: Callable[[Tensor], int]) -> Tensor:
    """The destinations that should send their queries, bool [num_dst]: those with more than some number of sources, by
    which the busiest rank receives least; `most(hubs)` is what it receives."""
    degree = graph.degree().cpu()
    best = torch.zeros(graph.num_dst, dtype=torch.bool)
    if ranks == 1:
        return best
    least = None
    tried = 0
    for k in range(1, _THRESHOLDS + 1):
        hubs = degree > graph.num_src >> k
        count = int(hubs.sum())
        if count == tried or count * ranks > graph.num_dst:
            continue
        tried = count
        least = most(best) if least is None else least
        if (received := most(hubs)) < least:
            best = hubs
            least = received
    return best


def received(graph: Graph, hubs: Tensor, rank: int, dst: Owners, src: Owners) -> int:
    """The sources, queries and partial results that a rank receives in a layer, one as large as the other."""
    return fetched(graph, hubs, dst, src, rank) + sum(hub_traffic(hubs, dst)[rank])


def fetched(graph: Graph, hubs: Tensor, dst: Owners, src: Owners, rank: int) -> int:
    """The sources that a rank fetches for destinations other than hubs."""
    return sum(Part.of(without_rows(graph, hubs), rank, dst, src).fetched)


def hub_traffic(hubs: Tensor, dst: Owners) -> list[tuple[int, int]]:
    """The queries, and the partial results, that each rank receives from others."""
    own = torch.bincount(dst.of(hubs.nonzero().squeeze(1)), minlength=dst.ranks).tolist()
    return [(sum(own) - mine, mine * (dst.ranks - 1)) for mine in own]


def view_of(graph: Graph, hubs: Tensor, dst: Owners, src: Owners, group: dist.ProcessGroup) -> Graph:
    """The part of this process without the edges of `hubs`, bool [num_dst]."""
    part = Part.of(without_rows(graph, hubs), dist.get_rank(group), dst, src)
    part.graph.exchange = QueriesExchange(graph, part, hubs, dst, src, group)
    return part.graph


class QueriesExchange(HaloExchange):
    """Fetches sources, and sends the queries of hubs. See `mpnn.graph.exchange.Exchange`."""

    transport = "queries"

    def __init__(
        self, graph: Graph, part: Part, hubs: Tensor, dst: Owners, src: Owners, group: dist.ProcessGroup
    ) -> None:
        super().__init__(part, *lists(part, src, group), group)
        rank = dist.get_rank(group)
        device = graph.device
        self.ranks = dst.ranks
        nodes = hubs.nonzero().squeeze(1)
        self._owners = Owners.of_nodes(dst.of(nodes), self.ranks)
        self._mine = torch.searchsorted(dst.nodes(rank), nodes[self._owners.nodes(rank)]).to(device)
        self._own_counts = [len(self._mine)] * self.ranks
        sources = src.nodes(rank).to(device)
        self._hubs = take(graph, nodes.to(device)).columns(sources)
        self._hubs.node_ids = nodes.int().to(device), sources.int()

    def refusal(self, layer: Layer) -> str | None:
        return "hubs do not drop edges" if layer.drops_edges else refusal_in_pieces(layer)

    def rounds(
        self, attention: Attention, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Round, ...]:
        """The round of the own destinations but hubs, and that of all hubs over the process's own sources."""
        assert isinstance(attention, KeyValue)
        if edge_attr is not graph.edge_attr:
            raise ValueError('with transport="queries" edge_attr is the graph\'s: pass it to graphs.from_edges')

        def round(query: Tensor, key: Tensor, value: Tensor, graph: Graph) -> Round:
            return attention.round(query, key, value, graph, graph.edge_attr)

        return self._divided(*self.projected(attention, dst, src), round, graph)

    def terms(self, terms: Terms, round: Callable[..., Round], graph: Graph) -> tuple[Round, ...]:
        return self._divided(*self.placed(terms), round, graph)

    def _divided(
        self, query: Tensor, key: Tensor, value: Tensor, round: Callable[..., Round], graph: Graph
    ) -> tuple[Round, ...]:
        mine = query.index_select(-3, self._mine).movedim(-3, 0)
        arrived = self.all_to_all(
            mine.repeat(self.ranks, *[1] * (mine.dim() - 1)), self._owners.sizes, self._own_counts
        )
        queries = self._owners.in_order(arrived).movedim(0, -3)
        own_key, own_value = (x.index_select(-3, self.own) for x in (key, value))
        hubs = round(queries, own_key, own_value, self._hubs)
        return round(query, key, value, graph), replace(hubs, return_lse=True)

    def run(self, rounds: tuple[Round, ...], run: Run) -> tuple[Tensor, None]:
        (out, _), (part, lse) = map(run, checked_pieces(rounds, self.transport))
        assert lse is not None
        rows = self._owners.by_owner(torch.cat([part.to(lse.dtype), lse[..., None]], -1).movedim(-3, 0))
        arrived = self.all_to_all(rows, self._own_counts, self._owners.sizes)
        results = arrived.unflatten(0, (self.ranks, len(self._mine))).movedim(1, -3)  # [ranks, ..., hubs, H, D + 1]
        merged, _ = ops.merge((partial[..., :-1], partial[..., -1]) for partial in results)
        return out.index_copy(-3, self._mine, merged.to(out.dtype)), None
