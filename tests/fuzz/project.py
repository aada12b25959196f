"""Turns a case into a graph and a request of this project, and runs it. The only file here that imports mpnn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpnn import engine, graphs, ops
from mpnn.aggregate import SUM, aggregator
from mpnn.backends import BACKENDS
from mpnn.engine.plan import refusal as why_not
from mpnn.engine.rewrites.prepare import as_planned
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import GridOffset, Offset, Relation
from mpnn.graph.topology import Topology
from mpnn.ops import NodeBias
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU


@dataclass(frozen=True)
class Custom(Relation):
    """Types that no offset tells."""

    count: int

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (dst * 5 + src * src) % self.count


_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}
_RELATIONS = {"offset": Offset, "grid": GridOffset, "custom": Custom}


def graph_of(spec: dict[str, Any]) -> Graph:
    """The project's graph of a case."""
    if "edges" in spec:
        index = torch.tensor(spec["edges"], dtype=torch.int64).view(2, -1)
        kind = None if spec.get("edge_type") is None else torch.tensor(spec["edge_type"], dtype=torch.int64)
        graph = graphs.from_edges(index, num_dst=spec["num_dst"], num_src=spec["num_src"], edge_type=kind)
    elif "parent" in spec:
        within = None if spec["radius"] is None else graphs.causal() & graphs.window(spec["radius"])
        graph = graphs.tree(torch.tensor(spec["parent"], dtype=torch.int64), within)
    elif "choice" in spec:
        graph = _chosen(spec)
    else:
        topology = topology_of(spec["rule"])
        if spec.get("related"):
            topology = topology.with_relation(_relation(spec["related"]))
        graph = topology.bind(spec["num_dst"], spec["num_src"])
    for change in spec.get("changes", ()):
        graph = _changed(graph, *change)
    return graph


def _chosen(spec: dict[str, Any]) -> Graph:
    n, m, size = spec["num_dst"], spec["num_src"], spec["size"]
    listed = torch.tensor(spec["choice"], dtype=torch.int64).view(*spec["stack"], spec["rows"], -1)
    if size is None:
        graph = graphs.chosen(listed, m)
    else:
        count = -(-m // size)
        flags = torch.zeros(*listed.shape[:-1], count + 1, dtype=torch.bool).scatter(-1, listed % (count + 1), True)
        graph = graphs.blocks(flags[..., :count], size, m, num_dst=n)
    return graph & topology_of(spec["rule"]) if spec["rule"] else graph


def topology_of(rule: Any) -> Topology:
    name, *arguments = rule
    if name == "~":
        return ~topology_of(arguments[0])
    if name in ("|", "&", "-"):
        left, right = map(topology_of, arguments)
        joined: Topology = {"|": left.__or__, "&": left.__and__, "-": left.__sub__}[name](right)
        return joined
    found: Topology = getattr(graphs, name)(*arguments)
    return found


def _changed(graph: Graph, name: str, *arguments: Any) -> Graph:
    match name:
        case "rows":
            return graph.rows(*arguments)
        case "compact":
            return graph.compact()[1]
        case "subgraph":
            keep = torch.zeros(graph.num_dst, dtype=torch.bool)
            keep[list(arguments[0])] = True
            return graph.subgraph(keep)
        case "reverse":
            return graph.reverse()
        case "positions":
            return graph.with_positions(*(torch.tensor(at, dtype=torch.int64) for at in arguments))
        case "reordered":
            return graph.reordered(*arguments)
        case "and":
            return graph & topology_of(arguments[0])
        case "minus":
            return graph - topology_of(arguments[0])
        case "self_loops":
            return graph.with_self_loops()
        case "undirected":
            return graph.undirected()
    raise ValueError(f"no change {name!r}")


def request_of(case: dict[str, Any], graph: Graph, leaves: dict[str, Tensor]) -> Round:
    """The request of a case over its graph."""
    score = case["score"]

    def per_edge(name: str, spec: dict[str, Any] | None) -> Any:
        if not spec:
            return None
        if spec["form"] == "edges":
            return leaves[name]
        table = BiasTable if name.startswith("bias") else EmbeddingTable
        return table(leaves[name], None if spec["relation"] is None else _relation(spec["relation"]))

    asked: Any = None
    if score and score["kind"] == "dot":
        edge_key = per_edge("edge_key", score["edge_key"])
        asked = Dot(leaves["query"], leaves["key"], score["scale"], edge_key, score["softcap"])
    elif score:
        named = score["activation"]
        activation: Any = _ACTIVATIONS[named] if isinstance(named, str) else LeakyReLU(named)
        edge = per_edge("edge", score["edge"])
        if score["kind"] == "additive":
            asked = AdditiveScore(leaves["dst"], leaves["src"], activation, edge)
        else:
            asked = AdditiveV2Score(leaves["dst"], leaves["src"], leaves["vector"], activation, edge)
    return Round(
        graph,
        leaves["value"],
        asked,
        tuple(per_edge(f"bias{k}", spec) for k, spec in enumerate(case["bias"])),
        per_edge("edge_value", case["edge_value"]),
        normalize=case["normalize"],
        dropout=case["dropout"],
        seed=torch.tensor(case["dropout_seed"]) if case["dropout"] else None,
        reduce=SUM if case["reduce"] == "sum" else aggregator(case["reduce"]),
        return_weights=case["return_weights"],
        sinks=leaves.get("sinks"),
        dst_bias=leaves.get("dst_bias"),
        src_bias=leaves.get("src_bias"),
    )


def backends(case: dict[str, Any], graph: Graph, leaves: dict[str, Tensor]) -> Iterator[tuple[str, str | None]]:
    """Each backend's name and why it refuses the request, None where it does not; and "auto".

    The reference, which takes everything and is slow, runs where the case says so or no other backend does.
    """
    request = request_of(case, graph, leaves)
    request = as_planned(request)
    reasons = {backend.NAME: why_not(backend, request) for backend in BACKENDS}
    others = [reason for name, reason in reasons.items() if name != "edge_list"]
    if not case["reference"] and any(reason is None for reason in others):
        del reasons["edge_list"]
    yield from reasons.items()
    if case["auto"]:
        yield "auto", None


def run(case: dict[str, Any], graph: Graph, leaves: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor | None]:
    return engine.run(request_of(case, graph, leaves), backend)


def public(case: dict[str, Any], graph: Graph, leaves: dict[str, Tensor]) -> Any:
    """The same through `ops.attend` or `ops.aggregate`; None where these cannot say it."""
    score, table = case["score"], any(spec["form"] == "table" for spec in case["bias"])
    without_score = bool(case.get("node_bias")) and not score
    if (
        case["edge_value"]
        or len(case["bias"]) > 1
        or case["dropout"]
        or without_score
        or (graph.positions is not None and table)
    ):
        return None
    if score and score["kind"] == "dot" and not score["edge_key"] and case["reduce"] == "sum":
        request = request_of(case, graph, leaves)
        return ops.attend(
            graph,
            leaves["query"],
            leaves["key"],
            leaves["value"],
            bias=(*request.bias, *([NodeBias(request.dst_bias, request.src_bias)] if case.get("node_bias") else ())),
            scale=score["scale"],
            softcap=score["softcap"],
            sinks=leaves.get("sinks"),
            normalize=case["normalize"],
            return_weights=case["return_weights"],
        )
    if not score and not table and case["normalize"] == "none" and case["value"]["heads"] == case["heads"] == 1:
        if (case["bias"] and case["bias"][0]["batch"]) or case["return_weights"]:
            return None
        weight = leaves["bias0"] if case["bias"] else None
        out = ops.aggregate(graph, leaves["value"].squeeze(-2), case["reduce"], weight=weight)
        return out.unsqueeze(-2)
    return None


def _relation(spec: list[Any]) -> Relation:
    name, *arguments = spec
    return _RELATIONS[name](*arguments)
