"""Attention whose heads are divided over processes (Ulysses: Jacobs et al. 2023, arXiv:2309.14509).

Queries, keys and values of a process's own nodes are exchanged for those of all nodes in its share of the heads. It
runs these heads over the whole graph, with any backend, and results are exchanged back. So what travels does not depend
on the graph: the transport for `causal()` and `complete()`, whose halo is everything.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mpnn.aggregate import Sum
from mpnn.attention.spec import KeyValue
from mpnn.distributed.halo import Kind, OwnExchange, first_of, mapped, not_by_node
from mpnn.distributed.owners import Owners
from mpnn.engine.rewrites.prepare import lower_score
from mpnn.graph import Graph
from mpnn.graph.exchange import AttendCall, Layer, Terms
from mpnn.round import Round
from mpnn.round.needs import class_of
from mpnn.scores import BUILT_IN


def refusal(layer: Layer, ranks: int) -> str | None:
    """Why the heads of a layer cannot be divided over this many ranks, or None if they can."""
    attention = layer.attention
    if (reason := not_by_node(attention)) is not None:
        return reason
    name = type(attention).__name__
    heads, shared = heads_of(attention)
    return first_of(
        (heads % ranks > 0, f"{name} has {heads} heads, which {ranks} ranks do not divide"),
        (
            shared % ranks > 0 and ranks % shared > 0,
            f"the {shared} key/value heads of {name} and {ranks} ranks do not divide each other",
        ),
        (
            class_of(layer.aggregate) is not Sum,
            f'it needs the aggregator "sum"; got {type(layer.aggregate).__name__}'
            + " with a reduce of its own" * (class_of(layer.aggregate) is None),
        ),
        (layer.return_weights, "it does not return weights: each rank has those of its heads"),
    )


def heads_of(attention: KeyValue | AttendCall) -> tuple[int, int]:
    """The numbers of heads, and of key/value heads."""
    heads = int(cast(Any, attention).heads)
    return heads, int(getattr(attention, "kv_heads", heads))


def share(heads: int, ranks: int, rank: int) -> slice:
    """The heads of a rank. Several ranks share one if there are fewer heads than ranks."""
    if heads < ranks:
        one = rank * heads // ranks
        return slice(one, one + 1)
    return slice(rank * (heads // ranks), (rank + 1) * (heads // ranks))


def view_of(graph: Graph, dst: Owners, src: Owners, group: dist.ProcessGroup) -> Graph:
    """The whole graph, over which this process computes its share of the heads."""
    view = graph.alias()
    view.exchange = HeadsExchange(graph, dst, src, group)
    dst_ids, src_ids = (torch.arange(n, dtype=torch.int32, device=graph.device) for n in (graph.num_dst, graph.num_src))
    view.node_ids = dst_ids, src_ids
    return view


class HeadsExchange(OwnExchange):
    """Divides the heads of a round over the processes of a group. See `mpnn.graph.exchange.Exchange`."""

    transport = "heads"

    def __init__(self, graph: Graph, dst: Owners, src: Owners, group: dist.ProcessGroup) -> None:
        super().__init__(graph, dst, src, group)
        self.own = torch.arange(graph.num_src, device=graph.device)  # of the graph it runs over, all nodes are its own
        self._dst = dst
        self._src = src

    def refusal(self, layer: Layer) -> str | None:
        return refusal(layer, self.ranks)

    def terms(self, terms: Terms, round: Callable[..., Round], graph: Graph) -> tuple[Round, ...]:
        """From all heads of the own nodes to the own heads of all nodes."""
        whole = lower_score(round(*terms, graph))
        if type(whole.score) not in BUILT_IN:
            raise ValueError(
                f'transport="heads" cannot run this layer: {type(whole.score).__name__} does not lower to a built-in '
                'score, so its parameters cannot be divided by heads; take transport="halo"'
            )
        heads = whole.heads
        mine = share(heads, self.ranks, self.rank)

        def visit(x: Tensor, kind: Kind, trailing: int) -> Tensor:
            if kind in ("dst", "src"):
                return self._swap(x, kind) if trailing == 2 else self._swap(x.unsqueeze(-1), kind).squeeze(-1)
            # a single row of heads serves all of them
            return x.narrow(-trailing, mine.start, mine.stop - mine.start) if x.shape[-trailing] == heads else x

        return (replace(mapped(whole, visit), head_ids=(mine.start, heads)),)

    def run(self, rounds: tuple[Round, ...], run: Callable[[Round], Any]) -> tuple[Tensor, None]:
        # the own heads of all destinations, [..., N_dst, H / ranks, D]
        out = run(rounds[0])[0]
        size = self.rows[0]
        arrived = self.all_to_all(self._dst.by_owner(out.movedim(-3, 0)), [size] * self.ranks, self._dst.sizes)
        heads = arrived.unflatten(0, (self.ranks, size)).movedim(0, -3)  # [own, batch..., ranks, H / ranks, D]
        return heads.flatten(-3, -2).movedim(0, -3), None

    def _swap(self, x: Tensor, of: str) -> Tensor:
        """All heads of the own nodes, [..., own, H, D], to the own heads of all nodes, [..., N, H / ranks, D]."""
        nodes = self._dst if of == "dst" else self._src
        shares = [x[..., share(x.shape[-2], nodes.ranks, rank), :] for rank in range(nodes.ranks)]
        leaving = torch.cat([heads.movedim(-3, 0) for heads in shares])
        arrived = self.all_to_all(leaving, nodes.sizes, [x.shape[-3]] * nodes.ranks)
        return nodes.in_order(arrived).movedim(0, -3)
