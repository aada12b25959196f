"""Attention over sequences: complete and causal, sparse patterns, and how time grows with length, density and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import peers, roofs
from benchmarks.contest import BOTH, FORWARD, OURS, Bar, Case, Contest, Entry, Missing
from benchmarks.peers import Features
from benchmarks.sizes import Sizes
from benchmarks.truth import Sampled
from mpnn import Graph, Topology, graphs, ops
from mpnn.kernels.cpu import library

DENSE = "torch SDPA, dense"
SWIN = "torch SDPA by windows"
WINDOW = 7  # of images
DENSE_RATE = {FORWARD: 0.8, BOTH: 0.75}  # of the products alone, in the cache
SPARSE_RATE = {"AVX512": {FORWARD: 0.65, BOTH: 0.6}, "AVX2": {FORWARD: 0.6, BOTH: 0.55}}
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cases(sizes: Sizes, backend: str) -> Iterator[Case]:
    yield from _dense(sizes, backend)
    yield from _sparse(sizes, backend)
    yield from _series(sizes, backend)


# ------------------------------------------------------------------------------------------------ entries


def features(nodes: int, heads: int, width: int, **options: Any) -> Features:
    """Queries, keys and values [N, H, D]; options: dtype and device."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(nodes, heads, width, generator=generator).to(**options) for _ in range(3))
    query, key, value = (x.requires_grad_() for x in drawn)
    return query, key, value


def attention(graph: Graph, given: Features, backend: str, name: str = OURS) -> Entry:
    return Entry(name, lambda: ops.attend(graph, *given, backend=backend), given)


def truth(graph: Graph, given: Features) -> Sampled:
    def compute(part: Graph, rows: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.attend(part, query[rows], key, value, backend="edge_list")

    return Sampled(graph, given, compute, width=given[0].shape[1] * given[0].shape[2])


def contest(
    topology: Topology,
    nodes: int,
    heads: int,
    width: int,
    backend: str,
    rivals: Callable[[Graph, Features], Sequence[Entry | Missing]],
    bars: Callable[[Graph], Sequence[Bar]] = lambda graph: (),
    **options: Any,
) -> Contest:
    given = features(nodes, heads, width, **options)
    graph = topology.bind(nodes).to(given[0].device)
    exact = truth(graph, given)
    facts = {
        "nodes": nodes,
        "heads": heads,
        "width": width,
        "edges": graph.num_edges,
        "density": graph.num_edges / nodes**2,
    } | roofs.of_attention(nodes, graph.num_edges, heads, width, is_gathered=False)
    entries = [attention(graph, given, backend), *rivals(graph, given)]
    return Contest(entries, exact, exact.description, bars(graph), facts)


def memory(graph: Graph, heads: int, width: int) -> Bar:
    limit = 4 * (12 * max(graph.num_dst, graph.num_src) * heads * width + 4 * graph.num_edges * heads)
    return Bar("peak memory: at most 12 N H D + 4 E H floats", limit, "bytes", BOTH)


# ------------------------------------------------------------------------------------------------ complete, causal


def _dense(sizes: Sizes, backend: str) -> Iterator[Case]:
    for topology, options in ((graphs.complete(), {}), (graphs.causal(), {"is_causal": True})):
        for n in sizes.dense:
            bars, rivals = partial(_dense_bars, sizes), partial(_dense_rivals, options)
            make = partial(contest, topology, n, sizes.heads, sizes.width, backend, rivals, bars)
            yield Case("dense", f"{topology}, N {n}", make, series=str(topology), x="nodes")


def _unit(up_to: int, graph: Graph, given: Features) -> list[Entry | Missing]:
    """torch's attention with the graph as its mask, up to a length beyond which it takes too long."""
    return [peers.masked(graph, given)] if graph.num_dst <= up_to else []


def _dense_rivals(options: dict[str, Any], graph: Graph, given: Features) -> list[Entry | Missing]:
    return [peers.dense(given, checked=True, **options), *_in_cache(graph, given)]


def _in_cache(graph: Graph, given: Features) -> list[Entry]:
    """The same products in the cache, which need our kernels."""
    _, heads, width = given[0].shape
    return [peers.in_cache(4.0 * graph.num_edges * heads * width, width)] if library.why_missing() is None else []


def _local(up_to: int, radius: int, graph: Graph, given: Features) -> Sequence[Entry | Missing]:
    """Up to twice the length that torch's attention is run at, local-attention; beyond, it takes too long."""
    found = _unit(up_to, graph, given)
    return [*found, peers.local_attention(given, radius, False)] if graph.num_dst <= 2 * up_to else found


def _dense_bars(sizes: Sizes, graph: Graph) -> list[Bar]:
    if graph.num_dst < 1024:
        limit = 1.05 if graph.num_dst <= 256 else 1.0
        return [_at_most("torch SDPA's time", limit, d, 1.0) for d in (FORWARD, BOTH)]
    own = memory(graph, sizes.heads, sizes.width)
    return [*(_at_most("torch SDPA's time", 1.05, d, 1.0) for d in (FORWARD, BOTH)), *_rates(DENSE_RATE), own]


def _rates(limits: Mapping[str, float]) -> list[Bar]:
    return [
        Bar(f"at least {x} of the rate of {peers.IN_CACHE}", x, "at least", d, peers.IN_CACHE)
        for d, x in limits.items()
    ]


def _at_most(what: str, limit: float, direction: str, factor: float) -> Bar:
    return Bar(f"at most {limit} x {what}", limit, "at most", direction, DENSE, factor)


# ------------------------------------------------------------------------------------------------ sparse patterns


def _sparse(sizes: Sizes, backend: str) -> Iterator[Case]:
    n, radius = sizes.nodes, sizes.nodes // 16
    uneven = [n // 8 + d for d in (7, -7, 101, -101, 33, -33, 0, 0)]
    window = partial(_window_rivals, radius, False, lambda b, h, i, j: (i - j).abs() <= radius)
    before = partial(_window_rivals, radius, True, lambda b, h, i, j: (i >= j) & (i - j <= radius))
    packed = partial(_document_rivals, uneven)
    for name, topology, bars_of, rivals in (
        (f"window({radius})", graphs.window(radius), _window_bars, window),
        (f"causal() & window({radius})", graphs.causal() & graphs.window(radius), _window_bars, before),
        (f"documents, 8 of about {n // 8}", graphs.documents(uneven), _document_bars, packed),
        (f"longformer({2 * radius}, 4)", graphs.longformer(2 * radius, globals=4), _sparse_bars, _masked_rivals),
        ("bigbird()", graphs.bigbird(), _sparse_bars, _masked_rivals),
    ):
        bars = partial(bars_of, sizes)
        make = partial(contest, topology, n, sizes.heads, sizes.width, backend, rivals, bars)
        yield Case("sparse", f"{name}, N {n}", make)
    for heads, side, shift in sizes.images:
        images = graphs.windows(side, side, WINDOW, shift)
        rivals = partial(_by_windows, side, shift)
        make = partial(contest, images, side * side, heads, 32, backend, rivals, _image_bars)
        shifted = f", shifted by {shift}" if shift else ""
        yield Case("sparse", f"windows of {WINDOW} x {WINDOW} in {side} x {side}{shifted}, {heads} x 32", make)


def _by_windows(side: int, shift: int, graph: Graph, given: Features) -> list[Entry | Missing]:
    """torch's attention as Swin has it: a roll, a copy by windows, attention in each, and back."""
    _, heads, width = given[0].shape
    count = side // WINDOW
    grid = side, side, heads, width
    back = 0, 3, 1, 4, 2, 5

    def split(x: Tensor) -> Tensor:
        rolled = x.view(grid).roll((-shift, -shift), (0, 1)) if shift else x
        parts = rolled.view(count, WINDOW, count, WINDOW, heads, width).permute(0, 2, 4, 1, 3, 5)
        return parts.reshape(count * count, heads, WINDOW * WINDOW, width)

    def call() -> Tensor:
        out = scaled_dot_product_attention(*map(split, given), attn_mask=mask)
        image = out.view(count, count, heads, WINDOW, WINDOW, width).permute(back).reshape(grid)
        return (image.roll((shift, shift), (0, 1)) if shift else image).view(side * side, heads, width)

    mask = None
    if shift:
        node = torch.arange(side * side, dtype=torch.float32)[:, None, None].expand(-1, heads, width)
        node = split(node.contiguous())[:, :1, :, 0].long()
        mask = graph.dense()[node[..., None], node[..., None, :]]
    return [Entry(SWIN, call, given)]


def _image_bars(graph: Graph) -> list[Bar]:
    return [Bar(f"at most the time of {SWIN}", 1.0, "at most", d, SWIN) for d in (FORWARD, BOTH)]


def _masked_rivals(graph: Graph, given: Features) -> list[Entry | Missing]:
    return [peers.dense(given), peers.masked(graph, given), *_in_cache(graph, given)]


def _window_rivals(radius: int, causal: bool, mask: Mask, graph: Graph, given: Features) -> list[Entry | Missing]:
    return [
        *_masked_rivals(graph, given),
        peers.flex(given, mask),
        peers.local_attention(given, radius, causal),
        peers.natten(given, radius, causal),
    ]


def _document_rivals(lengths: list[int], graph: Graph, given: Features) -> list[Entry | Missing]:
    return [*_masked_rivals(graph, given), peers.looped(lengths, given), peers.padded(lengths, given)]


def _sparse_bars(sizes: Sizes, graph: Graph) -> list[Bar]:
    """torch's dense attention uses half of an AVX-512 processor and most of an AVX2 one, so the unit differs."""
    share = graph.num_edges / (graph.num_dst * graph.num_src)
    limit = 0.8 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1.0
    found = [_at_most("(dense SDPA time x density)", limit, d, share) for d in (FORWARD, BOTH)]
    rates = SPARSE_RATE.get(torch.backends.cpu.get_cpu_capability(), {})
    return [*found, *_rates(rates), memory(graph, sizes.heads, sizes.width)]


def _window_bars(sizes: Sizes, graph: Graph) -> list[Bar]:
    text = "at least 1.6x faster than FlexAttention, its mask built"
    return [*_sparse_bars(sizes, graph), Bar(text, 1.6, "at least", FORWARD, "FlexAttention")]


def _document_bars(sizes: Sizes, graph: Graph) -> list[Bar]:
    against = [
        Bar(f"at most the time of {peer}", 1.0, "at most", d, peer)
        for peer in (peers.LOOPED, peers.PADDED)
        for d in (FORWARD, BOTH)
    ]
    return [*against, memory(graph, sizes.heads, sizes.width)]


# ------------------------------------------------------------------------------------------------ series


def _series(sizes: Sizes, backend: str) -> Iterator[Case]:
    """Time against length, density, and heads x width."""
    near, middle = graphs.window(sizes.nodes // 16), f"N {sizes.nodes}"
    unit, local = partial(_unit, sizes.unit), partial(_local, sizes.unit, sizes.nodes // 16)
    for n in sizes.lengths:
        make = partial(contest, near, n, sizes.heads, sizes.width, backend, local)
        yield Case("length", f"{near}, N {n}", make, series=str(near), x="nodes")
    for radius in sizes.radii:
        make = partial(contest, graphs.window(radius), sizes.nodes, sizes.heads, sizes.width, backend, unit)
        yield Case("density", f"window({radius}), {middle}", make, series=f"windows, {middle}", x="density")
    for heads, width in sizes.shapes:
        make = partial(contest, near, sizes.nodes, heads, width, backend, unit)
        yield Case("shape", f"{near}, {middle}, {heads} x {width}", make, series=f"{near}, {middle}", x="heads")
