"""What a backend's work costs, measured, and what the plan makes of it.

Every backend that can runs a range of requests, all in turns, on one thread and by the processor's time, so that other
work on the machine matters little; outputs are compared before anything is timed. The prices of each backend's counts
are those that come nearest to its times, none of them negative, each case weighing alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from mpnn import graphs
from mpnn.aggregate import aggregator
from mpnn.backends import BACKENDS, cost_model
from mpnn.backends.cost_model import table
from mpnn.graph import Graph
from mpnn.graph.relations import Offset
from mpnn.request import rng
from mpnn.request.request import Request
from mpnn.request.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU
from mpnn.request.tables import BiasTable, EmbeddingTable


def dot(graph: Graph, batch: int = 1, heads: int = 4, width: int = 32, kv_heads: int | None = None) -> Request:
    kv_heads = kv_heads or heads
    query = torch.randn(batch, graph.num_dst, heads, width)
    key, value = (torch.randn(batch, graph.num_src, kv_heads, width) for _ in range(2))
    return Request(graph, value, Dot(query, key, width**-0.5))


def biased(given: Request) -> Request:
    return replace(given, bias=(BiasTable(torch.randn(65, given.heads), Offset(32)),))


def placed(given: Request) -> Request:
    """With a vector for each offset on keys, as Transformer-XL has them."""
    relation = Offset(given.graph.num_src - 1)
    vectors = EmbeddingTable(torch.randn(relation.count, given.heads, given.score.query.shape[-1]), relation)
    return replace(given, score=replace(given.score, edge_key=vectors))


def softcapped(given: Request) -> Request:
    return replace(given, score=replace(given.score, softcap=20.0))


def cast(given: Request, dtype: torch.dtype) -> Request:
    score = given.score
    return replace(
        given, value=given.value.to(dtype), score=replace(score, query=score.query.to(dtype), key=score.key.to(dtype))
    )


def dropped(given: Request) -> Request:
    return replace(given, dropout=0.1, seed=rng.new_seed(torch.device("cpu")))


def additive(graph: Graph, heads: int = 8, width: int = 8) -> Request:
    score = AdditiveScore(torch.randn(graph.num_dst, heads), torch.randn(graph.num_src, heads), LeakyReLU())
    return Request(graph, torch.randn(graph.num_src, heads, width), score)


def additive_v2(graph: Graph, heads: int = 4, width: int = 16) -> Request:
    dst, src = (torch.randn(n, heads, width) for n in (graph.num_dst, graph.num_src))
    return Request(graph, src, AdditiveV2Score(dst, src, torch.randn(heads, width), LeakyReLU()))


def aggregated(graph: Graph, reduce: str, width: int = 64) -> Request:
    return Request(graph, torch.randn(graph.num_src, 1, width), normalize="none", reduce=aggregator(reduce))


def weighed(given: Request) -> Request:
    return replace(given, bias=(torch.randn(given.graph.num_edges, 1),))


def linear(given: Request) -> Request:
    return replace(given, normalize="none")


def scattered(nodes: int, degree: int) -> Graph:
    edges = torch.randint(0, nodes, (2, nodes * degree))
    return graphs.from_edges(edges, nodes)


def cases() -> Iterator[tuple[str, Request]]:
    for n in (64, 256, 1024):
        yield f"complete {n}", dot(graphs.complete().bind(n))
        yield f"causal {n}", dot(graphs.causal().bind(n))
    yield "complete 256, batch 8, 8 x 16", dot(graphs.complete().bind(256), batch=8, heads=8, width=16)
    yield "complete 512, 4 x 64, 1 key head", dot(graphs.complete().bind(512), width=64, kv_heads=1)
    for n in (256, 1024, 2048):
        for radius in (1, 8, 64):
            yield f"window({radius}) {n}", dot(graphs.window(radius).bind(n))
    yield "window(8) 4096, 1 x 16", dot(graphs.window(8).bind(4096), heads=1, width=16)
    yield "window(32) 512, batch 8", dot(graphs.window(32).bind(512), batch=8)
    yield "longformer(64, 2) 1024", dot(graphs.longformer(64, globals=2).bind(1024))
    yield "bigbird(32) 1024", dot(graphs.bigbird(block=32).bind(1024))
    yield "documents 16 x 64", dot(graphs.documents([64] * 16).bind(1024))
    yield "documents 256 x 4", dot(graphs.documents([4] * 256).bind(1024))
    yield "documents of 1 to 45", dot(graphs.documents(list(range(1, 46))).bind(1035))
    yield "windows 28 x 28 by 7, batch 4", dot(graphs.windows(28, 28, size=7, shift=3).bind(784), batch=4, heads=3)
    yield "biased windows 28 x 28 by 7", biased(dot(graphs.windows(28, 28, size=7, shift=3).bind(784), heads=3))
    yield "biased complete 512", biased(dot(graphs.complete().bind(512)))
    yield "biased window(8) 1024", biased(dot(graphs.window(8).bind(1024)))
    yield "offsets complete 512", placed(dot(graphs.complete().bind(512)))
    yield "offsets window(8) 1024", placed(dot(graphs.window(8).bind(1024)))
    yield "softcap complete 512", softcapped(dot(graphs.complete().bind(512)))
    yield "softcap window(8) 1024", softcapped(dot(graphs.window(8).bind(1024)))
    yield "dropout complete 512", dropped(dot(graphs.complete().bind(512)))
    yield "dropout window(8) 1024", dropped(dot(graphs.window(8).bind(1024)))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        yield f"{dtype} complete 512", cast(dot(graphs.complete().bind(512)), dtype)
        yield f"{dtype} window(4) 512", cast(dot(graphs.window(4).bind(512)), dtype)
    yield "window(64) 2048, 12 x 64", dot(graphs.window(64).bind(2048), heads=12, width=64)
    yield "causal 1024, 12 x 64", dot(graphs.causal().bind(1024), heads=12, width=64)
    yield "softcap complete 256, 8 x 8", softcapped(dot(graphs.complete().bind(256), heads=8, width=8))
    for name, nodes, degree in (("tiny", 100, 4), ("small", 2000, 5), ("middling", 20_000, 20), ("large", 60_000, 8)):
        graph = scattered(nodes, degree)
        yield f"{name}: additive 8 x 8", additive(graph)
        yield f"{name}: additive 1 x 64", additive(graph, heads=1, width=64)
        yield f"{name}: additive (v2) 4 x 16", additive_v2(graph)
        yield f"{name}: dot 8 x 16", dot(graph, heads=8, width=16)
        yield f"{name}: dot 1 x 128", dot(graph, heads=1, width=128)
        for reduce in ("sum", "mean", "max", "var"):
            yield f"{name}: {reduce} 64", aggregated(graph, reduce)
        yield f"{name}: sum 16", aggregated(graph, "sum", 16)
        yield f"{name}: weighted sum 64", weighed(aggregated(graph, "sum"))
    yield "middling: dropout dot 8 x 16", dropped(dot(scattered(20_000, 20), heads=8, width=16))
    for topology in (graphs.complete(), graphs.causal(), graphs.window(8)):
        for n in (64, 512, 2048):
            for width in (16, 64):
                yield f"linear {topology} {n}, {width}", linear(dot(topology.bind(n), width=width))


def with_gradients(given: Request) -> Request:
    leaves = {id(t): t.clone().requires_grad_() for t in given.tensors}
    score = given.score
    match score:
        case Dot(query, key):
            score = replace(score, query=leaves[id(query)], key=leaves[id(key)])
        case AdditiveScore(dst, src) | AdditiveV2Score(dst, src):
            score = replace(score, dst=leaves[id(dst)], src=leaves[id(src)])
    return replace(given, value=leaves[id(given.value)], score=score)


def work(given: Request, run: Callable[[Request], tuple[torch.Tensor, object]]) -> Callable[[], None]:
    """One round: forward, and backward when gradients are asked for."""
    leaves = [t for t in given.tensors if t.requires_grad]
    direction = torch.randn_like(run(given)[0])

    def once() -> None:
        out, _ = run(given)
        if leaves:
            torch.autograd.grad(out, leaves, direction)

    return once


def best(works: list[Callable[[], None]], seconds: float, clock: Callable[[], float]) -> list[float]:
    """The least time of each, taken in turns, so that a busy moment of the machine spoils no comparison."""
    least = [float("inf")] * len(works)
    ends = time.perf_counter() + seconds * len(works)
    rounds = 0
    while rounds < 3 or time.perf_counter() < ends:
        rounds += 1
        for k, once in enumerate(works):
            began = clock()
            once()
            least[k] = min(least[k], clock() - began)
    return least


Prices = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Measured:
    """One request: for each backend that can, what it counts and the seconds it took."""

    case: str
    direction: str
    counts: dict[str, dict[str, float]]
    seconds: dict[str, float]

    def estimated(self, prices: Prices | None = None) -> dict[str, float]:
        """Seconds by the given prices, or by those that plans go by."""
        prices = prices or table()["nanoseconds"]
        return {
            name: 1e-9 * sum(prices[name][kind] * n for kind, n in counts.items())
            for name, counts in self.counts.items()
        }

    def regret(self, prices: Prices | None = None) -> float:
        """How many times the fastest the plan's choice takes."""
        estimated = self.estimated(prices)
        return self.seconds[min(estimated, key=estimated.__getitem__)] / min(self.seconds.values())


def measure(seconds: float, only: str = "") -> Iterator[Measured]:
    """Each case in turn, forward and with its backward pass."""
    for name, plain in cases():
        if only not in name:
            continue
        for direction, given in (("forward", plain), ("forward + backward", with_gradients(plain))):
            able = [b for b in BACKENDS if b.supports(given) is None]
            outs = [b.run(given)[0] for b in able]
            close = torch.finfo(given.value.dtype).eps ** 0.5
            for out in outs[1:]:
                torch.testing.assert_close(out, outs[0], rtol=close, atol=close)
            able = [b for b in able if b.estimate(given).seconds < 20 * min(b.estimate(given).seconds for b in able)]
            least = best([work(given, b.run) for b in able], seconds, time.process_time)
            counts = {b.NAME: dict(b.counts(given)) for b in able}
            yield Measured(name, direction, counts, dict(zip(counts, least, strict=True)))


def fitted(found: list[Measured]) -> Prices:
    """Nanoseconds for each backend and kind of work; what no case counts stays."""
    prices = {name: dict(costs) for name, costs in table()["nanoseconds"].items()}
    for name, costs in prices.items():
        rows = [(m.counts[name], m.seconds[name] * 1e9) for m in found if name in m.seconds]
        kinds = sorted({kind for counts, _ in rows for kind in counts})
        if not rows:
            continue
        matrix = np.array([[counts.get(kind, 0.0) / taken for kind in kinds] for counts, taken in rows])
        scale = matrix.max(0)
        found_prices, _ = nnls(matrix / scale, np.ones(len(rows)))
        costs |= {kind: float(f"{x:.3g}") for kind, x in zip(kinds, found_prices / scale, strict=True)}
    return prices


def as_text(one: Measured) -> str:
    """A line for each case."""
    expected = one.estimated()
    times = ", ".join(f"{name} {s * 1e3:.2f} ({expected[name] * 1e3:.2f})" for name, s in one.seconds.items())
    return f"{one.case}, {one.direction}: {times} ms; {one.regret():.2f}"


def write(prices: Prices, machine: dict[str, Any]) -> Path:
    """Puts prices into the package, with what they were measured on."""
    path = Path(cost_model.__file__).with_name("costs.json")
    path.write_text(json.dumps({"measured": machine, "nanoseconds": prices}, indent=1) + "\n")
    return path
