"""The plan of dot-product attention over a topology, at its size and at others, as the viewer stores it."""

import math
from time import perf_counter
from typing import Any

import torch

from mpnn import Graph, Topology
from mpnn.engine.plan import Plan, plan
from mpnn.round import Round
from mpnn.scores import Dot

_HEADS, _WIDTH = 8, 64
_SIZES = tuple(1 << k for k in range(7, 18))
_SECONDS = 5.0  # after which no larger size is planned


def of_topology(topology: Topology, n: int, num_src: int | None = None) -> dict[str, Any]:
    """What `viewer/src/data.ts` calls PlanData: forward passes of 8 heads of 64 features, in float32, on CPU.

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
    planned, deadline = [], perf_counter() + _SECONDS
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
    found = []
    for one in chosen.candidates:
        seconds, size = (x if math.isfinite(x) else None for x in (one.seconds, one.bytes))
        found.append({"name": one.name, "seconds": seconds, "bytes": size, "reason": one.reason})
    return found
