"""The page of a topology: its graph, reach and plan."""

import math
from time import perf_counter
from typing import Any

import torch

from mpnn import Graph, Topology
from mpnn.engine.plan import Plan, plan
from mpnn.graphs.parse import parse
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.view.page import Page, needs_runs, runs

_MAX_NODES = 1_000_000
_MAX_RUNS = 1 << 23
_SAID = "What a node attends to, and what it learns from, over this graph."


def of_topology(topology: Topology | str, n: int = 64, num_src: int | None = None) -> Page:
    """Returns the page of a topology, or of its text, over `n` destinations and `num_src` sources (None: as for
    `bind`).

    In a notebook, it is shown where it is the last value of a cell.

    Raises:
        ValueError: if the text cannot be read, the topology cannot be bound to these sizes or written as text, or the
            page cannot draw it.
    """
    expression = topology if isinstance(topology, str) else repr(topology)
    if ".with_relation" in expression:
        raise ValueError("the page shows edges, which .with_relation does not change; leave it out")
    topology = parse(expression)
    graph = topology.bind(n, num_src)
    if max(graph.num_dst, graph.num_src) > _MAX_NODES or graph.runs.num_runs > _MAX_RUNS:
        raise ValueError(
            f"the page draws at most {_MAX_NODES:,} nodes and {_MAX_RUNS:,} runs; this graph has "
            f"{graph.num_dst:,} nodes and {graph.runs.num_runs:,} runs. Use fewer nodes"
        )
    data: dict[str, Any] = {"expression": expression, "n": n, "num_src": num_src}
    if needs_runs(repr(topology)):
        data["runs"] = runs(graph)
    return Page(expression, _SAID, data, plan=plan_data(topology, n, num_src))


_HEADS = 8
_WIDTH = 64
_SIZES = tuple(1 << k for k in range(7, 18))
_SECONDS = 5.0  # after which no larger size is planned


def plan_data(topology: Topology, n: int, num_src: int | None = None) -> dict[str, Any]:
    """Returns the PlanData of `viewer/src/data.ts`: forward passes of 8 heads of 64 features, in float32, on CPU.

    Nothing is run. Sizes to which the topology cannot be bound are left out."""
    chosen = _plan(topology.bind(n, num_src))
    return {
        "graph": chosen.graph,
        "work": chosen.work,
        "backend": chosen.backend,
        "candidates": _candidates(chosen),
        "sizes": [] if num_src is not None else _sizes(topology),
    }


def _sizes(topology: Topology) -> list[dict[str, Any]]:
    planned = []
    deadline = perf_counter() + _SECONDS
    for n in _SIZES:
        try:
            planned.append({"n": n, "candidates": _candidates(_plan(topology.bind(n)))})
        except ValueError:  # `documents`, `grid`: the rule says how many nodes there are
            continue
        except MemoryError:
            break
        if perf_counter() > deadline:
            break
    return planned


def _plan(graph: Graph) -> Plan:
    """The plan, for features that are not allocated."""
    dst, src = (torch.zeros(()).expand(n, _HEADS, _WIDTH) for n in (graph.num_dst, graph.num_src))
    return plan(Round(graph, src, Dot(dst, src, _WIDTH**-0.5)))


def _candidates(chosen: Plan) -> list[dict[str, Any]]:
    rows = []
    for one in chosen.candidates:
        seconds, size = (x if math.isfinite(x) else None for x in (one.seconds, one.bytes))
        rows.append({"name": one.name, "seconds": seconds, "bytes": size, "reason": one.reason})
    return rows
