"""Forecasts of a training step on machines that are not here: bytes, memory and seconds of the busiest rank.

They follow from `partition(graph, ranks)`, from counts of operations, and from rates that manufacturers publish.
Kernels do not reach these rates, so seconds are lower bounds. Bytes are exact. Nothing overlaps, as in this library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch

from mpnn.distributed.partition import Partition

_EDGE_BYTES = 34  # of an explicit graph: 8 in the caller's order, 26 that `csr` keeps for both passes of a sum


@dataclass(frozen=True)
class Machine:
    """The processor of one rank and its link to the others, at the peak rates of its data sheet.

    Args:
        name: for tables.
        flops: floating-point operations a second, for matrices of 16 bits.
        memory_rate: bytes a second between the processor and its memory.
        link_rate: bytes a second to other ranks, in each direction.
        memory: bytes.
    """

    name: str
    flops: float
    memory_rate: float
    link_rate: float
    memory: float


# NVIDIA H100 Tensor Core GPU data sheet (SXM: 989 TFLOPS of bfloat16 without sparsity, 3.35 TB/s, 80 GB; NVLink:
# 900 GB/s, both directions together); DGX H100 data sheet (ConnectX-7: 400 Gb/s for each GPU).
H100_NVLINK = Machine("H100, NVLink", 989e12, 3.35e12, 450e9, 80e9)
H100_INFINIBAND = Machine("H100, InfiniBand 400 Gb/s", 989e12, 3.35e12, 50e9, 80e9)
# NVIDIA A100 data sheet (SXM, 80 GB: 312 TFLOPS, 2,039 GB/s); DGX A100 data sheet (ConnectX-6: 200 Gb/s for each GPU).
A100_INFINIBAND = Machine("A100, InfiniBand 200 Gb/s", 312e12, 2.039e12, 25e9, 80e9)


@dataclass(frozen=True)
class Work:
    """The work of a layer in its forward pass, and the memory that it keeps for its backward pass.

    Args:
        width: the numbers of a source that travel to a rank that attends to it.
        dst_flops, src_flops, edge_flops: operations for a destination, a source, an edge.
        edge_numbers: numbers that are read from memory for an edge; 0 where blocks of sources stay in a cache.
        dst_kept, src_kept: numbers kept for a destination and for a source.
        itemsize: bytes of a number.
        heads, kv_heads: of the attention, for transport="heads"; 0 where there are none.
    """

    width: int
    dst_flops: int
    src_flops: int
    edge_flops: int
    edge_numbers: int
    dst_kept: int
    src_kept: int
    itemsize: int = 2
    heads: int = 0
    kv_heads: int = 0


def transformer(width: int, heads: int, kv_heads: int | None = None, hidden: int | None = None) -> Work:
    """A pre-norm transformer layer in 16 bits: maps to query, key, value and output; `q . k` and `w v` for each edge;
    maps to `hidden` (default: 4 * width) numbers and back. The norm of a source travels."""
    kv_heads, hidden = kv_heads or heads, hidden or 4 * width
    keys = width // heads * kv_heads
    return Work(
        width=width,
        dst_flops=4 * width * width + 4 * width * hidden,
        src_flops=4 * width * keys,
        edge_flops=4 * width,
        edge_numbers=0,
        dst_kept=6 * width + 2 * hidden,  # input, query, attention, sum, norm, output; hidden before and after
        src_kept=width + 2 * keys,
        heads=heads,
        kv_heads=kv_heads,
    )


def sage(width: int) -> Work:
    """A layer of GraphSAGE with means, in 16 bits: `W [x || m]`. Features travel."""
    return Work(
        width=width,
        dst_flops=4 * width * width,
        src_flops=0,
        edge_flops=width,
        edge_numbers=width,
        dst_kept=2 * width,
        src_kept=width,
    )


@dataclass(frozen=True)
class Forecast:
    """A training step of some layers: each number is that of the rank where it is largest.

    Attributes:
        ranks: the number of ranks.
        fetched: bytes that arrive in the forward pass of one layer.
        memory: bytes of the graph and of what all layers keep for the backward pass, without parameters.
        compute, exchange: seconds of all layers, forward and backward.
        efficiency: the seconds of one rank that had all the memory, over `ranks` * the seconds of each.
    """

    ranks: int
    fetched: float
    memory: float
    compute: float
    exchange: float
    efficiency: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exchange


def simulate(
    part: Partition, work: Work, machine: Machine, *, layers: int = 1, scale: float = 1.0, transport: str = "halo"
) -> Forecast:
    """Computes what a training step takes. The backward pass takes twice the operations of the forward pass, and sends
    as many bytes back.

    Args:
        part: of `partition(graph, ranks)`.
        work: what a layer does: `transformer(...)`, `sage(...)` or counts of one's own.
        layers: their number.
        scale: multiplies the nodes, edges and fetched sources of every rank. For graphs of random edges, of which a
            smaller one with the same degrees has the same shares.
        transport: "halo", "heads", "stream" or "queries".

    Raises:
        ValueError: if the transport is unknown, or the ranks do not divide the heads.
    """
    if transport not in _SHARES:
        raise ValueError(f"transport must be one of {', '.join(_SHARES)}; got {transport!r}")
    if transport != "halo" and not work.heads:
        raise ValueError(f'transport="{transport}" divides attention, and this work has no heads; use "halo"')
    shares = [share.times(scale) for share in _SHARES[transport](part, work)]
    compute = layers * max(_seconds(work, machine, share.nodes, share.sources, share.edges) for share in shares)
    exchange = layers * 2 * max(share.moved for share in shares) * work.itemsize / machine.link_rate
    nodes, edges = (sum(getattr(share, name) for share in shares) for name in ("nodes", "edges"))
    alone = layers * _seconds(work, machine, nodes, nodes, edges)
    graph_bytes = _EDGE_BYTES if part.graph.is_explicit else 0
    return Forecast(
        part.ranks,
        max(share.fetched for share in shares) * work.itemsize,
        max(layers * work.itemsize * share.kept + graph_bytes * share.held_edges for share in shares),
        compute,
        exchange,
        alone / (part.ranks * (compute + exchange)),
    )


@dataclass(frozen=True)
class _Share:
    """A rank's share of a layer: `nodes` it owns, `sources` it maps to keys and values, `edges` it computes and
    `held_edges` of its graph; numbers that it `fetched`, `moved` (in the busier direction) and `kept`."""

    nodes: float
    sources: float
    edges: float
    held_edges: float
    fetched: float
    moved: float
    kept: float

    def times(self, scale: float) -> _Share:
        return _Share(*(scale * value for value in astuple(self)))


def _by_halo(part: Partition, work: Work) -> Iterator[_Share]:
    """Keys and values of the halo travel, or the features, from which a rank computes them: whichever are fewer."""
    pairs = 2 * work.kv_heads * (work.width // work.heads) if work.heads else work.width
    travels = min(work.width, pairs)
    for plan in part.plans():
        computes = 0 if work.heads and pairs <= work.width else plan.fetches
        yield _Share(
            nodes=plan.nodes,
            sources=plan.nodes + computes,
            edges=plan.edges,
            held_edges=plan.edges,
            fetched=plan.fetches * travels,
            moved=max(plan.fetches, plan.sends) * travels,
            kept=(work.dst_kept + work.src_kept) * plan.nodes + (work.src_kept * computes or travels * plan.fetches),
        )


def _by_stream(part: Partition, work: Work) -> Iterator[_Share]:
    """Keys and values of one rank after the other; two blocks are held at a time, and none is kept. The backward
    pass fetches them and computes the edges again."""
    pairs = 2 * work.kv_heads * (work.width // work.heads)
    for plan in part.plans():
        yield _Share(
            nodes=plan.nodes,
            sources=plan.nodes,
            edges=plan.edges * 4 / 3,
            held_edges=plan.edges,
            fetched=plan.fetches * pairs,
            moved=max(plan.fetches, plan.sends) * pairs * 3 / 2,
            kept=(work.dst_kept + work.src_kept) * plan.nodes,
        )


def _by_queries(part: Partition, work: Work) -> Iterator[_Share]:
    """As the halo, but for hubs, whose edges all ranks share."""
    head_dim = work.width // work.heads
    travels = min(work.width, 2 * work.kv_heads * head_dim)
    mean = part.graph.num_edges / part.ranks
    for plan, nbytes in zip(part.plans(), part.query_bytes(travels, work.heads, head_dim), strict=True):
        numbers = nbytes // 4
        kept = (work.dst_kept + work.src_kept) * plan.nodes + numbers
        edges = min(plan.edges, mean)  # hubs' edges are on all ranks
        yield _Share(plan.nodes, plan.nodes, max(edges, mean), plan.edges, numbers, numbers, kept)


def _by_heads(part: Partition, work: Work) -> Iterator[_Share]:
    """Every rank has all edges for its share of the heads, and maps its own nodes."""
    head_dim, edges, ranks = work.width // work.heads, part.graph.num_edges, part.ranks
    arriving = part.head_bytes(work.heads, work.kv_heads, head_dim, torch.int8)  # one byte a number
    exchanged = part.graph.num_dst * (work.width + 2 * head_dim * max(work.kv_heads, ranks)) / ranks
    for nodes, numbers in zip(part.dst.sizes, arriving, strict=True):
        kept = (work.dst_kept + work.src_kept) * nodes + exchanged
        yield _Share(nodes, nodes, edges / ranks, edges, numbers, numbers, kept)


_SHARES = {"halo": _by_halo, "heads": _by_heads, "stream": _by_stream, "queries": _by_queries}


def _seconds(work: Work, machine: Machine, dst: float, src: float, edges: float) -> float:
    """Seconds of the forward and the backward pass of a layer: arithmetic or memory, whichever takes longer."""
    operations = work.dst_flops * dst + work.src_flops * src + work.edge_flops * edges
    numbers = work.dst_kept * dst + work.src_kept * src + work.edge_numbers * edges
    return 3 * max(operations / machine.flops, numbers * work.itemsize / machine.memory_rate)
