"""Runs a case on every backend that takes it and compares with the oracle."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.threads import threads

from . import project
from .cases import Case, laid_out, leaves
from .oracle import DTYPES, solve
from .topologies import Edges, edges_of


@dataclass
class Failure(Exception):
    """A backend gave something else than the oracle."""

    case: Case
    backend: str
    what: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.what}"


def check(*cases: Case, runs: Counter[str] | None = None) -> None:
    """Runs cases over one graph, one after the other; raises Failure where an answer is wrong.

    `runs` counts who ran, who refused, and the cases.
    """
    runs = Counter() if runs is None else runs
    spec = cases[0]["graph"]
    edges = edges_of(spec)
    graph = _attempt(cases[0], "graph", lambda: project.graph_of(spec))
    _check_graph(cases[0], graph, edges)
    for case in cases:
        with threads(case["threads"]), _poisoned_memory():
            _check_request(case, graph, edges, runs)
        runs["cases"] += 1


def _check_request(case: Case, graph: Any, edges: Edges, runs: Counter[str]) -> None:
    numbers = leaves(case, edges)
    answer: Any = None
    upstream: Any = None

    def compare(name: str, out: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        nonlocal answer, upstream
        if answer is None:
            upstream = _upstream(case, out)
            answer = solve(case, edges, numbers, upstream)
        found = _numbers(case, name, out, weights, numbers, upstream)
        _compare(case, name, found, answer)
        return found

    for name, reason in _attempt(case, "supports", lambda: list(project.backends(case, graph, numbers))):
        if reason is not None:
            runs[f"{name} refuses"] += 1
            continue
        runs[name] += 1
        call = partial(_attempt, case, name, partial(project.run, case, graph, numbers, name))
        found = compare(name, *call())
        if case["repeat"]:
            again = compare(name, *call())
            if any(not _same_bits(found[k], again[k]) for k in found):
                raise Failure(case, name, "the same request gave other bits the second time")
    if case["auto"]:
        result = _attempt(case, "public", lambda: project.public(case, graph, numbers))
        if result is not None:
            runs["public"] += 1
            compare("public", *(result if isinstance(result, tuple) else (result, None)))


def _check_graph(case: Case, graph: Any, edges: Edges) -> None:
    if edges.present is not None:
        if not np.array_equal(graph.dense().numpy().reshape(edges.matrix().shape), edges.matrix()):
            raise Failure(case, "graph", "dense() differs from the edges of each item and head")
        if graph.num_edges != int(edges.present.sum()):
            raise Failure(case, "graph", f"num_edges is {graph.num_edges}, expected {int(edges.present.sum())}")
        return
    expected = np.stack([edges.src, edges.dst])
    found = graph.edge_index.numpy()
    if (graph.num_dst, graph.num_src) != (edges.num_dst, edges.num_src) or not np.array_equal(found, expected):
        raise Failure(case, "graph", f"edges {found.tolist()}, expected {expected.tolist()}")
    if graph.num_edges != len(edges.dst) or not np.array_equal(graph.dense().numpy(), edges.matrix()):
        raise Failure(case, "graph", "num_edges or dense() differ from the edges")
    if not np.array_equal(graph.degree().numpy(), np.bincount(edges.dst, minlength=edges.num_dst)):
        raise Failure(case, "graph", f"degree() is {graph.degree().tolist()}")


def _attempt(case: Case, who: str, call: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return call()
    except Exception as error:
        raise Failure(case, who, f"{type(error).__name__}: {error}") from error


def _upstream(case: Case, out: Tensor) -> Tensor:
    """The gradient of the output."""
    if case["upstream"] == "ones":
        return out.new_ones(()).expand(out.shape)
    generator = np.random.default_rng([case["seed"] % 2**63, 2])
    numbers = torch.from_numpy(generator.standard_normal(out.shape)).to(out.dtype)
    return laid_out(numbers, "negative") if case["upstream"] == "negative" else numbers


def _numbers(
    case: Case, backend: str, out: Tensor, weights: Tensor | None, leaves: dict[str, Tensor], upstream: Tensor
) -> dict[str, Tensor]:
    found = {"out": out.detach()}
    if case["return_weights"]:
        if weights is None:
            raise Failure(case, backend, "no weights were returned")
        found["weights"] = weights.detach()
    if case["grad"]:
        wanted = [leaves[name] for name in case["grad"]]
        gradients = _attempt(
            case, f"{backend} backward", lambda: torch.autograd.grad(out, wanted, upstream, allow_unused=True)
        )
        for name, x, g in zip(case["grad"], wanted, gradients, strict=True):
            found[f"d {name}"] = torch.zeros_like(x) if g is None else g
    return found


def _compare(case: Case, backend: str, found: dict[str, Tensor], answer: Any) -> None:
    for name, x in found.items():
        if name not in answer.numbers:
            continue
        expected, bar = answer.numbers[name], answer.bars[name]
        if x.shape != expected.shape:
            raise Failure(case, backend, f"{name} has shape {list(x.shape)}, expected {list(expected.shape)}")
        if x.dtype != DTYPES[case["dtype"]]:
            raise Failure(case, backend, f"{name} is of {x.dtype}, expected {case['dtype']}")
        if x.numel() == 0:
            continue
        off = (x.double() - expected).abs()
        wrong = ~(off <= bar)
        if bool(wrong.any()):
            at = int((off / bar).nan_to_num(torch.inf, torch.inf).flatten().argmax())
            place = list(map(int, np.unravel_index(at, tuple(x.shape))))
            raise Failure(
                case,
                backend,
                f"{name}{place} is {float(x.flatten()[at])!r}, expected {float(expected.flatten()[at])!r} "
                f"+- {float(bar.expand(x.shape).flatten()[at]):.1e}",
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=0.125), other.nan_to_num(nan=0.125)) and torch.equal(
        one.isnan(), other.isnan()
    )


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten is full of NaN, so that a number which no kernel wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
