"""How far messages travel: walks over rows of runs, without ever writing edges out.

One hop for one source is a running sum over the nodes that know of it, read at the two ends of every run: O(N + runs).
This is why stacked windows overlap into a wide view, and why a few random edges connect everything in a few layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpnn.runs import Ints, Runs

Flags = NDArray[np.bool_]

_EXACT = 1024
_SAMPLES = 256
_CHUNK = 1 << 23


def fraction(runs: Runs, layers: int) -> float:
    """The fraction of (node, source) pairs connected by at most `layers` hops."""
    if layers < 0:
        raise ValueError(f"layers must not be negative; got {layers}")
    if runs.num_src == 0:
        return 1.0
    known = [_spread(runs, sources, layers)[0].mean() * len(sources) for sources in _chunks(runs, _sources(runs))]
    return float(sum(known) / len(_sources(runs)))


def diameter(runs: Runs) -> int | None:
    """Hops until every sampled source is known everywhere; None when one never is."""
    longest = 0
    for sources in _chunks(runs, _sources(runs)):
        known, hops = _spread(runs, sources, runs.num_src)
        if not known.all():
            return None
        longest = max(longest, hops)
    return longest


def components(runs: Runs) -> Ints:
    """The component of each source, int64 [num_src], numbered from 0: two sources are in one where a row attends to
    both, or where such pairs lead from one to the other. A source without a row is a component by itself."""
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
    """The pairs that a walk of exactly `k` edges connects."""
    if k == 1:
        return runs
    half = power(runs, k // 2)
    most = _product(half, half)
    return _product(most, runs) if k % 2 else most


def _product(outer: Runs, inner: Runs) -> Runs:
    """i hears j when i hears in `outer` somebody who hears j in `inner`."""
    if outer.num_edges <= 2 * len(outer.start):
        return _sparse_product(outer, inner)
    heard = _united(inner, outer.start, outer.stop)
    row = np.repeat(outer.row, np.diff(heard.ptr))
    return Runs.of(outer.num_dst, inner.num_src, [(row, heard.start, heard.stop)])


def _united(runs: Runs, start: Ints, stop: Ints) -> Runs:
    """Row k: the union of the rows `start[k] <= i < stop[k]`, none of these spans empty.

    A span of up to 2m rows is two of at most m, which may overlap, and neighbouring spans share most of those.
    """
    longest = int((stop - start).max(initial=1))
    if longest == 1:
        return runs.take(start)
    half = 1 << ((longest - 1).bit_length() - 1)
    first, last = np.minimum(start + half, stop), np.maximum(stop - half, start)
    base = runs.num_dst + 1
    spans, which = np.unique(np.concatenate([start * base + first, last * base + stop]), return_inverse=True)
    parts = _united(runs, spans // base, spans % base)
    left, right = which.reshape(2, -1)
    return parts.take(left) | parts.take(right)


def _sparse_product(outer: Runs, inner: Runs) -> Runs:
    from scipy import sparse

    def matrix(runs: Runs) -> sparse.csr_array:
        dst, src = runs.edges()
        return sparse.csr_array((np.ones(len(dst), bool), (dst, src)), shape=(runs.num_dst, runs.num_src))

    product = (matrix(outer) @ matrix(inner)).tocoo()
    return Runs.from_edges(outer.num_dst, inner.num_src, product.row.astype(np.int64), product.col.astype(np.int64))


def _spread(runs: Runs, sources: Ints, layers: int) -> tuple[Flags, int]:
    """Who knows of each source [N, sources] after so many layers, and how many of them still brought news."""
    known = _only(runs.num_src, sources)
    for layer in range(layers):
        more = known | _hop(runs, known)
        if (more == known).all():
            return known, layer
        known = more
    return known, layers


def _hop(runs: Runs, flags: Flags) -> Flags:
    """[num_dst, C]: whether each row hears some source whose flag is up, of flags [num_src, C]."""
    total = np.zeros((runs.num_src + 1, flags.shape[1]), np.int32)
    np.cumsum(flags, axis=0, out=total[1:])
    hit = total[runs.stop] > total[runs.start]
    out = np.zeros((runs.num_dst, flags.shape[1]), bool)
    heard = np.diff(runs.ptr) > 0
    if heard.any():
        out[heard] = np.logical_or.reduceat(hit, runs.ptr[:-1][heard], axis=0)
    return out


def _only(n: int, sources: Ints) -> Flags:
    flags = np.zeros((n, len(sources)), bool)
    flags[sources, np.arange(len(sources))] = True
    return flags


def _sources(runs: Runs) -> Ints:
    n = runs.num_src
    return np.arange(n) if n <= _EXACT else np.linspace(0, n - 1, _SAMPLES).astype(np.int64)


def _chunks(runs: Runs, sources: Ints) -> list[Ints]:
    width = max(1, _CHUNK // max(len(runs.start), runs.num_src, 1))
    return [sources[a : a + width] for a in range(0, len(sources), width)]
