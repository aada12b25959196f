"""On a GPU: the same contests on its memory, in bfloat16 and float32, with the peers that are best there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import irregular, peers
from benchmarks.contest import BOTH, FORWARD, OURS, Bar, Case, Contest, Entry, Missing
from benchmarks.peers import Features
from benchmarks.sequences import Mask, attention, contest, features, truth
from mpnn import Graph, graphs
from mpnn.backends.tiles import cuda

COPY = "a copy that moves as many bytes"


@dataclass(frozen=True)
class Sizes:
    """Args:
    heads, width: of attention over sequences. dense: lengths of complete and causal graphs. nodes: of the sparse ones.
    lengths: of the series over N. graph: nodes and edges of the irregular graph. edges: of the series over edges.
    """

    heads: int
    width: int
    dense: tuple[int, ...]
    nodes: int
    lengths: tuple[int, ...]
    graph: tuple[int, int]
    edges: tuple[int, ...]


DEFAULT = Sizes(
    heads=16,
    width=64,
    dense=(4096, 16384),
    nodes=32768,
    lengths=(4096, 16384, 65536, 131072),
    graph=(1_000_000, 10_000_000),
    edges=(10_000, 1_000_000, 100_000_000),
)
SMALL = Sizes(heads=2, width=16, dense=(256,), nodes=512, lengths=(256,), graph=(200, 2_000), edges=(1_000,))


def cases(sizes: Sizes, device: str = "cuda") -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from _cases(sizes, {"dtype": dtype, "device": device}, str(dtype).removeprefix("torch."))
    yield Case("binding", f"window(1024), N {sizes.nodes}: blocks", partial(_blocks, sizes, device), (FORWARD,))


def _cases(sizes: Sizes, options: dict[str, Any], kind: str) -> Iterator[Case]:
    make_device = partial(_device, sizes, options)
    yield Case("device", f"matrix product, {kind}", make_device, (FORWARD,))
    for topology, causal in ((graphs.complete(), False), (graphs.causal(), True)):
        for n in sizes.dense:
            make = partial(_sequence, topology, n, sizes, partial(_sdpa_rivals, causal), _dense_bars, **options)
            yield Case("dense", f"{topology}, N {n}, {kind}", make)
    n, near = sizes.nodes, graphs.window(min(1024, sizes.nodes // 8))
    radius = min(1024, n // 8)
    uneven = [n // 8 + d for d in (7, -7, 31, -31, 13, -13, 0, 0)]
    for name, topology, mask in (
        (f"window({radius})", near, lambda b, h, i, j: (i - j).abs() <= radius),
        (
            f"longformer({radius}, 4)",
            graphs.longformer(radius, globals=4),
            lambda b, h, i, j: ((i - j).abs() <= radius // 2) | (i < 4) | (j < 4),
        ),
        ("bigbird()", graphs.bigbird(), None),
        (f"documents, 8 of about {n // 8}", graphs.documents(uneven), None),
    ):
        make = partial(_sequence, topology, n, sizes, partial(_flex_rivals, mask), _sparse_bars, **options)
        yield Case("sparse", f"{name}, N {n}, {kind}", make)
    for n in sizes.lengths:
        make = partial(_sequence, near, n, sizes, lambda graph, given: [], lambda graph: [], **options)
        yield Case("length", f"{near}, N {n}, {kind}", make, series=f"{near}, {kind}", x="nodes")
    yield from _irregular(sizes, options, kind)


def _sequence(topology: Any, nodes: int, sizes: Sizes, rivals: Any, bars: Any, **options: Any) -> Contest:
    return contest(topology, nodes, sizes.heads, sizes.width, "auto", rivals, bars, **options)


# ------------------------------------------------------------------------------------------------ peers


def _sdpa_rivals(causal: bool, graph: Graph, given: Features) -> list[Entry | Missing]:
    """torch's attention by each of its kernels; those that a device or type does not have are left out."""
    return [
        _sdpa(given, f"SDPA {backend.name.removesuffix('_ATTENTION').lower()}", backend, causal)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    ]


def _sdpa(given: Features, name: str, backend: SDPBackend, causal: bool) -> Entry:
    query, key, value = peers.heads_first(given)

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return peers.nodes_first(F.scaled_dot_product_attention(query, key, value, is_causal=causal))

    return Entry(name, call, (query, key, value), peers.nodes_first)


def _dense_bars(graph: Graph) -> list[Bar]:
    names = ("SDPA flash", "SDPA cudnn", "SDPA efficient")
    return [
        Bar(f"at least 0.95 of {name}'s speed", 0.95, "at least", d, name) for name in names for d in (FORWARD, BOTH)
    ]


def _flex_rivals(mask: Mask | None, graph: Graph, given: Features) -> list[Entry | Missing]:
    """FlexAttention, its mask built beforehand, from a rule or, where none is short, from the matrix of edges."""
    if mask is None:
        edges = graph.dense()
        mask = lambda b, h, i, j: edges[i, j]  # noqa: E731
    return [peers.flex(given, mask)]


def _sparse_bars(graph: Graph) -> list[Bar]:
    text = "at least as fast as FlexAttention, its mask built"
    return [Bar(text, 1.0, "at least", direction, "FlexAttention") for direction in (FORWARD, BOTH)]


def _blocks(sizes: Sizes, device: str) -> Contest:
    """From a topology that was never bound to the blocks on the device, and FlexAttention's own way there."""
    from torch.nn.attention.flex_attention import create_block_mask

    n, radii = sizes.nodes, count(max(1, sizes.nodes // 32))

    def ours() -> Tensor:
        return cuda.blocks(graphs.window(next(radii)).bind(n).to(device)).kv_num_blocks

    def theirs() -> Tensor:
        radius = next(radii)
        return create_block_mask(
            lambda b, h, i, j: (i - j).abs() <= radius, None, None, n, n, device=device
        ).kv_num_blocks

    name = "create_block_mask"
    bars = [Bar("at least 100x faster than create_block_mask", 100, "at least", FORWARD, name)]
    return Contest([Entry(OURS, ours), Entry(name, theirs)], bars=bars)


# ------------------------------------------------------------------------------------------------ irregular graphs


def _irregular(sizes: Sizes, options: dict[str, Any], kind: str) -> Iterator[Case]:
    (nodes, edges), heads, width = sizes.graph, 8, 16
    where = f"{nodes:,} nodes, {edges:,} edges, {kind}"
    for name, make_contest in (("GATConv", irregular.gat), ("TransformerConv", irregular.transformer)):
        peer = f"PyG {name}"
        bars = [
            Bar(f"at least 8x faster than {peer}", 8, "at least", BOTH, peer),
            Bar(f"at most an eighth of {peer}'s memory", 8, "less memory", BOTH, peer),
        ]
        make = partial(make_contest, nodes, edges, heads, width, "auto", bars, **options)
        yield Case("irregular", f"{name} {heads} x {width}, {where}", make)
    for reduce in ("sum", "mean", "max"):
        directions = (FORWARD,) if reduce == "max" else (FORWARD, BOTH)
        make = partial(irregular.reduced, nodes, edges, heads * width, reduce, "auto", [], **options)
        yield Case("reduce", f"{reduce} of {heads * width}, {where}", make, directions)
    for n in sizes.edges:
        make = partial(_edges, n, heads, width, options)
        yield Case("edges", f"attention {heads} x {width}, {n:,} edges, {kind}", make, series=kind, x="edges")


def _edges(edges: int, heads: int, width: int, options: dict[str, Any]) -> Contest:
    """Attention over ever more edges, beside a copy of the bytes that it cannot but move: for each edge a key, a value
    and an index, for each node a query and an output."""
    graph = irregular.citations(max(edges // 14, 16), edges).to(options["device"])
    given = features(graph.num_src, heads, width, **options)
    bytes_each = heads * width * given[0].element_size()
    must_move = edges * (2 * bytes_each + 8) + 2 * graph.num_dst * bytes_each
    entries = [attention(graph, given, "auto"), _copy(must_move, options["device"])]
    if edges <= 10_000_000:
        entries.append(attention(graph, given, "edge_list", "edge list (mpnn)"))
    exact = truth(graph, given)
    bars = [Bar(f"at most twice the time of {COPY}", 2.0, "at most", FORWARD, COPY)] if edges >= 1_000_000 else []
    facts = irregular.facts(graph, heads, width) | {"bytes": must_move}
    return Contest(entries, exact, exact.description, bars, facts)


# ------------------------------------------------------------------------------------------------ the device


def _copy(size: float, device: str) -> Entry:
    """Reads half of so many bytes and writes them elsewhere."""
    count = max(int(size) // 8, 1)
    source, target = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))
    return Entry(COPY, lambda: target.copy_(source), checked=False, only_forward="copies have no backward pass")


def _device(sizes: Sizes, options: dict[str, Any]) -> Contest:
    """What the device itself can do: a large matrix product, and a large copy."""
    side = 8192 if sizes is DEFAULT else 64
    a, b = (torch.randn(side, side, **options) for _ in range(2))
    entries = [Entry(f"matrix product of {side}", lambda: a @ b), _copy(4 * side**2, options["device"])]
    return Contest(entries, facts={"flops": 2.0 * side**3, "bytes": 4.0 * side**2})
