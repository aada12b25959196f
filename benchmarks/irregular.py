"""Irregular graphs: attention against PyTorch Geometric's layers and the edge list; sums, means and maxima."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import graph_peers, roofs
from benchmarks.contest import BOTH, FORWARD, OURS, Bar, Case, Contest, Entry
from benchmarks.sequences import attention, features, memory, truth
from benchmarks.sizes import Sizes
from benchmarks.truth import Sampled, error, of_layer
from mpnn import Graph, MessagePassing, graphs, ops
from mpnn.attention import Additive, AdditiveV2, Degree

PLAIN = "one plain sum (mpnn)"


def cases(sizes: Sizes, backend: str) -> Iterator[Case]:
    nodes, edges = sizes.graph
    where = f"{nodes:,} nodes, {edges:,} edges"
    for heads, width in sizes.shapes:
        make = partial(_attention, nodes, edges, heads, width, backend)
        yield Case("irregular", f"attention {heads} x {width}, {where}", make, series=f"attention, {where}", x="heads")
    heads, width = sizes.shapes[-2]
    bars = faster("PyG GATConv", 8, 6)
    make = partial(gat, nodes, edges, heads, width, backend, bars)
    yield Case("irregular", f"GATConv {heads} x {width}, {where}", make)
    bars = faster("PyG TransformerConv", 15, 9)
    make = partial(transformer, nodes, edges, heads, width, backend, bars)
    yield Case("irregular", f"TransformerConv {heads} x {width}, {where}", make)
    yield Case("irregular", f"GCNConv {heads * width}, {where}", partial(_gcn, nodes, edges, heads * width, backend))
    for reduce in ("sum", "mean", "max"):
        # of equal maxima torch's kernels give one the whole gradient, so there the forward pass alone is compared
        directions = (FORWARD,) if reduce == "max" else (FORWARD, BOTH)
        bars = faster("torch.sparse.mm reduce", 1.5)
        make = partial(reduced, nodes, edges, heads * width, reduce, backend, bars)
        yield Case("reduce", f"{reduce} of {heads * width}, {where}", make, directions)
    for count in sizes.edges:
        make = partial(_edges, count, heads, width, backend)
        yield Case("edges", f"attention {heads} x {width}, {count:,} edges", make, series="attention", x="edges")


@lru_cache(maxsize=1)
def citations(nodes: int, edges: int, seed: int = 0) -> Graph:
    """A graph with hubs, as citations have: the popularity of sources falls as rank^-0.6."""
    rng = np.random.default_rng(seed)
    popularity = np.cumsum(np.arange(1, nodes + 1) ** -0.6)
    rank = np.searchsorted(popularity, rng.random(edges) * popularity[-1])
    src = rng.permutation(nodes)[rank.clip(max=nodes - 1)]
    return graphs.from_edges(torch.from_numpy(np.stack([src, rng.integers(0, nodes, edges)])), nodes)


def plain_sum(graph: Graph, width: int, **options: Any) -> Entry:
    x = torch.randn(graph.num_src, width, **options).requires_grad_()
    return Entry(PLAIN, lambda: ops.aggregate(graph, x), (x,), checked=False)


def facts(graph: Graph, heads: int, width: int) -> dict[str, float]:
    return {"nodes": graph.num_dst, "edges": graph.num_edges, "heads": heads, "width": width}


def _roof(graph: Graph, heads: int, width: int) -> dict[str, float]:
    return roofs.of_attention(graph.num_dst, graph.num_edges, heads, width, is_gathered=True)


def _attention(nodes: int, edges: int, heads: int, width: int, backend: str) -> Contest:
    graph, given = citations(nodes, edges), features(nodes, heads, width)
    entries = [attention(graph, given, backend), plain_sum(graph, heads * width)]
    bars = [Bar("at most 3.5x one plain sum over the same edges", 3.5, "at most", d, PLAIN) for d in (FORWARD, BOTH)]
    bars.append(memory(graph, heads, width))
    exact = truth(graph, given)
    return Contest(entries, exact, exact.description, bars, facts(graph, heads, width) | _roof(graph, heads, width))


def _edges(edges: int, heads: int, width: int, backend: str) -> Contest:
    graph = citations(max(edges // 14, 16), edges)  # the degree of the graph above
    given = features(graph.num_src, heads, width)
    entries = [attention(graph, given, backend), plain_sum(graph, heads * width)]
    exact = truth(graph, given)
    return Contest(entries, exact, exact.description, (), facts(graph, heads, width) | _roof(graph, heads, width))


# ------------------------------------------------------------------------------------------------ whole layers


def layer(op: nn.Module, x: Tensor, name: str = OURS) -> Entry:
    """A layer on features; its gradients are those of the features and of every parameter."""
    return Entry(name, lambda: op(x), (x, *op.parameters()))


def _layer_contest(
    graph: Graph, op: MessagePassing, x: Tensor, rival: graph_peers.Peer, bars: Sequence[Bar], width: int
) -> Contest:
    """Our layer, and a peer with the same weights."""
    exact = of_layer(op, graph, x, width)
    return Contest([layer(op, x), rival(graph, op, x)], exact, exact.description, bars, facts(graph, 1, width))


def faster(peer: str, forward: float, both: float | None = None) -> list[Bar]:
    pairs = ((FORWARD, forward), (BOTH, both))
    return [Bar(f"at least {x}x faster than {peer}", x, "at least", d, peer) for d, x in pairs if x is not None]


def gat(nodes: int, edges: int, heads: int, width: int, backend: str, bars: Sequence[Bar], **options: Any) -> Contest:
    """Options: dtype and device."""
    graph, x = _inputs(nodes, edges, heads * width, options)
    attend = Additive(heads * width, width, heads).to(**options)
    op = MessagePassing(graph, "sum", None, attend, backend=backend)
    return _layer_contest(graph, op, x, graph_peers.gat, bars, heads * width)


def gatv2(nodes: int, edges: int, heads: int, width: int, backend: str, bars: Sequence[Bar], **options: Any) -> Contest:
    """Options: dtype and device."""
    graph, x = _inputs(nodes, edges, heads * width, options)
    attend = AdditiveV2(heads * width, width, heads).to(**options)
    op = MessagePassing(graph, "sum", None, attend, backend=backend)
    return _layer_contest(graph, op, x, graph_peers.gatv2, bars, heads * width)


def transformer(
    nodes: int, edges: int, heads: int, width: int, backend: str, bars: Sequence[Bar], **options: Any
) -> Contest:
    """Options: dtype and device."""
    graph, x = _inputs(nodes, edges, heads * width, options)
    attend = graph_peers.Unmixed(heads * width, heads).to(**options)
    op = MessagePassing(graph, "sum", None, attend, backend=backend)
    return _layer_contest(graph, op, x, graph_peers.transformer, bars, heads * width)


def _inputs(nodes: int, edges: int, width: int, options: dict[str, Any]) -> tuple[Graph, Tensor]:
    x = torch.randn(nodes, width, generator=torch.Generator().manual_seed(0)).to(**options).requires_grad_()
    return citations(nodes, edges).to(x.device), x


def _gcn(nodes: int, edges: int, width: int, backend: str) -> Contest:
    graph, x = citations(nodes, edges), torch.randn(nodes, width).requires_grad_()
    op = MessagePassing(graph, "sum", None, Degree(width, width), backend=backend)
    exact = deepcopy(op).double()
    exact.backend = "edge_list"
    with torch.no_grad():
        expected = exact(x.double())  # whole, as degrees are those of all rows

    def verify(entry: Entry, direction: str) -> float:
        return error(entry.name, "output", entry.call().detach(), expected)

    entries = [layer(op, x), graph_peers.gcn(graph, op, x)]
    return Contest(entries, verify, "float64 specification, outputs only", (), facts(graph, 1, width))


# ------------------------------------------------------------------------------------------------ sums


def reduced(
    nodes: int, edges: int, width: int, reduce: str, backend: str, bars: Sequence[Bar], **options: Any
) -> Contest:
    """Options: dtype and device."""
    graph, x = _inputs(nodes, edges, width, options)
    ours = Entry(OURS, lambda: ops.aggregate(graph, x, reduce, backend=backend), (x,))

    def compute(part: Graph, rows: Tensor, x: Tensor) -> Tensor:
        return ops.aggregate(part, x, reduce, backend="edge_list")

    exact = Sampled(graph, [x], compute, width)
    entries = [ours, *graph_peers.reducers(graph, x, reduce)]
    needs = roofs.of_sum(graph.num_dst, graph.num_edges, width)
    return Contest(entries, exact, exact.description, bars, facts(graph, 1, width) | needs)
