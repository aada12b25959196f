"""Every backend that can run a round, on a GPU: what prices are fitted to, and how far the plan's choice is from the
fastest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.contest import BOTH, FORWARD, Case, Contest, Entry
from benchmarks.truth import Agreement
from mpnn import Graph, Topology, graphs
from mpnn.aggregate import NAMED, SUM
from mpnn.backends import BACKENDS, Backend
from mpnn.backends.tuned import Prices
from mpnn.engine.plan import refusal
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

if TYPE_CHECKING:
    from mpnn.engine.calibration import Sample

GROUP = "plan"
# Products of all pairs or edges, beyond which a backend only wastes the time of the benchmark.
_MOST = {"csr": 2e10, "edge_list": 1.5e9, "dense": 1e14, "tiles": 1e14, "scan": 1e14, "scatter": 1.5e9}


@dataclass(frozen=True)
class Shapes:
    """Args:
    short, middle, long, longest: nodes of sequences. nodes, degrees: of irregular graphs.
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


@dataclass(frozen=True)
class Request:
    """A graph, and the round that `build(graph, device, dtype)` makes over it."""

    graph: Callable[[], Graph]
    build: Callable[[Graph, str, torch.dtype], Round]


def cases(shapes: Shapes, device: str) -> Iterator[Case]:
    for what, (request, dtype) in by_name(shapes).items():
        for direction in (FORWARD, BOTH):
            yield Case(GROUP, what, partial(_contest, request, device, dtype, direction), (direction,))


def by_name(shapes: Shapes) -> dict[str, tuple[Request, torch.dtype]]:
    return {
        f"{name}, {str(dtype).removeprefix('torch.')}": (request, dtype)
        for name, request in (*_sequences(shapes), *_explicit(shapes))
        for dtype in (torch.bfloat16, torch.float32)
    }


def _sequences(s: Shapes) -> Iterator[tuple[str, Request]]:
    window = s.short // 8
    band = graphs.causal() & graphs.window(4 * window)
    for n, batch in ((s.short, 16), (s.middle, 4), (s.long, 1), (s.long, 2), (s.long, 4)):
        yield _dot("complete", graphs.complete(), n, batch, 8, 64)
        yield _dot("causal", graphs.causal(), n, batch, 8, 64)
    for name, n, topology in (
        (f"causal & window({window})", s.short, graphs.causal() & graphs.window(window)),
        (f"causal & window({4 * window})", s.middle, band),
        (f"causal & window({4 * window})", s.longest, band),
        (f"longformer({4 * window}, globals=1)", s.long, graphs.longformer(4 * window, globals=1)),
        (f"bigbird({window}, 3, 2, 1)", s.long, graphs.bigbird(max(window, 1), window=3, random=2, globals=1)),
        ("documents of an eighth", s.middle, graphs.documents([s.middle // 8] * 8)),
        ("documents of an eighth", s.longest, graphs.documents([s.longest // 8] * 8)),
    ):
        yield _dot(name, topology, n, 1, 8, 64)
    for width in (32, 128):
        yield _dot("complete", graphs.complete(), s.middle, 1, 8, width)
        yield _dot(f"causal & window({4 * window})", band, s.long, 1, 8, width)
    yield _dot("complete", graphs.complete(), s.middle, 1, 8, 64, dropout=0.1)
    yield _dot(f"causal & window({4 * window})", band, s.long, 1, 8, 64, dropout=0.1)
    count, longest = s.texts
    lengths = torch.randint(longest // 2, longest, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    name = f"{count} documents of {longest // 2} to {longest}"
    yield _dot(name, graphs.documents(lengths), sum(lengths), 1, 12, 32)
    for n in (s.short, s.long):
        yield f"linear, causal, N {n}, dot 8 x 64", Request(partial(_bound, graphs.causal(), n), _build_linear)


def _dot(
    name: str, topology: Topology, n: int, batch: int, heads: int, width: int, dropout: float = 0.0
) -> tuple[str, Request]:
    what = f"{name}, N {n}, B {batch}, dot {heads} x {width}{', dropout' * bool(dropout)}"
    return what, Request(partial(_bound, topology, n), partial(_build_dot, batch, heads, width, dropout))


def _explicit(s: Shapes) -> Iterator[tuple[str, Request]]:
    for degree in s.degrees:
        where, graph = f"{s.nodes:,} nodes of degree {degree}", partial(_scattered, s.nodes, degree)
        for heads, width in ((8, 16), (4, 64), (1, 128)):
            yield f"{where}, dot {heads} x {width}", Request(graph, partial(_build_explicit, "dot", heads, width))
        for width in (16, 64, 256):
            yield f"{where}, sum {width}", Request(graph, partial(_build_explicit, "sum", 1, width))
        yield f"{where}, GAT 8 x 8", Request(graph, partial(_build_explicit, "GAT", 8, 8))
    where, graph = f"{s.nodes:,} nodes of degree {s.degrees[1]}", partial(_scattered, s.nodes, s.degrees[1])
    yield f"{where}, GATv2 8 x 8", Request(graph, partial(_build_explicit, "GATv2", 8, 8))
    where, graph = f"{s.short:,} nodes of degree {s.degrees[-1]}", partial(_scattered, s.short, s.degrees[-1])
    yield f"{where}, dot 8 x 64", Request(graph, partial(_build_explicit, "dot", 8, 64))


def _leaf(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


@lru_cache(maxsize=1)
def _bound(topology: Topology, n: int) -> Graph:
    return topology.bind(n)


@lru_cache(maxsize=1)
def _scattered(nodes: int, degree: int) -> Graph:
    edges = torch.randint(0, nodes, (2, nodes * degree), generator=torch.Generator().manual_seed(0))
    return graphs.from_edges(torch.unique(edges, dim=1), nodes)


def _build_dot(
    batch: int, heads: int, width: int, dropout: float, graph: Graph, device: str, dtype: torch.dtype
) -> Round:
    query, key, value = (_leaf(device, dtype, batch, graph.num_dst, heads, width) for _ in range(3))
    seed = torch.zeros((), dtype=torch.int64, device=device) if dropout else None
    return Round(graph, value, Dot(query, key, width**-0.5), dropout=dropout, seed=seed)


def _build_linear(graph: Graph, device: str, dtype: torch.dtype) -> Round:
    query, key, value = (_leaf(device, dtype, 1, graph.num_dst, 8, 64) for _ in range(3))
    return Round(graph, value, Dot(query, key, 1 / graph.num_dst), normalize="none")


def _build_explicit(kind: str, heads: int, width: int, graph: Graph, device: str, dtype: torch.dtype) -> Round:
    nodes = graph.num_dst
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


def _contest(request: Request, device: str, dtype: torch.dtype, direction: str) -> Contest:
    """The chosen backend first, and all others that can run the round."""
    given = request.build(request.graph().to(device), device, dtype)
    with torch.set_grad_enabled(direction == BOTH):
        able = candidates(given)
        seconds = {b.NAME: b.estimate(given).seconds for b in able}
        counts = {b.NAME: dict(b.counts(given)) for b in able}
    able.sort(key=lambda b: seconds[b.NAME])
    leaves = [x for x in given.tensors if x.requires_grad]
    entries = [Entry(b.NAME, partial(_run, b, given), leaves) for b in able]
    facts: dict[str, Any] = {"estimates": seconds, "counts": counts}
    return Contest(entries, Agreement(), Agreement.description, (), facts)


def _run(backend: Backend, given: Round) -> Tensor:
    given = replace(given, graph=given.graph)  # whose needs of gradients are those of this call
    return backend.run(given)[0]


def candidates(given: Round) -> list[Backend]:
    """The backends that can run a round, but for those that would take far too long."""
    width = given.value.shape[-1] * given.heads * given.batch.numel()
    return [b for b in BACKENDS if given.graph.num_edges * width <= _MOST[b.NAME] and refusal(b, given) is None]


# ------------------------------------------------------------------------------------------------ prices


def count(rows: Iterable[dict[str, Any]], shapes: Shapes = DEFAULT) -> None:
    """Puts what each backend counts today into the rows of a run, also where there is no GPU."""
    named = by_name(shapes)
    for row in rows:
        if row["group"] == GROUP and "entries" in row and row["case"] in named:
            request, dtype = named[row["case"]]
            graph = request.graph()
            with FakeTensorMode():
                given = request.build(graph, "cuda:0", dtype)
            with torch.set_grad_enabled(row["direction"] == BOTH):
                counts = {b.NAME: dict(b.counts(given)) for b in BACKENDS if b.NAME in row["entries"]}
            row["facts"] = {"counts": counts}


def counted(rows: Iterable[dict[str, Any]], prices: Prices) -> bool:
    """Whether rows hold what backends count today: operations that have prices."""
    counts = [row.get("facts", {}).get("counts", {}) for row in rows if "entries" in row]
    return all(counts) and all(set(one) <= set(prices[b]) for of_round in counts for b, one in of_round.items())


def choose(rows: Iterable[dict[str, Any]], prices: Prices) -> None:
    """Makes the backend of the lowest estimate at these prices the one that rows say was chosen."""

    def estimate(counts: dict[str, float], costs: dict[str, float]) -> float:
        return sum(costs.get(what, 0.0) * n for what, n in counts.items())

    for row in rows:
        if counts := row.get("facts", {}).get("counts"):
            able = [name for name in counts if "median" in row["entries"][name]]
            row["ours"] = min(able, key=lambda name: estimate(counts[name], prices[name]), default=row["ours"])


def samples(rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """Returns the samples to which prices are fitted."""
    from mpnn.engine.calibration import Sample  # imports scipy

    found = []
    for row in rows:
        times = {name: entry["median"] for name, entry in row.get("entries", {}).items() if "median" in entry}
        counts = row.get("facts", {}).get("counts", {})
        if times and times.keys() <= counts.keys():
            found.append(Sample({name: counts[name] for name in times}, times))
    return found


def of_torch(rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """Times of torch's attention over complete and causal graphs, of which `dense` is made, and where this library ran
    by `tiles` those of `tiles`: the plan is to leave to torch what torch computes sooner."""
    from mpnn.engine.calibration import Sample  # imports scipy

    found = []
    for row in rows:
        match = re.match(r"(complete|causal), N (\d+), B (\d+)(, (\d+) x (\d+), (bfloat16|float32))?$", row["case"])
        taken = row.get("entries", {}).get("torch SDPA", {}).get("median")
        if row["group"] in ("structured", "host") and match and taken:
            heads, width, dtype = match.groups()[4:] if match[4] else (8, 64, "float32")
            graph = getattr(graphs, match[1])().bind(int(match[2]))
            with FakeTensorMode():
                given = _build_dot(
                    int(match[3]), int(heads), int(width), 0.0, graph, "cuda:0", getattr(torch, dtype)
                )  # fmt: skip
            with torch.set_grad_enabled(row["direction"] == BOTH):
                counts = {b.NAME: dict(b.counts(given)) for b in BACKENDS if b.NAME in ("dense", "tiles")}
            ours = row["entries"]["mpnn"]["median"]
            times = {"dense": taken}
            if dtype == "float32" and ours > taken:
                times["tiles"] = ours
            found.append(Sample({name: counts[name] for name in times}, times))
    return found


# ------------------------------------------------------------------------------------------------ peers

OF_TORCH = ("dense", "edge_list")
"""Backends that run the operations of torch of which peers consist: its attention; gather, and scatter."""
_LAYERS = {"GATConv": "GAT", "GATv2Conv": "GATv2", "TransformerConv": "dot"}


def chosen_today(row: dict[str, Any], prices: Prices) -> str | None:
    """The backend that the plan chooses at these prices for the round of a row; None for rows of whole models."""
    given = _round_of(row["case"], row.get("facts", {}))
    if given is None:
        return None
    able = ("dense", "tiles") if isinstance(given.score, Dot) and not given.graph.is_explicit else ("csr", "edge_list")
    with torch.set_grad_enabled(row["direction"] == BOTH):
        counts = {b.NAME: b.counts(given) for b in BACKENDS if b.NAME in able}
    return min(counts, key=lambda name: sum(prices[name][what] * n for what, n in counts[name].items()))


def _round_of(case: str, facts: dict[str, Any]) -> Round | None:
    """The round that a row of a peer runs, with tensors that are nowhere; of edges only the number counts."""
    dtype = torch.bfloat16 if case.endswith("bfloat16") else torch.float32
    with FakeTensorMode():
        if match := re.match(r"(complete|causal), N (\d+), B (\d+)(?:, (\d+) x (\d+))?", case):
            batch, heads, width = int(match[3]), int(match[4] or 8), int(match[5] or 64)
            graph = getattr(graphs, match[1])().bind(int(match[2]))
            return _build_dot(batch, heads, width, 0.0, graph, "cuda:0", dtype)
    if not (match := re.match(r"(\w+) (\d+)(?: x (\d+), a layer)?", case)) or "edges" not in facts:
        return None
    edges = torch.zeros(2, int(facts["edges"]), dtype=torch.int64)
    graph = graphs.from_edges(edges, int(facts["nodes"]))
    with FakeTensorMode():
        if match[1] in _LAYERS:
            return _build_explicit(_LAYERS[match[1]], int(match[2]), int(match[3]), graph, "cuda:0", dtype)
        value = _leaf("cuda:0", dtype, graph.num_src, 1, int(match[2]))
    return Round(graph, value, normalize="none", reduce=NAMED[match[1]]())
