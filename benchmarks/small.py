"""Overheads of the operator for each call and each new graph, and the binding of a graph of a million nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

import torch
from torch import Tensor

from benchmarks.contest import FORWARD, OURS, Bar, Case, Contest, Entry
from benchmarks.sequences import features
from benchmarks.sizes import Sizes
from benchmarks.truth import Agreement
from mpnn import MessagePassing, graphs, ops
from mpnn.engine.choice import choose
from mpnn.round import Round
from mpnn.scores import Dot

KERNEL, KEPT = "its kernel alone", "the graph of an earlier call"


def cases(sizes: Sizes) -> Iterator[Case]:
    for backend in ("auto", "tiles", "csr"):
        name = f"attend on 16 nodes, 1 x 8, backend {backend}"
        yield Case("overhead", name, partial(_overhead, backend), (FORWARD,))
    yield Case("overhead", "a sum over 2 edges, 8 features, the graph built again", _anew, (FORWARD,))
    name = f"bigbird() over {sizes.million:,} nodes"
    yield Case("binding", name, partial(_binding, sizes.million), (FORWARD,))


def _overhead(backend: str) -> Contest:
    """The call that a user makes, and what runs once it is checked and planned; the work is next to nothing."""
    graph, given = graphs.window(2).bind(16), features(16, 1, 8)
    query, key, value = given
    request = Round(graph, value, Dot(query, key, 8**-0.5))
    with torch.no_grad():
        kernel = choose(request, backend)
    bar = Bar("at most 100 us over its kernel", 1e-4, "over", FORWARD, KERNEL)
    entries = [
        Entry(OURS, lambda: ops.attend(graph, query, key, value, backend=backend)),
        Entry(KERNEL, lambda: kernel.run(request)[0]),
    ]
    return Contest(entries, Agreement(), Agreement.description, [bar], {"nodes": 16})


def _anew() -> Contest:
    """A layer over a graph made for this call, which is checked, planned and sorted, compared with a graph made
    before."""
    edges, x, layer = torch.tensor([[0, 1], [1, 0]]), torch.randn(2, 8), MessagePassing(None, "sum")
    graph = graphs.from_edges(edges, 2)
    entries = [
        Entry(OURS, lambda: layer(x, graphs.from_edges(edges, 2))),
        Entry(KEPT, lambda: layer(x, graph)),
    ]
    bar = Bar(f"at most 60 us over {KEPT}", 6e-5, "over", FORWARD, KEPT)
    return Contest(entries, Agreement(), Agreement.description, [bar], {"nodes": 2})


def _binding(nodes: int) -> Contest:
    seeds = count()  # binding is cached, so each call asks for another graph

    def call() -> Tensor:
        return torch.tensor(graphs.bigbird(seed=next(seeds)).bind(nodes).num_edges)

    bars = [
        Bar("at most 3 s", 3.0, "seconds", FORWARD),
        Bar("at most 1 GB", 1e9, "bytes", FORWARD),
    ]
    return Contest([Entry(OURS, call)], bars=bars, facts={"nodes": nodes})
