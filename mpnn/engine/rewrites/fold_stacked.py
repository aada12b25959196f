"""Rounds over graphs that differ by item and head, as rounds over one graph.

Item b and head h become nodes: destination i of their graph is node (b * H + h) * N + i of the folded graph. So every
backend runs these rounds, and none knows of them. Groups of heads may share a graph, and a graph's heads may share
their keys and values: neither is copied. What is stored per edge has no common order, and is refused.
"""

from functools import partial
from typing import ClassVar, cast

from torch import Tensor

from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner
from mpnn.graph import Graph
from mpnn.graph.edge_tables import TABLES, EmbeddingTable, PerEdge
from mpnn.graph.relations import Relation
from mpnn.graph.stacked import StackedGraph
from mpnn.round import Result, Round
from mpnn.round.needs import AGGREGATES, ANYWHERE, NORMALIZED, WEIGHED, by_rule, first, on_edges
from mpnn.scores import Role

_ON_EDGES = ("bias", "edge_key", "edge_value", "edge")
_PER_EDGE = "graphs that differ by item and head have no common list of edges, so numbers of edges do not fit"
_STORED = frozenset().union(*(on_edges(name) - by_rule(name) for name in _ON_EDGES))


class FoldStacked(Rewrite):
    NAME = "graphs of items and heads as one"
    SERVES = (ANYWHERE | AGGREGATES | NORMALIZED | WEIGHED | by_rule("edge_value")) - _STORED - {"explicit graph"}
    SERVES |= {"stacked graph", "dropout", "aggregate of parts", "own aggregate", "return_lse", "sinks"}
    SERVES |= {"keep_accumulate_dtype"}
    REASONS: ClassVar = dict.fromkeys(_STORED, _PER_EDGE) | {
        "return_weights": "graphs that differ by item and head have no common list of edges; run `entry(item, head)` "
        "of it",
    }
    same_work = True

    def applies(self, round: Round) -> bool:
        return bool(round.graph.stack)

    def refusal(self, round: Round) -> str | None:
        graph = cast(StackedGraph, round.graph)
        batch = f"{graph} needs features of a batch of {graph.items}; got {list(round.value.shape)}"
        heads = f"{graph} has graphs for {graph.heads} heads, which do not divide {round.heads} heads"
        on_edges = [data for _, data, role in round.features if role.of == "edge" and data is not None]
        reasons = {
            batch: graph.items > 1 and round.batch != (graph.items,),
            heads: round.heads % graph.heads,
            _PER_EDGE: not all(map(_is_rule, on_edges)),  # an own score, whose needs do not say it
        }
        if (reason := first(reasons)) is not None:
            return reason
        names: list[str] = []

        def find(x: Tensor, name: str, role: Role) -> Tensor:
            # A parameter, such as the vector of AdditiveV2, has an entry for each head and none for a node.
            names.extend([name] if role.of == "parameter" else [])
            return x

        round.map(find)
        if names and graph.heads > 1:
            return f"{names[0]} belongs to all heads, and the heads of {graph} become nodes; compute it outside"
        if _source_heads(_with_all_biases(round), graph.heads) is None:
            counts = sorted(_counts_of_sources(round))
            return f"keys, values and biases have {counts} heads, which do not fit graphs for {graph.heads} heads"
        return None

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        unfold = partial(_to_heads, round)

        def finish(result: Result) -> Result:
            return Result(unfold(result.out, 2), lse=None if result.lse is None else unfold(result.lse, 1))

        return fold(round), finish


def fold(round: Round) -> Round:
    """The round over the folded graph."""
    graph = cast(StackedGraph, round.graph)
    round = _with_all_biases(round)
    shared = cast(int, _source_heads(round, graph.heads))
    folded = graph.folded(shared)
    per_edge = round.map_edges(partial(_per_edge, graph, folded, round))

    def visit(x: Tensor, name: str, role: Role) -> Tensor:
        # Data of edges is looked up already, and parameters are shared by all nodes.
        if role.of in ("dst", "src"):
            return _to_nodes(graph, x, graph.heads if role.of == "dst" else shared, role.trailing)
        return x

    return per_edge.map(visit).with_fields(graph=folded)


def _with_all_biases(round: Round) -> Round:
    """The round with biases of nodes for each entry of the batch and each head."""
    dst_bias, src_bias = round.node_biases()
    return round.with_fields(
        dst_bias=None if round.dst_bias is None else dst_bias,
        src_bias=None if round.src_bias is None else src_bias,
    )


def _counts_of_sources(round: Round) -> set[int]:
    """The numbers of heads of all features of sources."""
    sources = [(x, role.trailing) for _, x, role in round.features if role.of == "src"]
    sources += [] if round.src_bias is None else [(round.src_bias, 1)]
    return {x.shape[-trailing] for x, trailing in (*sources, (round.value, 2))}


def _source_heads(round: Round, heads: int) -> int | None:
    """How many heads of the sources become nodes: all, or fewer if graphs of several heads share their sources. None
    if the features of sources have numbers of heads that do not fit."""
    counts = _counts_of_sources(round)
    if all(count % heads == 0 for count in counts):
        return heads
    return min(counts) if len(counts) == 1 and heads % min(counts) == 0 else None


def _is_rule(data: PerEdge) -> bool:
    return isinstance(data, EmbeddingTable) and type(data) in TABLES and data.relation is not None


def _to_nodes(graph: StackedGraph, x: Tensor, heads: int, trailing: int) -> Tensor:
    """x [..., N, H, D] as [..., heads * N, H / heads, D], and with several items as [items * heads * N, ...]."""
    apart = x.unflatten(-trailing, (heads, -1)).transpose(-trailing - 1, -trailing - 2)
    x = apart.flatten(-trailing - 2, -trailing - 1)
    return x.flatten(0, 1) if graph.items > 1 else x


def _to_heads(round: Round, x: Tensor, trailing: int) -> Tensor:
    """The inverse of `_to_nodes` for results of destinations."""
    graph = cast(StackedGraph, round.graph)
    if graph.items > 1:
        x = x.unflatten(0, (graph.items, -1))
    apart = x.unflatten(-trailing - 1, (graph.heads, -1)).transpose(-trailing - 2, -trailing - 1)
    return apart.flatten(-trailing - 1, -trailing)


def _per_edge(graph: StackedGraph, folded: Graph, round: Round, data: PerEdge) -> PerEdge:
    """A table by a rule of edge types, looked up for each edge of the folded graph and its head."""
    by_rule = cast(EmbeddingTable, data)
    src, dst = folded.ends
    at_dst, at_src = graph.node_positions()
    types = cast(Relation, by_rule.relation).ids(at_dst[dst % graph.num_dst], at_src[src % graph.num_src])
    table = by_rule.table.to(round.accumulate_dtype)
    table = table.expand(-1, round.heads, *table.shape[2:]).unflatten(1, (graph.heads, -1))
    # Type t of head h is row t * heads + h, so that one index finds both.
    return table.flatten(0, 1).index_select(0, types * graph.heads + dst // graph.num_dst % graph.heads)
