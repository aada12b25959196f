"""Every backend that can run a round, on a GPU: what prices are fitted to, and how far the plan's choice is from the
quickest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contest import BOTH, FORWARD, Case, Contest, Entry
from benchmarks.truth import Agreement
from mpnn import Graph, Topology, graphs
from mpnn.aggregate import SUM
from mpnn.backends import BACKENDS, Backend
from mpnn.engine.plan import refusal
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

GROUP = "plan"
# Products of all pairs or edges, beyond which a backend only wastes the time of the benchmark.
_MOST = {"csr": 2e10, "edge_list": 1.5e9, "dense": 1e14, "tiles": 1e14, "scan": 1e14, "scatter": 1.5e9}


@dataclass(frozen=True)
class Shapes:
    """Args:
    short, middle, long, longest: nodes of sequences. nodes: of irregular graphs. degrees: theirs.
    texts: numbers and the longest of short documents.
    """

    short: int
    middle: int
    long: int
    longest: int
    nodes: int
    degrees: tuple[int, ...]
    texts: tuple[int, int]


DEFAULT = Shapes(512, 2048, 8192, 32768, 20_000, (4, 16, 64), (128, 256))
SMALL = Shapes(16, 32, 64, 128, 60, (4, 16), (6, 12))

Build = Callable[[str, torch.dtype], Round]


def cases(shapes: Shapes, device: str) -> Iterator[Case]:
    for name, build in requests(shapes):
        for dtype in (torch.bfloat16, torch.float32):
            what = f"{name}, {str(dtype).removeprefix('torch.')}"
            for direction in (FORWARD, BOTH):
                yield Case(GROUP, what, partial(_contest, build, device, dtype, direction), (direction,))


def requests(shapes: Shapes) -> Iterator[tuple[str, Build]]:
    """Rounds by name. `build(device, dtype)` makes one."""
    yield from _sequences(shapes)
    yield from _explicit(shapes)


def _sequences(s: Shapes) -> Iterator[tuple[str, Build]]:
    for n, batch in ((s.short, 16), (s.middle, 4), (s.long, 1)):
        for topology in (graphs.complete(), graphs.causal()):
            yield _dot(topology, n, batch, 8, 64)
    window = s.short // 8
    for n, topology in (
        (s.short, graphs.causal() & graphs.window(window)),
        (s.middle, graphs.causal() & graphs.window(4 * window)),
        (s.longest, graphs.causal() & graphs.window(4 * window)),
        (s.long, graphs.longformer(4 * window, globals=1)),
        (s.long, graphs.bigbird(max(window, 1), window=3, random=2, globals=1)),
        (s.middle, graphs.documents([s.middle // 8] * 8)),
        (s.longest, graphs.documents([s.longest // 8] * 8)),
    ):
        yield _dot(topology, n, 1, 8, 64)
    for width in (32, 128):
        yield _dot(graphs.complete(), s.middle, 1, 8, width)
        yield _dot(graphs.causal() & graphs.window(4 * window), s.long, 1, 8, width)
    yield _dot(graphs.complete(), s.middle, 1, 8, 64, dropout=0.1)
    yield _dot(graphs.causal() & graphs.window(4 * window), s.long, 1, 8, 64, dropout=0.1)
    count, longest = s.texts
    lengths = torch.randint(longest // 2, longest, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    build = partial(_build_dot, graphs.documents(lengths), sum(lengths), 1, 12, 32, 0.0)
    yield f"{count} documents of {longest // 2} to {longest}, dot 12 x 32", build
    for n in (s.short, s.long):
        yield f"linear, causal(), N {n}, dot 8 x 64", partial(_build_linear, n)


def _dot(topology: Topology, n: int, batch: int, heads: int, width: int, dropout: float = 0.0) -> tuple[str, Build]:
    named = str(topology) if len(str(topology)) < 60 else f"documents, 8 of {n // 8}"
    name = f"{named}, N {n}, B {batch}, dot {heads} x {width}{', dropout' * bool(dropout)}"
    return name, partial(_build_dot, topology, n, batch, heads, width, dropout)


def _explicit(s: Shapes) -> Iterator[tuple[str, Build]]:
    for degree in s.degrees:
        where = f"{s.nodes:,} nodes of degree {degree}"
        for heads, width in ((8, 16), (4, 64), (1, 128)):
            yield f"{where}, dot {heads} x {width}", partial(_build_explicit, "dot", s.nodes, degree, heads, width)
        for width in (16, 64, 256):
            yield f"{where}, sum {width}", partial(_build_explicit, "sum", s.nodes, degree, 1, width)
        yield f"{where}, GAT 8 x 8", partial(_build_explicit, "GAT", s.nodes, degree, 8, 8)
    degree = s.degrees[1]
    yield f"{s.nodes:,} nodes of degree {degree}, GATv2 8 x 8", partial(_build_explicit, "GATv2", s.nodes, degree, 8, 8)
    degree = s.degrees[-1]
    yield f"{s.short:,} nodes of degree {degree}, dot 8 x 64", partial(_build_explicit, "dot", s.short, degree, 8, 64)


def _leaf(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


@lru_cache(maxsize=1)
def _bound(topology: Topology, n: int, device: str) -> Graph:
    return topology.bind(n).to(device)


def _build_dot(
    topology: Topology, n: int, batch: int, heads: int, width: int, dropout: float, device: str, dtype: torch.dtype
) -> Round:
    query, key, value = (_leaf(device, dtype, batch, n, heads, width) for _ in range(3))
    seed = torch.zeros((), dtype=torch.int64, device=device) if dropout else None
    graph = _bound(topology, n, device)
    return Round(graph, value, Dot(query, key, width**-0.5), dropout=dropout, seed=seed)


def _build_linear(n: int, device: str, dtype: torch.dtype) -> Round:
    query, key, value = (_leaf(device, dtype, 1, n, 8, 64) for _ in range(3))
    return Round(_bound(graphs.causal(), n, device), value, Dot(query, key, 1 / n), normalize="none")


@lru_cache(maxsize=1)
def _scattered(nodes: int, degree: int, device: str) -> Graph:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, nodes * degree), generator=generator)
    return graphs.from_edges(torch.unique(edges, dim=1), nodes).to(device)


def _build_explicit(
    kind: str, nodes: int, degree: int, heads: int, width: int, device: str, dtype: torch.dtype
) -> Round:
    graph = _scattered(nodes, degree, device)
    value = _leaf(device, dtype, nodes, heads, width)
    if kind == "sum":
        return Round(graph, value, normalize="none", reduce=SUM)
    if kind == "GAT":
        dst, src = (_leaf(device, dtype, nodes, heads) for _ in range(2))
        return Round(graph, value, AdditiveScore(dst, src, LeakyReLU(0.2)))
    dst, src = (_leaf(device, dtype, nodes, heads, width) for _ in range(2))
    if kind == "GATv2":
        return Round(graph, value, AdditiveV2Score(dst, src, _leaf(device, dtype, heads, width), LeakyReLU(0.2)))
    return Round(graph, value, Dot(dst, src, width**-0.5))


def _contest(build: Build, device: str, dtype: torch.dtype, direction: str) -> Contest:
    """The chosen backend first, and all others that can run the round."""
    given = build(device, dtype)
    with torch.set_grad_enabled(direction == BOTH):
        able = candidates(given)
        seconds = {b.NAME: b.estimate(given).seconds for b in able}
    able.sort(key=lambda b: seconds[b.NAME])
    leaves = [x for x in given.tensors if x.requires_grad]
    entries = [Entry(b.NAME, partial(_run, b, given), leaves) for b in able]
    facts: dict[str, Any] = {"estimates": seconds, "edges": given.graph.num_edges}
    return Contest(entries, Agreement(), Agreement.description, (), facts)


def _run(backend: Backend, given: Round) -> Tensor:
    given = replace(given, graph=given.graph)  # whose needs of gradients are those of this call
    return backend.run(given)[0]


def candidates(given: Round) -> list[Backend]:
    """The backends that can run a round, but for those that would take far too long."""
    width = given.value.shape[-1] * given.heads * given.batch.numel()
    return [b for b in BACKENDS if given.graph.num_edges * width <= _MOST[b.NAME] and refusal(b, given) is None]
