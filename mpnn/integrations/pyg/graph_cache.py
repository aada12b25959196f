"""Graphs of the `edge_index` of PyTorch Geometric, cached as long as the tensor lives and holds the same numbers.

A model calls each of its convolutions with the same tensor. Its graph is kept in `mpnn.graphs.cache` under the identity
of the tensor, and what convolutions derive from it (sorted edges, edges with self-loops, degrees) is kept on the graph.
A weak reference drops it with the tensor, and other numbers discard it: they are compared in each call, because torch
does not count writes through `tensor.data` or numpy. That takes 1 to 5 % of a convolution. Nothing that derives from
edge weights is kept: they may be parameters.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef
from torch_geometric.typing import SparseTensor

from mpnn import Graph
from mpnn.graph.bind_cache import CACHE
from mpnn.graph.modes import outside_modes
from mpnn.graphs import HeteroGraph
from mpnn.graphs.kinds import EdgeKind


def graph_of(edges: Any, num_src: int, num_dst: int, flow: str, edge_type: Tensor | None = None) -> Graph:
    """The graph of an `edge_index` or of a transposed sparse adjacency matrix.

    Args:
        edges: integers [2, E], an `EdgeIndex`, a `SparseTensor`, or a torch.sparse CSR or COO matrix.
        num_src, num_dst: the numbers of nodes that send and receive.
        flow: "source_to_target", or "target_to_source", where row 1 sends to row 0.
        edge_type: integers [E].
    """

    def build() -> Graph:
        ends = _ends(edges)
        ends = ends if flow == "source_to_target" else ends.flip(0)
        return Graph.from_edges(ends, num_dst, num_src, edge_type=None if edge_type is None else _copy_of(edge_type))

    owners = [edges] if isinstance(edges, Tensor) else [edges.storage.rowptr(), edges.storage.col()]
    tensors = owners if edge_type is None else [*owners, edge_type]
    return _kept((flow, num_src, num_dst), tensors, build)


def stacked_graph_of(edges: Mapping[EdgeKind, Tensor], num_nodes: Mapping[str, int]) -> Graph:
    """`HeteroGraph.stacked` of edge lists [2, E] by relation."""

    def build() -> Graph:
        relations = {
            relation: Graph.from_edges(_ends(ends), num_nodes[relation[2]], num_nodes[relation[0]])
            for relation, ends in edges.items()
        }
        return HeteroGraph(relations, num_nodes).stacked

    return _kept((*num_nodes.items(), *edges), [*edges.values()], build)


def _kept(form: tuple[Hashable, ...], tensors: Sequence[Tensor], build: Callable[[], Graph]) -> Graph:
    """The graph that `build` makes of these tensors, from the cache if it was made before and they hold the same
    numbers."""
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return outside_modes(build)
    key = *form, *map(WeakIdRef, tensors, repeat(_forget))
    numbers = [x for edges in tensors for x in _plain(edges)]
    fresh: list[Graph] = []

    def make() -> Graph:
        graph = build()
        graph.cached("numbers of tensors", lambda: [_held(x, graph) for x in numbers])
        fresh.append(graph)
        return graph

    graph = CACHE.keep(key, make)
    held = graph._memo.get("numbers of tensors")
    if graph in fresh or (held is not None and all(map(_is_equal, numbers, held))):
        return graph
    CACHE.drop(key.__eq__)
    return CACHE.keep(key, make)


def values_of(edges: Any) -> Tensor | None:
    """The values [E] of a sparse adjacency matrix in the order of the edges of `graph_of`."""
    if _is_sparse_tensor(edges):
        return cast("Tensor | None", edges.storage.value())
    return edges.values() if edges.layout == torch.sparse_csr else edges._values()


def is_supported(edges: Any) -> bool:
    """Whether `graph_of` takes these edges, or they are a `Graph` already."""
    if not isinstance(edges, Tensor):
        return isinstance(edges, Graph) or _is_sparse_tensor(edges)
    if edges.is_meta:
        return False
    if edges.layout == torch.sparse_coo:
        return edges.is_coalesced()
    return edges.layout in (torch.strided, torch.sparse_csr)


def is_edge_list(edges: Any) -> bool:
    """Whether these edges are a tensor [2, E], an `EdgeIndex` or a `Graph`, not a matrix."""
    return isinstance(edges, Graph) or (isinstance(edges, Tensor) and edges.layout == torch.strided)


def _is_sparse_tensor(edges: Any) -> bool:
    return isinstance(edges, SparseTensor) and not isinstance(edges, Tensor)


def _ends(edges: Any) -> Tensor:
    """Integers [2, E]: sources and destinations. Never the tensor object itself, which the graph would keep alive."""
    if not isinstance(edges, Tensor):
        row, col, _ = edges.coo()
        return torch.stack([col, row])
    if edges.layout == torch.sparse_coo:
        return edges._indices().flip(0)
    if edges.layout == torch.sparse_csr:
        start = edges.crow_indices()
        col = edges.col_indices()
        row = torch.arange(len(start) - 1, device=start.device).repeat_interleave(start.diff())
        return torch.stack([col.long(), row])
    return _copy_of(edges.as_tensor() if hasattr(edges, "as_tensor") else edges)


def _copy_of(integers: Tensor) -> Tensor:
    """An int64 copy, which no other code writes to: kernels do not check it again."""
    return integers.detach().to(torch.int64, copy=True)


def _plain(edges: Tensor) -> tuple[Tensor, ...]:
    """The tensors of integers that edges consist of."""
    if edges.layout == torch.sparse_coo:
        return (edges._indices(),)
    if edges.layout == torch.sparse_csr:
        return edges.crow_indices(), edges.col_indices()
    return ((edges.as_tensor() if hasattr(edges, "as_tensor") else edges).detach(),)


def _held(numbers: Tensor, graph: Graph) -> Tensor:
    """A copy of numbers: the edges of the graph that was made of them, where they are the same."""
    own = graph.stored_edges
    return own if numbers.shape == own.shape and _is_equal(numbers, own) else numbers.clone()


def _is_equal(x: Tensor, held: Tensor) -> bool:
    """Whether two tensors of integers of any width hold the same numbers."""
    if x.shape != held.shape or x.device != held.device:
        return False
    if x.dtype == held.dtype:
        return torch.equal(x, held)
    parts = zip(x.split(_AT_ONCE, -1), held.split(_AT_ONCE, -1), strict=True)
    return all(torch.equal(a, b.to(a.dtype)) for a, b in parts)


_AT_ONCE = 1 << 15  # numbers of another width that are compared at a time, so that they stay in the cache


def _forget(dead: Any, drop: Any = CACHE.drop) -> None:
    """Drops the graphs of a tensor that died. `drop` is a default, because globals are None at interpreter exit."""
    drop(lambda key: id(dead) in map(id, key))
