"""Prices of the operations of backends, fitted to measured times.

Times of requests drawn at random (`python -m benchmarks regret --times FILE`) decide most prices. The cases below add
the operations that these rarely or never use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit

from benchmarks import regret
from benchmarks.regret import Times
from benchmarks.requests import (
    additive,
    additive_v2,
    aggregated,
    alone,
    biased,
    by_class,
    cast,
    dot,
    draw,
    dropped,
    linear,
    per_edge,
    placed,
    scattered,
    softcapped,
    weighed,
    with_gradients,
)
from mpnn import graphs
from mpnn.backends import BACKENDS, cost_model, tuned
from mpnn.backends.tuned import Prices
from mpnn.engine import calibration
from mpnn.engine.calibration import Sample
from mpnn.graph import Graph
from mpnn.round import Round

_FREEDOM = 4.0  # prices follow the times; those that few cases count stay near what they were
_DRAW = 1.1  # times the fastest: up to it, a choice is right
_MARGIN = 0.04  # of log estimates, by which a right choice is to be below the others
_NEAR = 3e-3  # weight of the errors of estimates, where choices decide
_NEW = {True: 20_000.0, False: 0.1}  # nanoseconds, of operations once per call and of others


def cases() -> Iterator[tuple[str, Round]]:
    """Requests that use every operation, also those that are rarely drawn at random. The same at each call."""
    torch.manual_seed(0)
    for n in (64, 256, 1024):
        yield f"complete {n}", dot(graphs.complete().bind(n))
        yield f"causal {n}", dot(graphs.causal().bind(n))
    yield "complete 256, batch 8, 8 x 16", dot(graphs.complete().bind(256), batch=8, heads=8, width=16)
    yield "complete 512, 4 x 64, 1 key head", dot(graphs.complete().bind(512), width=64, kv_heads=1)
    for n in (256, 1024, 2048):
        for radius in (1, 8, 64):
            yield f"window({radius}) {n}", dot(graphs.window(radius).bind(n))
    for degree in (32, 128):
        for heads, width, kv_heads in ((4, 64, 1), (8, 64, 1), (16, 32, 1), (16, 64, 2)):
            name = f"{degree} chosen of 1024, {heads} x {width}, {kv_heads} key heads"
            yield name, dot(scattered_rows(1024, degree), heads=heads, width=width, kv_heads=kv_heads)
    for size, top, width in ((32, 4, 32), (64, 4, 32), (64, 4, 64), (128, 4, 64)):
        graph = chosen_blocks(2048, size, top)
        yield f"{top} chosen blocks of {size}, 1 x {width}", dot(graph, heads=1, width=width)
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
    for n in (48, 96, 160):
        yield f"pair bias complete {n}, batch {n}", per_edge(dot(graphs.complete().bind(n), batch=n))
    yield "pair bias complete 256, batch 64", per_edge(dot(graphs.complete().bind(256), batch=64))
    yield "pair bias causal 256, batch 16", per_edge(dot(graphs.causal().bind(256), batch=16))
    yield "pair bias window(8) 1024", per_edge(dot(graphs.window(8).bind(1024)))
    yield "pair bias per entry complete 256, batch 4", per_edge(dot(graphs.complete().bind(256), batch=4), 4)
    yield "classes complete 256", by_class(dot(graphs.complete().bind(256)))
    yield "classes window(8) 1024, batch 2", by_class(dot(graphs.window(8).bind(1024), batch=2))
    yield "offsets complete 512", placed(dot(graphs.complete().bind(512)))
    yield "offsets window(8) 1024", placed(dot(graphs.window(8).bind(1024)))
    yield "softcap complete 512", softcapped(dot(graphs.complete().bind(512)))
    yield "softcap complete 1024, batch 4", softcapped(dot(graphs.complete().bind(1024), batch=4))
    yield "softcap window(8) 1024", softcapped(dot(graphs.window(8).bind(1024)))
    yield "biases alone, window(8) 1024", alone(biased(dot(graphs.window(8).bind(1024))))
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
        yield f"{name}: softmax of biases 64", alone(weighed(dot(graph, heads=1, width=64)))
        yield f"{name}: bias per edge, dot 8 x 16", per_edge(dot(graph, heads=8, width=16))
        yield f"{name}: weighted sum 64", weighed(aggregated(graph, "sum"))
    yield "middling: dropout dot 8 x 16", dropped(dot(scattered(20_000, 20), heads=8, width=16))
    for topology in (graphs.complete(), graphs.causal(), graphs.window(8)):
        for n in (64, 512, 2048):
            for width in (16, 64):
                yield f"linear {topology} {n}, {width}", linear(dot(topology.bind(n), width=width))


def scattered_rows(nodes: int, degree: int) -> Graph:
    """Each node with this many sources of its own choice, kept as runs."""
    return graphs.chosen(torch.rand(nodes, nodes).topk(degree, -1).indices, nodes)


def chosen_blocks(nodes: int, size: int, top: int) -> Graph:
    """Each node with this many blocks of sources of its own choice."""
    gate = torch.rand(nodes, nodes // size)
    return graphs.blocks(
        torch.zeros_like(gate, dtype=torch.bool).scatter(-1, gate.topk(top, -1).indices, True), size, nodes
    )


def measure(seconds: float, only: str = "") -> Iterator[tuple[str, Sample]]:
    """The times of each case, without and with gradients (also of its biases), each backend for about `seconds`."""
    for name, plain in cases():
        if only in name:
            yield name, sample(plain, regret.times(plain, seconds))
            for biases in (False, True) if plain.bias else (False,):
                given = with_gradients(plain, biases)
                yield f"{name}, backward{' to biases' * biases}", sample(given, regret.times(given, seconds))


def sample(request: Round, seconds: dict[str, float]) -> Sample:
    return Sample({b.NAME: b.counts(request) for b in BACKENDS if b.NAME in seconds}, seconds)


def of_drawn(times: Times) -> Sample:
    return sample(draw(times.seed, times.index).request, times.seconds)


def fitted(samples: Iterable[Sample], shipped: Prices | None = None, shared: float = calibration.SHARED) -> Prices:
    """Prices that explain the samples, from those that are shipped. Operations that no sample counts keep their
    price, and new ones start at that of float32, or at `_NEW`."""
    samples = list(samples)
    shipped = tuned.shipped()["nanoseconds"] if shipped is None else shipped
    prices = {name: dict(costs) for name, costs in shipped.items()}
    for name, counts in (item for sample in samples for item in sample.counts.items()):
        for kind in counts:
            known = prices[name].get(kind.removeprefix("narrow "), _NEW[cost_model.is_once(kind)])
            prices[name].setdefault(kind, known)
    return calibration.fit(prices, samples, _FREEDOM, shared)


def decided(samples: Sequence[Sample], prices: Prices) -> Prices:
    """Prices near these, by which the lowest estimate of each sample is of a backend within `_DRAW` of the fastest,
    as far as prices can: of each wrong choice, the estimate of the fastest is pressed below that of the others."""
    columns = sorted({(b, kind) for sample in samples for b in sample.seconds for kind in sample.counts[b]})
    at = {column: k for k, column in enumerate(columns)}
    rounds = []
    for sample in samples:
        counts = np.zeros((len(sample.seconds), len(columns)))
        for row, backend in zip(counts, sample.seconds, strict=True):
            for kind, count in sample.counts[backend].items():
                row[at[backend, kind]] = count
        rounds.append((counts, np.log(1e9 * np.array(list(sample.seconds.values())))))
    start = np.log([prices[b][kind] for b, kind in columns])

    def loss(x: np.ndarray, width: float, freedom: float) -> tuple[float, np.ndarray]:
        total = freedom * ((x - start) ** 2).sum()
        slope = 2 * freedom * (x - start)
        for counts, times in rounds:
            parts = counts * np.exp(x)
            estimate = parts.sum(1)
            slopes = parts / estimate[:, None]
            error = np.log(estimate) - times
            total += _NEAR * (error**2).sum()
            slope += 2 * _NEAR * error @ slopes
            good = np.flatnonzero(times <= times.min() + np.log(_DRAW))
            best = good[estimate[good].argmin()]
            for bad in set(range(len(times))) - set(good.tolist()):
                gap = (np.log(estimate[best] / estimate[bad]) + _MARGIN) / width
                lost = 0.2 + times[bad] - times.min()
                total += lost * width * np.logaddexp(0.0, gap)
                slope += lost * expit(gap) * (slopes[best] - slopes[bad])
        return total, slope

    found: list[tuple[float, Prices]] = []
    for freedom in (2e-2, 1e-2, 5e-3, 2e-3, 1e-3):
        x = start
        for width in (0.1, 0.03, 0.01):
            x = minimize(loss, x, (width, freedom), jac=True, method="L-BFGS-B", options={"maxiter": 1000}).x
        result = {b: dict(costs) for b, costs in prices.items()}
        for (b, kind), price in zip(columns, np.exp(x), strict=True):
            result[b][kind] = float(f"{price:.4g}")
        found.append((worst(samples, result), result))
        if found[-1][0] <= _DRAW:
            break
    return min(found, key=lambda pair: pair[0])[1]


def worst(samples: Iterable[Sample], prices: Prices) -> float:
    """The largest ratio of a choice's time to the fastest."""
    ratios = [1.0]
    for sample in samples:
        estimates = {b: sum(prices[b][kind] * n for kind, n in sample.counts[b].items()) for b in sample.seconds}
        ratios.append(sample.seconds[min(estimates, key=estimates.__getitem__)] / min(sample.seconds.values()))
    return max(ratios)


def write(prices: Prices, machine: dict[str, Any]) -> Path:
    """Puts prices into the package, with the machine that they were measured on."""
    return _put({"measured": machine, "nanoseconds": prices})


def write_gpu(prices: Prices, machine: dict[str, Any]) -> Path:
    """The same for the prices on a GPU."""
    return _put({"cuda": {"measured": machine, "nanoseconds": prices}})


def _put(changed: dict[str, Any]) -> Path:
    path = Path(tuned.__file__).with_name("costs.json")
    path.write_text(json.dumps({**tuned.shipped(), **changed}, indent=1) + "\n")
    return path
