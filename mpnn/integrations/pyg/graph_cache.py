"""Graphs of the `edge_index` of PyTorch Geometric, cached as long as the tensor lives and is not modified.

A model calls each of its convolutions with the same tensor. Its graph is kept in `mpnn.graphs.cache` under the identity
of the tensor, and what convolutions derive from it (sorted edges, edges with self-loops, degrees) is kept on the graph.
A weak reference drops it with the tensor, and a changed version, memory or shape discards it. Writes that torch does
not count, such as those through `tensor.data` or numpy, are not seen. Nothing that derives from edge weights is kept:
they may be parameters, and fused optimizers change those without counting.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

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
        return Graph.from_edges(ends, num_dst, num_src, edge_type=None if edge_type is None else edge_type.detach())

    owners = [edges.storage.rowptr(), edges.storage.col()] if _is_sparse_tensor(edges) else [edges]
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
    """The graph that `build` makes of these tensors, from the cache if it was made before and they did not change."""
    if any(_is_transient(tensor) for tensor in tensors):
        return outside_modes(build)
    key = *form, *(WeakIdRef(tensor, _forget) for tensor in tensors)
    stamp = [_stamp(tensor) for tensor in tensors]
    for _ in range(2):
        graph = CACHE.keep(key, build)
        if graph.cached("stamp", lambda: stamp) == stamp:
            break
        CACHE.drop(key.__eq__)
    return graph


def values_of(edges: Any) -> Tensor | None:
    """The values [E] of a sparse adjacency matrix in the order of the edges of `graph_of`."""
    if _is_sparse_tensor(edges):
        value: Tensor | None = edges.storage.value()
        return value
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
    if _is_sparse_tensor(edges):
        row, col, _ = edges.coo()
        return torch.stack([col, row])
    if edges.layout == torch.sparse_coo:
        return edges._indices().flip(0)
    if edges.layout == torch.sparse_csr:
        start = edges.crow_indices()
        col = edges.col_indices()
        row = torch.arange(len(start) - 1, device=start.device).repeat_interleave(start.diff())
        return torch.stack([col.long(), row])
    plain = edges.as_tensor() if hasattr(edges, "as_tensor") else edges
    return plain.detach().long()


def _is_transient(tensor: Tensor) -> bool:
    """Whether a tensor has no version that tells when it is modified, or belongs to a transform of `torch.func`."""
    return tensor.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _stamp(tensor: Tensor) -> Hashable:
    memory = tensor.data_ptr() if tensor.layout == torch.strided else None
    return tensor._version, memory, tensor.shape


def _forget(dead: Any, drop: Any = CACHE.drop) -> None:
    """Drops the graphs of a tensor that died. `drop` is a default, because globals are None at interpreter exit."""
    drop(lambda key: any(part is dead for part in key))
