"""Which edges a case has: every topology as a condition on (i, j), tried on all pairs, and every change of a graph as a
list comprehension would write it. Imports nothing of the project.

`i` is the destination and `j` the source; see the docstrings in `mpnn.graphs` for what each topology promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Edges:
    """Edges in the caller's order, with the positions of both kinds of nodes.

    `kind` [E] is each edge's type where types are data; `rule` gives types by the positions of the two ends, `turned`
    exchanged. `explicit`: the caller gave a list of edges. `present` [items, heads, E]: which of the edges each item of
    a batch and each head has, where they differ.
    """

    num_dst: int
    num_src: int
    dst: np.ndarray
    src: np.ndarray
    dst_position: np.ndarray
    src_position: np.ndarray
    explicit: bool
    kind: np.ndarray | None = None
    rule: list[Any] | None = None
    turned: bool = False
    present: np.ndarray | None = None

    @property
    def types(self) -> np.ndarray | None:
        """The type of each edge, int64 [E], None where edges have none."""
        return self.kind if self.rule is None else types_by_rule(self.rule, self, self.turned)

    @property
    def num_types(self) -> int:
        if self.rule is not None:
            return count_types(self.rule)
        return 0 if self.kind is None else int(self.kind.max(initial=-1)) + 1

    def keep(self, which: np.ndarray) -> Edges:
        """The edges with these numbers, in this order."""
        kind = None if self.kind is None else self.kind[which]
        return replace(self, dst=self.dst[which], src=self.src[which], kind=kind)

    def matrix(self) -> np.ndarray:
        """bool [num_dst, num_src], or [items, heads, num_dst, num_src] where they differ."""
        stack = () if self.present is None else self.present.shape[:2]
        out = np.zeros((*stack, self.num_dst, self.num_src), bool)
        out[..., self.dst, self.src] = True if self.present is None else self.present
        return out


def edges_of(graph: dict[str, Any]) -> Edges:
    """The edges of a case's graph, with all its changes made."""
    if "edges" in graph:
        src, dst = np.array(graph["edges"], np.int64).reshape(2, -1)
        n, m = graph["num_dst"], graph["num_src"]
        kind = None if graph.get("edge_type") is None else np.array(graph["edge_type"], np.int64)
        edges = Edges(n, m, dst, src, np.arange(n), np.arange(m), True, kind)
    elif "parent" in graph:
        edges = _tree(graph["parent"], graph["radius"])
    elif "choice" in graph:
        edges = _choice(graph)
    else:
        edges = _from_matrix(*matrix_of(graph["rule"], graph["num_dst"], graph["num_src"]))
    edges = replace(edges, rule=graph.get("related"))
    for change in graph.get("changes", ()):
        edges = _CHANGES[change[0]](edges, *change[1:])
    return edges


def types_by_rule(relation: list[Any], edges: Edges, turned: bool = False) -> np.ndarray:
    """The type of each edge by a rule, int64 [E]."""
    i, j = edges.dst_position[edges.dst], edges.src_position[edges.src]
    i, j = (j, i) if turned else (i, j)
    name, *arguments = relation
    if name == "offset":
        (clip,) = arguments
        return np.clip(j - i, -clip, clip) + clip
    if name == "grid":
        width, rows, columns = arguments
        down = np.clip(j // width - i // width, -rows, rows) + rows
        across = np.clip(j % width - i % width, -columns, columns) + columns
        return down * (2 * columns + 1) + across
    if name == "custom":
        (count,) = arguments
        return (i * 5 + j * j) % count
    raise ValueError(f"no relation {name!r}")


def count_types(relation: list[Any]) -> int:
    """How many types the rule gives."""
    name, *arguments = relation
    if name == "offset":
        return 2 * arguments[0] + 1
    if name == "grid":
        return (2 * arguments[1] + 1) * (2 * arguments[2] + 1)
    return arguments[0]


def _tree(parent: list[int], radius: int | None) -> Edges:
    """Each node and its ancestors, at most `radius` steps above it; positions are depths."""
    n = len(parent)
    matrix, depth = np.zeros((n, n), bool), np.zeros(n, np.int64)
    for i in range(n):
        at, steps = i, 0
        while at >= 0:
            matrix[i, at] = radius is None or steps <= radius
            at, steps = parent[at], steps + 1
        depth[i] = steps - 1
    return replace(_from_matrix(matrix), dst_position=depth, src_position=depth)


def _choice(graph: dict[str, Any]) -> Edges:
    """Edges to sources (`size` None), or to blocks of `size` sources, that are listed for each row of each item and
    head; within a rule, if there is one."""
    n, m, size = graph["num_dst"], graph["num_src"], graph["size"]
    listed = np.array(graph["choice"], np.int64).reshape(*graph["stack"], graph["rows"], -1)
    matrix = np.zeros((*graph["stack"], n, m), bool)
    for at in np.ndindex(listed.shape):
        *entry, row, _ = at
        chosen, own = int(listed[at]), slice(row, row + 1)
        if chosen < 0:
            continue
        if graph["rows"] != n:
            own = slice(row * size, (row + 1) * size)
        matrix[
            (*entry, own, slice(chosen, chosen + 1) if size is None else slice(chosen * size, (chosen + 1) * size))
        ] = True
    if graph["rule"]:
        matrix = matrix & matrix_of(graph["rule"], n, m)[0]
    if not graph["stack"]:
        return _from_matrix(matrix)
    matrix = matrix.reshape(graph["stack"][0], -1, n, m)
    edges = _from_matrix(matrix.any((0, 1)))
    return replace(edges, present=matrix[:, :, edges.dst, edges.src])


# ------------------------------------------------------------------------------------------------ rules


def matrix_of(rule: Any, n: int, m: int) -> tuple[np.ndarray, int]:
    """bool [n, m], and how many remembered sources stand before the destinations."""
    name, *arguments = rule
    if name in ("|", "&", "-"):
        (left, shift), (right, other_shift) = (matrix_of(part, n, m) for part in arguments)
        joined = {"|": left | right, "&": left & right, "-": left & ~right}[name]
        return joined, shift or other_shift
    if name == "~":
        inner, shift = matrix_of(arguments[0], n, m)
        return ~inner, shift
    i, j = np.indices((n, m))
    allowed = _RULES[name](i, j, n, m, *arguments)
    return np.broadcast_to(allowed, (n, m)).astype(bool), arguments[0] if name == "memory" else 0


def _strided(i, j, n, m, stride):  # type: ignore[no-untyped-def]
    back = i - j
    return ((back >= 0) & (back < stride)) | ((back > 0) & (back % stride == 0))


def _fixed(i, j, n, m, block, summary):  # type: ignore[no-untyped-def]
    same = i // block == j // block
    earlier = (j // block < i // block) & (j % block >= block - summary)
    return (same & (j <= i)) | earlier


def _global_nodes(i, j, n, m, hubs):  # type: ignore[no-untyped-def]
    hubs = range(hubs) if isinstance(hubs, int) else hubs
    return np.isin(i, list(hubs)) | np.isin(j, list(hubs))


def _documents(i, j, n, m, lengths):  # type: ignore[no-untyped-def]
    document = np.repeat(np.arange(len(lengths)), lengths)
    return document[i] == document[j]


def _permutation(i, j, n, m, order):  # type: ignore[no-untyped-def]
    rank = np.argsort(order)
    return rank[j] <= rank[i]


def _grid(i, j, n, m, height, width, connectivity):  # type: ignore[no-untyped-def]
    down, across = abs(i // width - j // width), abs(i % width - j % width)
    return (down + across == 1) if connectivity == 4 else (np.maximum(down, across) == 1)


def _neighborhood(i, j, n, m, height, width, radius):  # type: ignore[no-untyped-def]
    return (abs(i // width - j // width) <= radius) & (abs(i % width - j % width) <= radius)


def _windows(i, j, n, m, height, width, size, shift):  # type: ignore[no-untyped-def]
    """The image moves up and left by `shift`, what leaves it comes in on the other side, and windows are cut; pixels
    attend to each other in a window if both or neither came in along each axis."""

    def group(pixel, length):  # type: ignore[no-untyped-def]
        return (pixel - shift) % length // size * 2 + (pixel < shift)

    down = group(i // width, height) == group(j // width, height)
    return down & (group(i % width, width) == group(j % width, width))


_RULES: dict[str, Any] = {
    "complete": lambda i, j, n, m: np.ones_like(i, bool),
    "causal": lambda i, j, n, m: j <= i,
    "identity": lambda i, j, n, m: i == j,
    "window": lambda i, j, n, m, radius, dilation: ((i - j) % dilation == 0) & (abs(i - j) <= radius * dilation),
    "strided": _strided,
    "fixed": _fixed,
    "global_nodes": _global_nodes,
    "prefix": lambda i, j, n, m, k: (j < k) | (j <= i),
    "documents": _documents,
    "permutation": _permutation,
    "memory": lambda i, j, n, m, length: j <= i + length,
    "grid": _grid,
    "neighborhood": _neighborhood,
    "windows": _windows,
}


def _from_matrix(matrix: np.ndarray, shift: int = 0) -> Edges:
    dst, src = np.nonzero(matrix)
    n, m = matrix.shape
    return Edges(n, m, dst, src, np.arange(n) + shift, np.arange(m), False)


# ------------------------------------------------------------------------------------------------ changes


def _rows(edges: Edges, start: int, stop: int) -> Edges:
    kept = edges.keep(np.flatnonzero((edges.dst >= start) & (edges.dst < stop)))
    position = edges.dst_position[start:stop]
    return replace(kept, num_dst=stop - start, dst=kept.dst - start, dst_position=position)


def _compact(edges: Edges) -> Edges:
    sources = np.unique(edges.src)
    src = np.searchsorted(sources, edges.src)
    return replace(edges, num_src=len(sources), src=src, src_position=edges.src_position[sources])


def _subgraph(edges: Edges, nodes: list[int]) -> Edges:
    inside = np.isin(np.arange(edges.num_dst), nodes)
    kept = edges.keep(np.flatnonzero(inside[edges.dst] & inside[edges.src]))
    number = np.cumsum(inside) - 1
    return replace(
        kept,
        num_dst=len(nodes),
        num_src=len(nodes),
        dst=number[kept.dst],
        src=number[kept.src],
        dst_position=edges.dst_position[inside],
        src_position=edges.src_position[inside],
    )


def _reverse(edges: Edges) -> Edges:
    turned = replace(
        edges,
        num_dst=edges.num_src,
        num_src=edges.num_dst,
        dst=edges.src,
        src=edges.dst,
        dst_position=edges.src_position,
        src_position=edges.dst_position,
        turned=not edges.turned,
    )
    return turned if edges.explicit else turned.keep(np.lexsort((turned.src, turned.dst)))


def _positions(edges: Edges, dst: list[int], src: list[int]) -> Edges:
    return replace(edges, dst_position=np.array(dst, np.int64), src_position=np.array(src, np.int64))


def _and(edges: Edges, rule: Any) -> Edges:
    return _those_in(edges, matrix_of(rule, edges.num_dst, edges.num_src)[0])


def _minus(edges: Edges, rule: Any) -> Edges:
    return _those_in(edges, ~matrix_of(rule, edges.num_dst, edges.num_src)[0])


def _those_in(edges: Edges, matrix: np.ndarray) -> Edges:
    return edges.keep(np.flatnonzero(matrix[edges.dst, edges.src]))


def _self_loops(edges: Edges) -> Edges:
    missing = np.flatnonzero(~edges.matrix().diagonal())
    return _with_new(edges, missing, missing)


def _undirected(edges: Edges) -> Edges:
    one_way = ~edges.matrix()[edges.src, edges.dst]
    return _with_new(edges, edges.src[one_way], edges.dst[one_way])


def _with_new(edges: Edges, dst: np.ndarray, src: np.ndarray) -> Edges:
    more = replace(edges, dst=np.append(edges.dst, dst), src=np.append(edges.src, src))
    return more if edges.explicit else more.keep(np.lexsort((more.src, more.dst)))


_CHANGES: dict[str, Any] = {
    "rows": _rows,
    "compact": _compact,
    "subgraph": _subgraph,
    "reverse": _reverse,
    "positions": _positions,
    "and": _and,
    "minus": _minus,
    "self_loops": _self_loops,
    "undirected": _undirected,
    "reordered": lambda edges, method: edges,
}
