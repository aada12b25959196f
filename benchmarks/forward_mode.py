"""Derivatives in forward mode (`torch.func.jvp`) compared with the forward pass.

Times are the processor's, the minimum of interleaved rounds: other programs of a shared machine only add.
Tangents are checked against differences of forward passes in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.contest import FORWARD, OURS, Bar, Case, Contest, Entry
from benchmarks.truth import Wrong
from mpnn import Graph, graphs, ops
from mpnn.engine import run
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, LeakyReLU

PASS = "the forward pass"
GROUP = "forward mode"
MOST = 4.0  # forward passes
_STEP = 1e-8  # so short that few logits are on the other side of the kink of a LeakyReLU
_BOUND = 1e-4  # of float32 tangents, relative to their norm

Function = Callable[..., Tensor]


def cases(small: bool = False) -> Iterator[Case]:
    scale = 32 if small else 1
    texts = [length // scale + 1 for length in (100, 300, 50, 574, 700, 324)]
    of_tiles: dict[str, Callable[[], Graph]] = {
        "causal": lambda: graphs.causal().bind(1024 // scale),
        "window(64)": lambda: graphs.window(64).bind(4096 // scale),
        "six packed texts": lambda: (graphs.documents(texts) & graphs.causal()).bind(sum(texts)),
    }
    for name, make in of_tiles.items():
        yield _case(f"attention, {name}", make, partial(_attention, 8, {}))
    yield _case("attention, causal, 2 heads of keys", of_tiles["causal"], partial(_attention, 2, {}))
    yield _case("attention, causal, softcap", of_tiles["causal"], partial(_attention, 8, {"softcap": 20.0}))
    yield _case("attention, causal, sinks", of_tiles["causal"], _with_sinks)
    edges = partial(_edges, 10_000 // scale)
    yield _case("attention, 16 edges a node", edges, partial(_attention, 8, {}))
    yield _case("GAT, 16 edges a node", edges, _gat)
    yield _case("GATv2, 16 edges a node", edges, _gat_v2)
    yield _case("a sum, 16 edges a node", edges, _sum)
    yield _case("a weighted mean, 16 edges a node", edges, _mean)
    height = 14 if small else 56
    windows = partial(_windows, height)
    yield _case(f"attention, Swin's windows of 7 x 7, {height} x {height}", windows, partial(_attention, 8, {}))
    yield _case("attention, causal, 16 nodes", partial(_causal, 16), partial(_attention, 8, {}))
    yield _case("a sum, 18 nodes, 16 edges a node", partial(_edges, 18), _sum)


def _case(name: str, bind: Callable[[], Graph], make: Callable[[Graph], tuple[Function, list[Tensor]]]) -> Case:
    def contest() -> Contest:
        graph = bind()
        return _contest(graph, *make(graph))

    return Case(GROUP, name, contest, (FORWARD,))


def _causal(nodes: int) -> Graph:
    return graphs.causal().bind(nodes)


def _windows(height: int) -> Graph:
    return graphs.windows(height, height, 7).bind(height * height)


def _edges(nodes: int) -> Graph:
    return graphs.from_edges(torch.randint(0, nodes, (2, 16 * nodes)), nodes)


def _attention(key_heads: int, options: dict[str, Any], graph: Graph) -> tuple[Function, list[Tensor]]:
    nodes = graph.num_dst
    x = [torch.randn(nodes, heads, 64) for heads in (8, key_heads, key_heads)]
    return lambda q, k, v: ops.attend(graph, q, k, v, **options), x


def _with_sinks(graph: Graph) -> tuple[Function, list[Tensor]]:
    _, x = _attention(8, {}, graph)
    return lambda q, k, v, sinks: ops.attend(graph, q, k, v, sinks=sinks), [*x, torch.randn(8)]


def _gat(graph: Graph) -> tuple[Function, list[Tensor]]:
    def f(dst: Tensor, src: Tensor, value: Tensor) -> Tensor:
        return run(Round(graph, value, AdditiveScore(dst, src, LeakyReLU(0.2))))[0]

    return f, [torch.randn(graph.num_dst, *shape) for shape in ((8,), (8,), (8, 8))]


def _gat_v2(graph: Graph) -> tuple[Function, list[Tensor]]:
    def f(dst: Tensor, src: Tensor, value: Tensor, vector: Tensor) -> Tensor:
        return run(Round(graph, value, AdditiveV2Score(dst, src, vector, LeakyReLU(0.2))))[0]

    return f, [*(torch.randn(graph.num_dst, 8, 8) for _ in range(3)), torch.randn(8, 8)]


def _sum(graph: Graph) -> tuple[Function, list[Tensor]]:
    return lambda x: ops.aggregate(graph, x), [torch.randn(graph.num_src, 64)]


def _mean(graph: Graph) -> tuple[Function, list[Tensor]]:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        return ops.aggregate(graph, x, "mean", weight=weight)

    return f, [torch.randn(graph.num_src, 64), torch.randn(graph.num_edges)]


def _contest(graph: Graph, f: Function, x: Sequence[Tensor]) -> Contest:
    tangents = tuple(map(torch.randn_like, x))

    def verify(entry: Entry, direction: str) -> float:
        ahead, behind = (
            f(*(y.double() + step * t.double() for y, t in zip(x, tangents, strict=True))) for step in (_STEP, -_STEP)
        )
        exact = (ahead - behind) / (2 * _STEP)
        # By their norm: at the kink of a LeakyReLU, the difference of an edge may be that of its other side.
        error = float((entry.call() - exact).norm() / exact.norm())
        if not error < _BOUND:
            raise Wrong(f"the tangents differ from differences by {error:.1e} of their norm")
        return error

    entries = [
        Entry(OURS, torch.no_grad()(lambda: torch.func.jvp(f, tuple(x), tangents)[1])),
        Entry(PASS, torch.no_grad()(lambda: f(*x)), checked=False),
    ]
    bar = Bar(f"at most {MOST:g} forward passes", MOST, "at most", FORWARD, PASS)
    facts = {"nodes": graph.num_dst, "edges": graph.num_edges}
    return Contest(entries, verify, "differences of forward passes in float64", (bar,), facts)


def section(results: dict[str, Any]) -> list[str]:
    """The part of the page: a line for each row, with the minimum times."""
    return [
        "# Forward mode",
        "",
        f"Measured by `{results['command']}` on one thread, in float32. Times are the processor's, the minimum of "
        "interleaved rounds. Tangents of all inputs were compared with differences of forward passes in float64 before "
        f"they were timed. The goal is at most {MOST:g} forward passes."
        + (f" {results['note']}" if results.get("note") else ""),
        "",
        *report._machine(results),
        "",
        *table(results),
    ]


def table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| | edges | forward pass | with its tangent (`jvp`) | in forward passes |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if "entries" not in row:
            lines.append(f"| {row['case']} | {row.get('error') or row.get('skipped')} | | | |")
            continue
        both, alone = (row["entries"][name]["least"] for name in (OURS, PASS))
        ratio = f"{both / alone:.1f}" if both <= MOST * alone else f"**{both / alone:.1f}**"
        edges = f"{row['facts']['edges']:,}"
        lines.append(f"| {row['case']} | {edges} | {report.duration(alone)} | {report.duration(both)} | {ratio} |")
    return lines
