"""Reachability over several layers of message passing, computed on runs without materializing edges.

One hop from one source is a cumulative sum over the nodes it has reached, read at the two ends of every run:
O(N + runs).
"""

from math import inf
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mpnn.graph.runs import Ints, Runs

Flags = NDArray[np.bool_]

_EXACT = 1024
_SAMPLES = 256
_CHUNK = 1 << 23


def fraction(runs: Runs, layers: int, deadline: float = inf) -> float:
    """The fraction of (node, source) pairs connected by at most `layers` hops.

    Raises:
        TimeoutError: if `time.perf_counter()` passes the deadline. This is checked before each hop of some sources.
    """
    if runs.num_src == 0:
        return 1.0
    chunks = _chunks(runs)
    counts = [_propagate(runs, sources, layers, deadline)[0].mean() * len(sources) for sources in chunks]
    return float(sum(counts) / sum(map(len, chunks)))


def diameter(runs: Runs, deadline: float = inf) -> int | None:
    """The number of hops until every sampled source reaches every node; None if one never does.

    If no node receives from a later one, only the nodes after a source count. `deadline` is as in `fraction`.
    """
    longest = 0
    flows_forward = runs.edge_from_later() is None
    node = np.arange(runs.num_src)[:, None]
    for sources in _chunks(runs):
        reached, hops = _propagate(runs, sources, runs.num_src, deadline)
        if flows_forward:
            reached |= node < sources
        if not reached.all():
            return None
        longest = max(longest, hops)
    return longest


def diameter_sentence(runs: Runs, deadline: float = inf) -> str:
    """Says what `diameter` returns. `deadline` is as in `fraction`."""
    layers = diameter(runs, deadline)
    earlier = runs.edge_from_later() is None and runs.num_src > 1
    pairs = "each node with all earlier ones" if earlier else "all pairs"
    if layers is None:
        return f"no number of layers connects {pairs}"
    return f"1 layer connects {pairs}" if layers == 1 else f"{layers} layers connect {pairs}"


def components(runs: Runs) -> Ints:
    """The component of each source, int64 [num_src], numbered from 0.

    Two sources are in the same component if a row receives from both, or if a chain of such pairs connects them. A
    source without edges is a component by itself.
    """
    from scipy import sparse

    covered = np.zeros(runs.num_src + 1, np.int64)  # how many runs hold both j and j + 1
    np.add.at(covered, runs.start, 1)
    np.add.at(covered, runs.stop - 1, -1)
    segment = np.append(0, np.cumsum(covered.cumsum()[: max(runs.num_src - 1, 0)] == 0))[: runs.num_src]
    first = segment[runs.start[runs.ptr[runs.row]]]
    joined = sparse.csr_array(
        (np.ones(len(first), bool), (first, segment[runs.start])), shape=(runs.num_src, runs.num_src)
    )
    _, of_segment = sparse.csgraph.connected_components(joined, directed=False)
    _, component = np.unique(of_segment[segment], return_inverse=True)
    return component.astype(np.int64)


def power(runs: Runs, k: int) -> Runs:
    """The pairs connected by a walk of exactly `k` edges."""
    if k == 1:
        return runs
    half = power(runs, k // 2)
    even = _product(half, half)
    return _product(even, runs) if k % 2 else even


def _product(outer: Runs, inner: Runs) -> Runs:
    """i receives from j if `outer` has an edge k -> i and `inner` an edge j -> k for some node k."""
    if outer.num_edges <= 2 * len(outer.start):
        return _sparse_product(outer, inner)
    sources = _span_unions(inner, outer.start, outer.stop)
    row = np.repeat(outer.row, np.diff(sources.ptr))
    return Runs.of(outer.num_dst, inner.num_src, [(row, sources.start, sources.stop)])


def _span_unions(runs: Runs, start: Ints, stop: Ints) -> Runs:
    """Row k: the union of the rows `start[k] <= i < stop[k]`, none of these spans empty.

    A span of up to 2m rows is two of at most m, which may overlap, and neighboring spans share most of those.
    """
    longest = int((stop - start).max(initial=1))
    if longest == 1:
        return runs.take(start)
    half = 1 << ((longest - 1).bit_length() - 1)
    first = np.minimum(start + half, stop)
    last = np.maximum(stop - half, start)
    base = runs.num_dst + 1
    spans, which = np.unique(np.concatenate([start * base + first, last * base + stop]), return_inverse=True)
    parts = _span_unions(runs, spans // base, spans % base)
    left, right = which.reshape(2, -1)
    return parts.take(left) | parts.take(right)


def _sparse_product(outer: Runs, inner: Runs) -> Runs:
    from scipy import sparse

    def matrix(runs: Runs) -> sparse.csr_array:
        dst, src = runs.edges()
        return sparse.csr_array((np.ones(len(dst), bool), (dst, src)), shape=(runs.num_dst, runs.num_src))

    product = (matrix(outer) @ matrix(inner)).tocoo()
    return Runs.from_edges(outer.num_dst, inner.num_src, product.row.astype(np.int64), product.col.astype(np.int64))


def _propagate(runs: Runs, sources: Ints, layers: int, deadline: float) -> tuple[Flags, int]:
    """The nodes that each source reaches, bool [N, sources], and the number of layers that still changed them."""
    reached = np.zeros((runs.num_src, len(sources)), bool)
    reached[sources, np.arange(len(sources))] = True
    for layer in range(layers):
        if perf_counter() > deadline:
            raise TimeoutError(f"no reach over {layers} layers before the deadline")
        following = reached | _hop(runs, reached)
        if (following == reached).all():
            return reached, layer
        reached = following
    return reached, layers


def _hop(runs: Runs, flags: Flags) -> Flags:
    """Whether each row receives from a source with a set flag: bool [num_dst, C] from flags [num_src, C]."""
    total = np.zeros((runs.num_src + 1, flags.shape[1]), np.int32)
    np.cumsum(flags, axis=0, out=total[1:])
    hit = total[runs.stop] > total[runs.start]
    out = np.zeros((runs.num_dst, flags.shape[1]), bool)
    has_sources = np.diff(runs.ptr) > 0
    if has_sources.any():
        out[has_sources] = np.logical_or.reduceat(hit, runs.ptr[:-1][has_sources], axis=0)
    return out


def _chunks(runs: Runs) -> list[Ints]:
    """The sources from which to propagate, all or a sample, in chunks."""
    n = runs.num_src
    sources = np.arange(n) if n <= _EXACT else np.linspace(0, n - 1, _SAMPLES).astype(np.int64)
    width = max(1, _CHUNK // max(len(runs.start), n, 1))
    return [sources[a : a + width] for a in range(0, len(sources), width)]
