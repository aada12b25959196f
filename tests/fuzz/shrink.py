"""Makes a failing case small: tries simpler cases, and keeps each one that still fails."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .cases import Case, shapes
from .compare import Failure, check
from .topologies import edges_of, matrix_of


def failure_of(case: Case) -> Failure | None:
    """What goes wrong in this case by itself, None where nothing does."""
    try:
        check(case)
    except Failure as failure:
        return failure
    except Exception:  # a simplification that makes no sense, such as a bias without its edges
        return None
    return None


def shrink(failure: Failure, tries: int = 3000, fails: Callable[[Case], Failure | None] = failure_of) -> Failure:
    """The simplest failure of the same backend found in so many tries."""
    progress = True
    while progress and tries > 0:
        progress = False
        for simpler in _simpler(failure.case):
            tries -= 1
            found = fails(simpler)
            if found is not None and found.backend == failure.backend:
                failure, progress = found, True
            if progress or tries <= 0:
                break
    return failure


def paste(failure: Failure) -> str:
    """Five lines that repeat a failure."""
    return "\n".join(
        [
            f"# {failure.backend}: {failure.what}"[:400],
            "import json",
            "from tests.fuzz.compare import check",
            f"case = json.loads({json.dumps(failure.case)!r})",
            "check(case)",
        ]
    )


def _simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one thing, the largest steps first."""
    for name, value in (
        ("dropout", 0.0),
        ("edge_value", None),
        ("sinks", False),
        ("bias", []),
        ("node_bias", []),
        ("layout", {}),
        ("grad", []),
        ("batch", []),
        ("return_weights", False),
        ("repeat", False),
        ("auto", False),
        ("threads", 1),
        ("reduce", "sum"),
        ("upstream", "ones"),
        ("dtype", "float64"),
        ("dropout_seed", 0),
    ):
        if case.get(name, value) != value:  # stacked graphs have no biases of nodes
            yield _fitting({**case, name: value})
    for spec in _graphs(case["graph"]):
        yield _fitting({**case, "graph": spec})
    if len(case["bias"]) > 1:
        yield from (
            _fitting({**case, "bias": case["bias"][:k] + case["bias"][k + 1 :]}) for k in range(len(case["bias"]))
        )
    if len(case["grad"]) > 1:
        yield from ({**case, "grad": [name]} for name in case["grad"])
    if case["heads"] > 1:
        yield _one_head(case)
    if case["value"]["width"] > 1:
        yield {**case, "value": {**case["value"], "width": 1}}
    score = case["score"]
    if score:
        yield _fitting({**case, "score": None})
        for name, simple in (("edge_key", None), ("softcap", None), ("scale", 1.0), ("width", 1), ("edge", None)):
            if name in score and score[name] != simple:
                yield _fitting({**case, "score": {**score, name: simple}})


def _graphs(graph: dict[str, Any]) -> Iterator[dict[str, Any]]:
    changes = graph.get("changes", [])
    for k in range(len(changes)):
        yield {**graph, "changes": changes[:k] + changes[k + 1 :]}
    if graph.get("related"):
        yield {**graph, "related": None}
    if "edges" in graph:
        yield from _fewer_edges(graph)
        return
    if "parent" in graph:
        parent = graph["parent"]
        for count in (len(parent) // 2, len(parent) - 1):
            if 0 <= count < len(parent):
                yield {**graph, "parent": parent[:count], "num_dst": count, "num_src": count}
        if graph["radius"] is not None:
            yield {**graph, "radius": None}
        return
    if "choice" in graph:
        yield from _smaller_choice(graph)
        return
    rule = graph["rule"]
    n, m = graph["num_dst"], graph["num_src"]
    for simple in (["complete"], ["causal"], ["window", 1, 1]):
        if len(str(rule)) > len(str(simple)):
            yield {**graph, "rule": simple}
    if not graph.get("related"):  # the same as a list of edges, from which any may be left out
        dst, src = np.nonzero(matrix_of(rule, n, m)[0])
        explicit = {"edges": [src.tolist(), dst.tolist()], "num_dst": n, "num_src": m}
        if "memory" not in str(rule):
            yield {**explicit, "changes": graph.get("changes", [])}
    if rule[0] in ("|", "&", "-", "~"):
        yield from ({**graph, "rule": part} for part in rule[1:])
    for smaller in (n // 2, n - 1):
        if n == m and 0 <= smaller < n:
            yield {**graph, "num_dst": smaller, "num_src": smaller}


def _smaller_choice(graph: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if graph["rule"]:
        yield {**graph, "rule": None}
    listed, stack, rows = graph["choice"], graph["stack"], graph["rows"]
    picked = len(listed) // (math.prod(stack) * rows)
    by_row = np.array(listed).reshape(-1, rows, picked)
    for k in range(picked if picked > 1 else 0):
        yield {**graph, "choice": np.delete(by_row, k, 2).flatten().tolist()}
    if rows == graph["num_dst"] and not graph["rule"]:
        for count in (rows // 2, rows - 1):
            if 0 < count < rows:
                yield {**graph, "choice": by_row[:, :count].flatten().tolist(), "rows": count, "num_dst": count}


def _fewer_edges(graph: dict[str, Any]) -> Iterator[dict[str, Any]]:
    count = len(graph["edges"][0])
    size = count // 2
    while size:
        for first in range(0, count, size):
            rest = [k for k in range(count) if not first <= k < first + size]
            kinds = graph.get("edge_type")
            yield {
                **graph,
                "edges": [[ends[k] for k in rest] for ends in graph["edges"]],
                **({} if kinds is None else {"edge_type": [kinds[k] for k in rest]}),
            }
        size //= 2
    src, dst = graph["edges"]
    for name, ends in (("num_src", src), ("num_dst", dst)):
        least = max(ends, default=-1) + 1
        if least < graph[name]:
            yield {**graph, name: least}


def _one_head(case: Case) -> Case:
    case = copy.deepcopy(case)
    case["heads"] = case["value"]["heads"] = 1
    if case["score"] and "key_heads" in case["score"]:
        case["score"]["key_heads"] = 1
    specs = [*case["bias"], case["edge_value"], *((case["score"] or {}).get(k) for k in ("edge", "edge_key"))]
    for spec in specs:
        if spec:
            spec["heads"] = 1
    return case


def _fitting(case: Case) -> Case:
    """The case without layouts and gradients of what it no longer has."""
    try:
        names = set(shapes(case, edges_of(case["graph"])))
    except Exception:  # the caller finds out
        return case
    grad = [name for name in case["grad"] if name in names]
    return {**case, "grad": grad, "layout": {n: layout for n, layout in case["layout"].items() if n in names}}
