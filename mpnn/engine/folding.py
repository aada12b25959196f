"""Rounds over graphs that differ by item and head, as rounds over one graph.

Item b and head h become nodes: destination i of their graph is node (b * H + h) * N + i of the folded graph. So every
backend runs these rounds, and none knows of them. Groups of heads may share a graph, and a graph's heads may share
their keys and values: neither is copied.

A round is folded only if all of its needs are known here. What is stored per edge has no common order, and is refused.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from mpnn import validation
from mpnn.edge_tables import TABLES, EmbeddingTable, PerEdge
from mpnn.graph import Graph
from mpnn.graph.stacked import StackedGraph
from mpnn.kernels.sinks import share_of_edges
from mpnn.needs import AGGREGATES, DEVICES, FLOATS, NORMALIZED, by_rule, missing, on_edges
from mpnn.round import Result, Round
from mpnn.scores import Role

_ON_EDGES = ("bias", "edge_key", "edge_value", "edge")
_BY_RULE = frozenset().union(*map(by_rule, _ON_EDGES))
SERVES = AGGREGATES | DEVICES | FLOATS | NORMALIZED | _BY_RULE | {
    "no score", "Dot", "AdditiveScore", "AdditiveV2Score", "own score", "own activation", "softcap", "dropout",
    "bias by nodes", "aggregate of parts", "own aggregate", "return_lse", "sinks", "gradient",
}  # fmt: skip
_PER_EDGE = "graphs that differ by item and head have no common list of edges, so numbers of edges do not fit"
_REASONS = {
    **{need: _PER_EDGE for name in _ON_EDGES for need in on_edges(name) - by_rule(name)},
    "return_weights": "graphs that differ by item and head have no common list of edges; run `entry(item, head)` of it",
}


def run(round: Round, run_folded: Callable[[Round], Result]) -> Result:
    """Runs a round over a stacked graph by `run_folded`, which runs one over a single graph."""
    sinks, graph = round.sinks, cast(StackedGraph, round.graph)
    folded = run_folded(fold(round))
    unfold = partial(_to_heads, round)
    out, lse = unfold(folded.out, 2), None if folded.lse is None else unfold(folded.lse, 1)
    if sinks is None or graph.heads == 1:
        return Result(out, lse=lse)
    assert lse is not None
    return Result((out * share_of_edges(lse, sinks)[..., None]).to(out.dtype))


def fold(round: Round) -> Round:
    """The round over the folded graph.

    Raises:
        ValueError, TypeError: if the parts of the round do not fit together, or cannot be folded.
    """
    graph = cast(StackedGraph, round.graph)
    if (reason := missing(round, SERVES, _REASONS)) is not None:
        raise ValueError(f"{graph} cannot run this: {reason}")
    validation.round(round)
    if graph.items > 1 and round.batch != (graph.items,):
        raise ValueError(f"{graph} needs features of a batch of {graph.items}; got {list(round.value.shape)}")
    if round.heads % graph.heads:
        raise ValueError(f"{graph} has graphs for {graph.heads} heads, which do not divide {round.heads} heads")
    dst_bias, src_bias = round.node_biases()  # for each entry of the batch and each head
    round = replace(
        round,
        dst_bias=None if round.dst_bias is None else dst_bias,
        src_bias=None if round.src_bias is None else src_bias,
    )
    shared = _source_heads(round, graph.heads)
    folded = graph.folded(shared)
    per_edge = round.map_edges(partial(_per_edge, graph, folded, round))

    def visit(x: Tensor, name: str, role: Role) -> Tensor:
        if role.of in ("dst", "src"):
            return _to_nodes(graph, x, graph.heads if role.of == "dst" else shared, role.trailing)
        if role.of == "parameter" and graph.heads > 1:
            raise ValueError(f"{name} belongs to all heads, and the heads of {graph} become nodes; compute it outside")
        return x

    if round.sinks is None or graph.heads == 1:
        return replace(per_edge.map(visit), graph=folded)
    return replace(replace(per_edge, sinks=None, return_lse=True).map(visit), graph=folded)


def _source_heads(round: Round, heads: int) -> int:
    """How many heads of the sources become nodes: all, or fewer if graphs of several heads share their sources."""
    score: Any = round.score
    roles = {} if score is None else score.roles
    sources = [(getattr(score, name), role.trailing) for name, role in roles.items() if role.of == "src"]
    sources += [] if round.src_bias is None else [(round.src_bias, 1)]
    counts = {x.shape[-trailing] for x, trailing in (*sources, (round.value, 2))}
    if all(count % heads == 0 for count in counts):
        return heads
    if len(counts) == 1 and heads % min(counts) == 0:
        return min(counts)
    raise ValueError(f"keys, values and biases have {sorted(counts)} heads, which do not fit graphs for {heads} heads")


def _to_nodes(graph: StackedGraph, x: Tensor, heads: int, trailing: int) -> Tensor:
    """x [..., N, H, D] as [..., heads * N, H / heads, D], and with several items as [items * heads * N, ...]."""
    if heads > 1:
        apart = x.unflatten(-trailing, (heads, -1)).transpose(-trailing - 1, -trailing - 2)
        x = apart.flatten(-trailing - 2, -trailing - 1)
    return x.flatten(0, 1) if graph.items > 1 else x


def _to_heads(round: Round, x: Tensor, trailing: int) -> Tensor:
    """The inverse of `_to_nodes` for results of destinations."""
    graph = cast(StackedGraph, round.graph)
    if graph.items > 1:
        x = x.unflatten(0, (graph.items, -1))
    if graph.heads == 1:
        return x
    apart = x.unflatten(-trailing - 1, (graph.heads, -1)).transpose(-trailing - 2, -trailing - 1)
    return apart.flatten(-trailing - 1, -trailing)


def _per_edge(graph: StackedGraph, folded: Graph, round: Round, data: PerEdge) -> PerEdge:
    """A table by a rule of edge types, looked up for each edge of the folded graph and its head."""
    if not isinstance(data, EmbeddingTable) or type(data) not in TABLES or data.relation is None:
        raise ValueError(f"{graph} cannot run this: {_PER_EDGE}")  # of an own score, whose needs do not say it
    src, dst = folded.ends
    at_dst, at_src = graph.node_positions()
    types = data.relation.ids(at_dst[dst % graph.num_dst], at_src[src % graph.num_src])
    table = data.table.to(round.accumulate_dtype)
    table = table.expand(-1, round.heads, *table.shape[2:]).unflatten(1, (graph.heads, -1))
    return table.flatten(0, 1).index_select(0, types * graph.heads + dst // graph.num_dst % graph.heads)
