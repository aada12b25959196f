"""Attention within cliques whose nodes are not consecutive, such as windows of an image: the same attention within
documents, over the nodes in the order of their cliques.

    out = P^T attend( documents, P query, P key, P value )        P sorts nodes by clique

So the kernels of tiles, which need consecutive nodes, run any graph that is blocks after a permutation.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from mpnn.backends.cost_model import Estimate
from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner, work
from mpnn.graph import Graph
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, per_edge
from mpnn.graph.relations import Relation
from mpnn.kernels.dense import permute
from mpnn.round import Result, Round
from mpnn.round.needs import DROPS, FLOATS, first, on_edges
from mpnn.scores import Dot


class CliquesInOrder(Rewrite):
    NAME = "cliques in order"
    SERVES = (
        FLOATS | DROPS | on_edges("bias")
        | {"cpu", "Dot", "softmax", "softcap", "sum", "bias by nodes", "gradient"}
        | {"return_lse", "keep_accumulate_dtype"}
    )  # fmt: skip

    def applies(self, round: Round) -> bool:
        return isinstance(round.score, Dot)

    def refusal(self, round: Round) -> str | None:
        reasons = {
            "the graph is not made of cliques whose nodes are scattered": not round.graph.is_scattered,
            "positions of nodes are given": round.graph.positions is not None,
        }
        return first(reasons)

    def estimate(self, round: Round) -> Estimate:
        nodes = round.batch.numel() * (round.graph.num_dst * round.heads * 2 + round.graph.num_src * round.heads * 2)
        numbers = float(nodes * round.value.shape[-1])
        return work({"call": 4.0, "copied number": numbers}, round, numbers * round.accumulate_dtype.itemsize)

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        graph = round.graph
        sorted_nodes = graph.cached("cliques in order", lambda: _sort(graph))

        def by_clique(x: Tensor, trailing: int) -> Tensor:
            return permute(x, sorted_nodes.order, sorted_nodes.inverse, -1 - trailing)

        score = cast(Dot, round.score)
        score = Dot(by_clique(score.query, 2), by_clique(score.key, 2), score.scale, score.edge_key, score.softcap)
        round_in_order = round.with_fields(
            graph=sorted_nodes.graph,
            value=by_clique(round.value, 2),
            score=score,
            bias=tuple(_on_edges(bias, round, sorted_nodes) for bias in round.bias),
            dst_bias=None if round.dst_bias is None else by_clique(round.dst_bias, 1),
            src_bias=None if round.src_bias is None else by_clique(round.src_bias, 1),
        )

        def finish(result: Result) -> Result:
            def back(x: Tensor, trailing: int) -> Tensor:
                return permute(x, sorted_nodes.inverse, sorted_nodes.order, -1 - trailing)

            return Result(back(result.out, 2), lse=None if result.lse is None else back(result.lse, 1))

        return round_in_order, finish


class _Sorted(NamedTuple):
    """The nodes by clique: their order and its inverse, int64 [N], and the graph of documents over them."""

    order: Tensor
    inverse: Tensor
    graph: Graph


def _sort(graph: Graph) -> _Sorted:
    parts: Any = graph.parts
    order = parts.order
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    sorted_graph = Graph.from_labels(np.repeat(np.arange(parts.count), parts.lengths))
    # Dropout hashes the numbers that nodes have in the whole graph.
    known = graph.node_ids
    ids = torch.from_numpy(order)
    sorted_graph.node_ids = (
        (ids.int(), ids.int()) if known is None else (known[0].index_select(0, ids), known[1].index_select(0, ids))
    )
    return _Sorted(ids, torch.from_numpy(inverse), sorted_graph)


def _on_edges(bias: PerEdge, round: Round, nodes: _Sorted) -> Tensor:
    """A bias as numbers of the edges of the sorted graph, [..., E, H]."""
    graph = round.graph
    if isinstance(bias, EmbeddingTable) and bias.relation is not None:
        rule = bias.relation
        types = bias.cached(graph, "types of cliques in order", lambda: _types(rule, graph, nodes))
        return bias.table.to(round.accumulate_dtype).index_select(0, types)
    numbers = per_edge(bias, graph, round.accumulate_dtype)
    return numbers.index_select(-2, graph.cached("edges of cliques in order", lambda: _edges(nodes)))


def _types(rule: Relation, graph: Graph, nodes: _Sorted) -> Tensor:
    """The type of each edge of the sorted graph. Rules read the numbers of nodes."""
    src, dst = nodes.graph.ends
    return rule.ids(nodes.order.index_select(0, dst) + graph.shift, nodes.order.index_select(0, src))


def _edges(nodes: _Sorted) -> Tensor:
    """The number that each edge of the sorted graph has in the whole graph, whose edges are listed row by row."""
    src, dst = (nodes.order.index_select(0, end) for end in nodes.graph.ends)
    return (dst * len(nodes.order) + src).argsort().argsort()
