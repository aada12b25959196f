"""Topologies over sequences. Each one is a rule that returns the runs of sources of every destination.

Drawings show destinations as rows and sources as columns; `#` is an edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least, distinct_indices, integers
from mpnn.graph.runs import Ints, Runs, in_steps
from mpnn.graph.topology import Pairs, Topology
from mpnn.graphs.explicit import batch


def complete() -> Topology:
    """Every node receives from every node (BERT, ViT; rectangular: cross-attention).

    ::

        complete()   ####
                     ####
                     ####
                     ####
    """
    return Topology.of(_complete)


def _complete(i: Ints, num_src: int) -> Pairs:
    return [(0, num_src)]


def causal() -> Topology:
    """i receives from j if j <= i (GPT's DAG, with self-loops).

    ::

        causal()   #....
                   ##...
                   ###..
                   ####.
                   #####
    """
    return Topology.of(_causal, positional=True)


def _causal(i: Ints, num_src: int) -> Pairs:
    return [(0, i + 1)]


def identity() -> Topology:
    """i receives from itself only.

    ::

        identity()   #...
                     .#..
                     ..#.
                     ...#
    """
    return Topology.of(_identity, positional=True)


def _identity(i: Ints, num_src: int) -> Pairs:
    return [(i, i + 1)]


def window(radius: int, dilation: int = 1) -> Topology:
    """i receives from j if i - j is a multiple of `dilation` and |i - j| <= radius * dilation (Longformer's window).

    ::

        window(1)   ##...
                    ###..
                    .###.
                    ..###
                    ...##

        window(1, dilation=2)   #.#..
                                .#.#.
                                #.#.#
                                .#.#.
                                ..#.#
    """
    sizes = at_least("radius", radius, 0), at_least("dilation", dilation, 1)
    return Topology.of(_window, *sizes, positional=True)


def _window(i: Ints, num_src: int, radius: int, dilation: int = 1) -> Pairs | Runs:
    if dilation == 1:
        return [(i - radius, i + radius + 1)]
    reachable = min(radius, max(num_rows(i), num_src) // dilation)
    before, after = np.minimum(i // dilation, reachable), np.minimum((num_src - 1 - i) // dilation, reachable)
    count = np.maximum(before + after + 1, 0)
    return in_steps(num_src, i - before * dilation, count, dilation, width=1, last=(i, i))


def strided(stride: int) -> Topology:
    """i receives from its last `stride` nodes, itself included, and every stride-th node before (Sparse Transformer).

    ::

        strided(2)   #.....
                     ##....
                     ###...
                     .###..
                     #.###.
                     .#.###
    """
    stride = at_least("stride", stride, 1)
    return Topology.of(_strided, stride, positional=True)


def _strided(i: Ints, num_src: int, stride: int) -> Pairs | Runs:
    """Row i has about i / stride runs, N^2 / (2 * stride) in total."""
    if stride == 1:
        return [(0, i + 1)]
    first = i % stride
    count = np.minimum(i // stride - 1, (num_src - first + stride - 1) // stride).clip(0)
    return in_steps(num_src, first, count, stride, width=1, last=(np.maximum(i - stride, 0), i + 1))


def fixed(block: int, summary: int = 1) -> Topology:
    """i receives from the nodes of its own block up to itself, and from the last `summary` nodes of each earlier block
    (Sparse Transformer).

    ::

        fixed(3)   #.......
                   ##......
                   ###.....
                   ..##....
                   ..###...
                   ..####..
                   ..#..##.
                   ..#..###
    """
    sizes = at_least("block", block, 1), at_least("summary", summary, 0)
    if summary > block:
        raise ValueError(f"summary must be at most the block size {block}; got {summary}")
    return Topology.of(_fixed, *sizes, positional=True)


def _fixed(i: Ints, num_src: int, block: int, summary: int = 1) -> Pairs | Runs:
    if summary == block:
        return [(0, i + 1)]
    # of the first summary, of the row's block
    first = block - summary
    own = i - i % block
    near = own if summary == 0 else np.maximum(own - summary, 0)  # the last summary touches the block
    count = np.minimum(i // block - 1, -((first - num_src) // block)).clip(0) if summary else np.zeros_like(i)
    return in_steps(num_src, np.full_like(i, first), count, block, summary, last=(near, i + 1))


def global_nodes(count_or_indices: int | Sequence[int] | Tensor) -> Topology:
    """i receives from j if i or j is a global node (a hub). Global nodes are the first `count`, or the listed indices.

    ::

        global_nodes(1)   ####
                          #...
                          #...
                          #...

        global_nodes([0, 2])   ####
                               #.#.
                               ####
                               #.#.
    """
    nodes: int | tuple[int, ...]
    if isinstance(count_or_indices, (int, np.integer)):
        nodes = at_least("count", count_or_indices, 0)
    else:
        nodes = distinct_indices("indices", count_or_indices)
    return Topology.of(_global_nodes, nodes, positional=True)


def _global_nodes(i: Ints, num_src: int, nodes: int | tuple[int, ...]) -> Pairs:
    if isinstance(nodes, int):
        return [(0, np.where(i < nodes, num_src, nodes))]
    most = max(num_rows(i), num_src)
    hubs = np.asarray(nodes, np.int64)
    if len(hubs) and hubs.max() >= most:
        raise ValueError(f"global node {hubs.max()} does not exist among {most} nodes; bind at least {hubs.max() + 1}")
    hub_rows = (0, np.where(np.isin(i, hubs), num_src, 0))
    breaks = np.flatnonzero(np.diff(hubs) != 1)
    first, last = np.append(0, breaks + 1), np.append(breaks, len(hubs) - 1)
    return [hub_rows, *((hubs[a], hubs[b] + 1) for a, b in zip(first, last, strict=True) if len(hubs))]


def prefix(k: int) -> Topology:
    """i receives from j if j < k or j <= i: a bidirectional prompt, then causal (UniLM, T5's prefix LM).

    ::

        prefix(3)   ###..
                    ###..
                    ###..
                    ####.
                    #####
    """
    return Topology.of(_prefix, at_least("k", k, 0), positional=True)


def _prefix(i: Ints, num_src: int, k: int) -> Pairs:
    return [(0, np.maximum(i + 1, k))]


def documents(
    lengths: Sequence[int] | Tensor,
    inner: Topology | None = None,
    *,
    src_lengths: Sequence[int] | Tensor | None = None,
) -> Topology:
    """i receives from j if both are in the same document, and `inner` has an edge from j to i there. The lengths must
    add up to the bound size.

    ::

        documents([2, 3, 1])   ##....
                               ##....
                               ..###.
                               ..###.
                               ..###.
                               .....#

        documents([2, 3], inner=prefix(2))   ##...
                                             ##...
                                             ..##.
                                             ..##.
                                             ..###

    Args:
        inner: the topology of each document, whose nodes it numbers from 0; None is `complete()`. For a rule that only
            compares positions (`causal`, `window`), it is the same as `inner & documents(lengths)`.
        src_lengths: the lengths of the documents of the sources, if they are another set of nodes: document k of the
            destinations receives from document k of the sources (packed cross-attention).

    Raises:
        TypeError: lengths are not integers, or `inner` is not a Topology.
        ValueError: a length is negative; there are more documents of one side than of the other; or `inner` has memory
            nodes. When bound: the lengths do not add up to the size, or `inner` compares positions and a document has
            other numbers of destinations and of sources.
    """
    sizes = _lengths("lengths", lengths)
    inner = complete() if inner is None else inner
    if src_lengths is None and inner == complete():
        return Topology.of(_documents, sizes)
    if not isinstance(inner, Topology):
        raise TypeError(f"inner must be a topology, as causal() or prefix(4); got {type(inner).__name__}")
    if inner.memory:
        raise ValueError(f"the topology inside documents cannot have memory nodes; got {inner}")
    sources = sizes if src_lengths is None else _lengths("src_lengths", src_lengths)
    if len(sources) != len(sizes):
        raise ValueError(
            f"there must be as many documents of sources as of destinations; got {len(sources)} and {len(sizes)}"
        )
    return _Documents(sizes, sources, inner)


def _lengths(name: str, lengths: Sequence[int] | Tensor) -> tuple[int, ...]:
    sizes = integers(name, lengths)
    for k, n in enumerate(sizes):
        at_least(f"{name}[{k}]", n, 0)
    return sizes


@dataclass(frozen=True, repr=False)
class _Documents(Topology):
    """A topology inside each document: destinations and sources of document k are `lengths[k]` and `src_lengths[k]`."""

    lengths: tuple[int, ...]
    src_lengths: tuple[int, ...]
    inner: Topology

    @property
    def depth(self) -> int:  # type: ignore[override]
        return 1 + self.inner.depth

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        expected = sum(self.lengths), sum(self.src_lengths)
        if (num_dst, num_src) != expected:
            raise ValueError(
                f"the lengths of the documents add up to {expected[0]} destinations and {expected[1]} sources, but the "
                f"graph is {num_dst} x {num_src}; bind({expected[0]}, {expected[1]})"
            )
        sizes = [size for size in zip(self.lengths, self.src_lengths, strict=True) if any(size)]
        if not sizes:
            return Graph.from_runs(Runs.full(0, 0))
        of_size = {size: self._document(*size) for size in set(sizes)}
        return batch([of_size[size] for size in sizes])

    def _document(self, num_dst: int, num_src: int) -> Graph:
        if self.inner.positional and num_dst != num_src:
            raise ValueError(
                f"{self.inner} compares positions, which a document of {num_dst} destinations and {num_src} sources "
                "does not share; use documents of equal lengths, or an inner topology that compares none"
            )
        return self.inner._graph(num_dst, num_src)

    def __repr__(self) -> str:
        sources = "" if self.src_lengths == self.lengths else f", src_lengths={list(self.src_lengths)}"
        return f"documents({list(self.lengths)}, inner={self.inner!r}{sources})"


def _documents(i: Ints, num_src: int, lengths: tuple[int, ...]) -> Pairs:
    num_dst = num_rows(i)
    n = sum(lengths)
    if num_dst != num_src:
        raise ValueError(f"{documents(lengths)} needs as many sources as destinations; got {num_dst} x {num_src}")
    if num_dst != n:
        raise ValueError(
            f"the lengths of the documents add up to {n}, but the graph has {num_dst} nodes; "
            f"bind({n}), or give lengths that add up to {num_dst}"
        )
    ends = np.cumsum(np.asarray(lengths, np.int64))
    document = np.searchsorted(ends, i, side="right")
    return [(np.append(0, ends)[document], ends[document])]


def permutation(order: Sequence[int] | Tensor) -> Topology:
    """i receives from j if j is at or before i in the order: a causal DAG in any factorization order (XLNet).

    `permutation(order) - identity()` is XLNet's query stream, in which no node attends to its own content.

    ::

        permutation([2, 0, 1])   #.#
                                 ###
                                 ..#
    """
    nodes = integers("order", order)
    if sorted(nodes) != list(range(len(nodes))):
        raise ValueError(f"order must hold each of 0..{len(nodes) - 1} once; got {list(nodes)[:8]}...")
    return Topology.of(_permutation, nodes)


def _permutation(i: Ints, num_src: int, order: tuple[int, ...]) -> Runs:
    if not len(order) == len(i) == num_src:
        raise ValueError(
            f"the order has {len(order)} nodes, but the graph is {len(i)} x {num_src}; bind({len(order)}), or give an "
            "order of as many nodes as there are"
        )
    rank = np.argsort(np.asarray(order, np.int64))
    # row j holds the ranks that receive from node j, which is one run; the transpose has one row per rank
    return Runs.of(len(i), len(i), [(i, rank, len(i))]).transpose().take(rank)


def memory(length: int) -> Topology:
    """i receives from j if j <= i + length: sources are `length` memory nodes, then the segment itself
    (Transformer-XL).

    ::

        memory(2).bind(3)   ###..
                            ####.
                            #####
    """
    length = at_least("length", length, 0)
    return Topology.of(_memory, length, memory=length, positional=True)


def _memory(i: Ints, num_src: int, length: int) -> Pairs:
    return [(0, i + length + 1)]


def num_rows(i: Ints) -> int:
    """The number of destinations of a graph, from the ascending rows `i` that a rule receives: the last is among
    them."""
    return int(i[-1]) + 1 if len(i) else 0
