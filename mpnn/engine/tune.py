"""Prices for this machine: the shipped ones, adjusted to the times of some forty small rounds.

The rounds use the operations that decide most plans. Every backend runs them with its own kernels, interleaved, so that
no assumption is made on how bandwidth, caches or vector instructions of the machine turn into time.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpnn import graphs
from mpnn.aggregate import Max, Mean, Sum
from mpnn.backends import BACKENDS, cost_model, tuned
from mpnn.backends.tuned import Prices
from mpnn.engine import calibration
from mpnn.engine.calibration import Sample
from mpnn.engine.choice import own_refusal as why_not
from mpnn.graph import Graph
from mpnn.kernels.dense import onednn
from mpnn.round import Result, Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU
from mpnn.update import maps

SECONDS = 1.0
FREEDOM = 1.0
"""How far a price follows a single time; see `calibration.fit`."""
_SLOW = 4.0  # backends expected to take this many times the fastest are not timed


def tune(seconds: float | None = None) -> Prices:
    """Measures for about `seconds` (None: `SECONDS`), with the threads that torch uses, and returns their prices."""
    seconds = SECONDS if seconds is None else seconds
    threads = torch.get_num_threads()
    samples = []
    rounds = list(probes())
    for round, taken in zip(rounds, least(list(map(_works, rounds)), seconds), strict=True):
        own: list[Any] = [b for b in BACKENDS if b.NAME in taken]
        samples.append(Sample({b.NAME: cost_model.per_thread(b.counts(round), threads) for b in own}, taken))
    return calibration.fit(tuned.shipped()["nanoseconds"], samples, FREEDOM)


def tune_maps(seconds: float | None = None) -> Prices:
    """The prices of linear maps (`update/maps.py`), measured in the same way. Empty where torch has no oneDNN."""
    if onednn.why_missing() is not None:
        return {}
    threads = torch.get_num_threads()
    products = [(*size, t) for size in _MAPS for t in (False, True)]
    times = least([_products(*product) for product in products], SECONDS if seconds is None else seconds)
    samples = [
        Sample({name: cost_model.per_thread(maps.counts(*product)[name], threads) for name in taken}, taken)
        for product, taken in zip(products, times, strict=True)
    ]
    return calibration.fit(tuned.shipped()["maps"]["nanoseconds"], samples, FREEDOM)


_MAPS = (16, 256, 256), (64, 512, 512), (192, 256, 512), (256, 768, 768), (512, 64, 64), (1024, 64, 256)
"""Rows, depth and width of the products that are timed."""


def _products(rows: int, depth: int, width: int, transposed: bool) -> dict[str, Callable[[], object]]:
    a: Tensor = torch.ones(rows, depth)
    b: Tensor = torch.ones(width, depth)
    if transposed:
        a, b = torch.ones(depth, rows).t(), torch.ones(depth, width).t()
    return {maps.TORCH: lambda: F.linear(a, b), maps.ONEDNN: lambda: onednn.product(a, b)}


def probes() -> Iterator[Round]:
    """Rounds of a millisecond or less, without and with gradients."""
    generator = torch.Generator().manual_seed(0)

    def scattered(nodes: int, degree: int) -> Graph:
        return graphs.from_edges(torch.randint(0, nodes, (2, nodes * degree), generator=generator), nodes)

    lists = [scattered(*size) for size in ((40, 3), (1000, 2), (600, 12))]
    shared = scattered(400, 20)
    runs = [
        *(graphs.complete().bind(48), graphs.causal().bind(192), graphs.complete().bind(100, 300)),
        *(graphs.window(2).bind(800), graphs.window(24).bind(300), graphs.documents([30] * 8).bind(240)),
    ]
    for grad in (False, True):
        # Different heads and widths over the same edges separate the price of an edge from that of a number.
        for graph in lists:
            for heads, width in ((2, 16), (8, 16)):
                yield _request(graph, AdditiveScore, heads, width, grad)
                yield _request(graph, AdditiveV2Score, heads, width, grad)
            yield _request(graph, Dot, 4, 16, grad)
            for reduce, width in ((Sum(), 16), (Sum(), 128), (Mean(), 32), (Max(), 32)):
                value = torch.zeros(graph.num_src, 1, width).requires_grad_(grad)
                yield Round(graph, value, normalize="none", reduce=reduce)
        # Heads that share a key read it once for all of them: an operation with a price of its own.
        for heads in (4, 8):
            yield _request(shared, Dot, heads, 32, grad, key_heads=1)
        for graph in runs:
            for heads, width in ((4, 16), (2, 64)):
                yield _request(graph, Dot, heads, width, grad)
        for graph in (*lists[-1:], *runs[:2], *runs[4:5]):
            bias = torch.zeros(graph.num_edges, 4).requires_grad_(grad)
            yield replace(_request(graph, Dot, 4, 16, grad), bias=(bias,))


def _request(graph: Graph, score: type, heads: int, width: int, grad: bool, key_heads: int = 0) -> Round:
    """Attention with features of ones."""

    def ones(nodes: int, *shape: int, heads: int = heads) -> Tensor:
        return torch.ones(nodes, heads, *shape).requires_grad_(grad)

    key, value = (ones(graph.num_src, width, heads=key_heads or heads) for _ in range(2))
    if score is Dot:
        return Round(graph, value, Dot(ones(graph.num_dst, width), key, width**-0.5))
    if score is AdditiveScore:
        return Round(graph, value, AdditiveScore(ones(graph.num_dst), ones(graph.num_src), LeakyReLU()))
    ends = ones(graph.num_dst, width), ones(graph.num_src, width)
    return Round(graph, value, AdditiveV2Score(*ends, torch.ones(heads, width), LeakyReLU()))


def _works(round: Round) -> dict[str, Callable[[], object]]:
    """For each backend that may be the fastest: a function that runs the round, and its backward pass."""
    leaves = [t for t in round.tensors if t.requires_grad]

    def work(run: Callable[[Round], Result]) -> Callable[[], object]:
        if not leaves:
            return lambda: run(round)
        # This first run also fills the caches of the graph, which later calls do not pay for.
        ones = torch.ones_like(run(round).out)
        return lambda: torch.autograd.grad(run(round).out, leaves, ones)

    expected = {b.NAME: b.estimate(round).seconds for b in BACKENDS if why_not(b, round) is None}
    return {b.NAME: work(b.run) for b in BACKENDS if expected.get(b.NAME, inf) < _SLOW * min(expected.values())}


def least(every: list[dict[str, Callable[[], object]]], seconds: float) -> list[dict[str, float]]:
    """The minimum time of each function, interleaved: a busy moment disturbs one turn of all, not all turns of one."""
    times = [dict.fromkeys(works, inf) for works in every]
    ends = time.perf_counter() + seconds
    turns = 0
    # The first turn warms caches up, so one is never enough.
    while turns < 2 or time.perf_counter() < ends:
        turns += 1
        for works, taken in zip(every, times, strict=True):
            for name, work in works.items():
                began = time.perf_counter()
                work()
                taken[name] = min(taken[name], time.perf_counter() - began)
    return times
