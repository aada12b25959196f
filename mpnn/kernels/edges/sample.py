"""Sampled in-neighbors of nodes, on CPU: one layer of a sampled batch, in `mpnn/kernels/cpu/sample_neighbors.cpp`.

It reads the columns that it keeps and nothing else of a row, so that a graph in a memory map stays on disk. The pages
of a memory map are asked for before the first is read.
"""

from ctypes import Structure, addressof, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpnn.kernels.cpu import library

Ints = NDArray[np.int64]
_WORD = (1 << 64) - 1


class Sample(NamedTuple):
    """`nodes` int32 [n]: the targets, then the other nodes in the order in which they were found. Edges are sorted by
    target and by their order in the graph: `ptr` [targets + 1]; `source` and `destination` [E] are indices into
    `nodes`; `position` [E] is the place of each edge in the graph's columns. All int64."""

    nodes: NDArray[np.int32]
    ptr: Ints
    source: Ints
    destination: Ints
    position: Ints


class _Parameters(Structure):
    """`struct SampleNeighbors` of sample_neighbors.cpp."""

    _fields_ = (
        *library.fields(c_void_p, "columns first degree ptr"),
        *library.fields(c_int64, "num_targets num_src seed"),
        *library.fields(c_void_p, "nodes source destination position table"),
        *library.fields(c_int64, "mask is_mapped num_nodes bad_position"),
    )


def sample_neighbors(
    first: Ints, stop: Ints, columns: NDArray[np.int32], num_src: int, targets: Ints, fanout: int, seed: int
) -> Sample:
    """Samples at most `fanout` in-neighbors of each target, without replacement; -1 takes all.

    Args:
        first, stop: int64 [n], the in-neighbors of target i are `columns[first[i]:stop[i]]`. Where these are no numbers
            of nodes, `nodes` and `source` of the sample mean nothing.
        targets: int64 [n], nodes, which are not checked.
        seed: seed and node decide which edges are kept.

    Raises:
        ValueError: fanout is below -1, a row lies outside the columns, or a column is not a node.
    """
    if fanout < -1:
        raise ValueError(f"fanout must be a number of in-neighbors, or -1 for all; got {fanout}")
    if (outside := (first < 0) | (stop < first) | (stop > len(columns))).any():
        node = int(targets[outside][0])
        raise ValueError(
            f"the row of node {node} lies outside the {len(columns)} edges: the graph's offsets are damaged"
        )
    degree = stop - first
    ptr = np.zeros(len(targets) + 1, np.int64)
    np.cumsum(degree if fanout < 0 else np.minimum(degree, fanout), out=ptr[1:])
    run = _compiled if library.why_missing() is None else by_python
    return run(columns, first, degree, ptr, num_src, targets, seed)


def _compiled(
    columns: NDArray[np.int32], first: Ints, degree: Ints, ptr: Ints, num_src: int, targets: Ints, seed: int
) -> Sample:
    count = len(targets)
    num_edges = int(ptr[-1])
    nodes = np.empty(count + num_edges, np.int32)
    nodes[:count] = targets
    ends, position = np.empty((2, num_edges), np.int64), np.empty(num_edges, np.int64)
    # The hash table of nodes is at most half full, so that look-ups stay short.
    table = np.zeros(1 << (2 * len(nodes) + 1).bit_length(), np.uint64)
    p = _Parameters(
        *(array.ctypes.data for array in (columns, first, degree, ptr)),
        *(count, num_src, seed & _WORD),
        *(array.ctypes.data for array in (nodes, ends[0], ends[1], position, table)),
        len(table) - 1,
        isinstance(columns, np.memmap),
    )
    library.function("sample_neighbors")(addressof(p))
    if p.bad_position >= 0:
        raise ValueError(_damaged(columns, p.bad_position, num_src))
    # A copy, because a view would keep the whole buffer, which has a place for each edge.
    return Sample(nodes[: p.num_nodes].copy(), ptr, ends[0], ends[1], position)


def by_python(
    columns: NDArray[np.int32], first: Ints, degree: Ints, ptr: Ints, num_src: int, targets: Ints, seed: int
) -> Sample:
    """The same in Python: where the kernels are missing, and what they are tested against."""
    index = {int(node): k for k, node in enumerate(targets)}
    source = []
    destination = []
    position = []
    for t, node in enumerate(targets):
        count, size = int(ptr[t + 1] - ptr[t]), int(degree[t])
        chosen = draw(count, size, mix64((seed & _WORD) ^ mix64(int(node)))) if count < size else range(size)
        # In the order of the graph, as the kernel finds them, so that nodes get the same numbers.
        for k in sorted(chosen):
            at = int(first[t]) + k
            if not 0 <= columns[at] < num_src:
                raise ValueError(_damaged(columns, at, num_src))
            source.append(index.setdefault(int(columns[at]), len(index)))
            destination.append(t)
            position.append(at)
    nodes = np.fromiter(index, np.int32, len(index))
    return Sample(nodes, ptr, *(np.array(column, np.int64) for column in (source, destination, position)))


def draw(count: int, size: int, key: int) -> set[int]:
    """`count` distinct numbers below `size` (Bentley and Floyd 1987)."""
    chosen: set[int] = set()
    for last in range(size - count, size):
        x = mix64(key ^ last) * (last + 1) >> 64
        chosen.add(last if x in chosen else x)
    return chosen


def mix64(x: int) -> int:
    """The hash splitmix64 (Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _damaged(columns: NDArray[np.int32], position: int, num_src: int) -> str:
    return f"edge {position} has source {columns[position]}, but there are {num_src} sources: the graph is damaged"
