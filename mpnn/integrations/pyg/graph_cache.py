"""Graphs of the `edge_index` of PyTorch Geometric, cached as long as the tensor lives and is not modified.

A model calls each of its convolutions with the same tensor. What a convolution derives from it (the sorted edges, the
edges with self-loops, normalized weights) is kept under the identity of the tensor. A weak reference drops it with the
tensor, and a changed version, memory or shape discards it. Writes that torch does not count, such as those through
`tensor.data` or numpy, are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from mpnn.graph import Graph
from mpnn.graph.csr import built

T = TypeVar("T")


@dataclass
class _Entry:
    tensor: weakref.ref[Tensor]
    stamp: Hashable
    values: dict[Hashable, Any] = field(default_factory=dict)


_ENTRIES: dict[int, _Entry] = {}


def cached(tensor: Tensor, key: Hashable, build: Callable[[], T]) -> T:
    """`build()`, computed once per key while `tensor` is unchanged. The result must not refer to the tensor object,
    which it would keep alive: pass `tensor.detach()` to what keeps it. Nothing is cached for transient tensors."""
    if _is_transient(tensor):
        return build()
    number, stamp = id(tensor), _stamp(tensor)
    entry = _ENTRIES.get(number)
    if entry is None or entry.tensor() is not tensor or entry.stamp != stamp:
        entry = _ENTRIES[number] = _Entry(weakref.ref(tensor, partial(_drop, number)), stamp)
    if key not in entry.values:
        entry.values[key] = built(build)
    value: T = entry.values[key]
    return value


def cached_pair(tensor: Tensor, other: Tensor | None, key: Hashable, build: Callable[[], T]) -> T:
    """As `cached`, for a result of two tensors. Only the result for the latest `other` is kept."""
    if _is_transient(tensor) or (other is not None and _is_transient(other)):
        return build()
    latest: list[Any] = cached(tensor, key, list)
    stamp = None if other is None else _stamp(other)
    if not latest or latest[0] is not other or latest[1] != stamp:
        latest[:] = other, stamp, built(build)
    value: T = latest[2]
    return value


def graph_of(edges: Any, num_src: int, num_dst: int, flow: str) -> Graph:
    """The graph of an `edge_index` or of a transposed sparse adjacency matrix.

    Args:
        edges: integers [2, E], an `EdgeIndex`, a `SparseTensor`, or a torch.sparse CSR or COO matrix.
        num_src, num_dst: the numbers of nodes that send and receive.
        flow: "source_to_target", or "target_to_source", where row 1 sends to row 0.

    Raises:
        IndexError: if an edge refers to a node that does not exist.
    """

    def build() -> Graph:
        ends = _ends(edges)
        return Graph.from_edges(ends if flow == "source_to_target" else ends.flip(0), num_dst, num_src)

    owner = edges.storage.col() if _is_sparse_tensor(edges) else edges
    return cached(owner, ("graph", num_src, num_dst, flow), build)


def values_of(edges: Any) -> Tensor | None:
    """The values [E] of a sparse adjacency matrix in the order of the edges of `graph_of`; None for an edge_index."""
    if _is_sparse_tensor(edges):
        value: Tensor | None = edges.storage.value()
        return value
    if edges.layout == torch.strided:
        return None
    return edges.values() if edges.layout == torch.sparse_csr else edges._values()


def is_supported(edges: Any) -> bool:
    """Whether `graph_of` takes these edges."""
    if not isinstance(edges, Tensor):
        return _is_sparse_tensor(edges)
    if edges.layout == torch.sparse_coo:
        return edges.is_coalesced()
    return edges.layout in (torch.strided, torch.sparse_csr)


def is_edge_index(edges: Any) -> bool:
    """Whether these edges are a tensor [2, E] or an `EdgeIndex`, not a matrix."""
    return isinstance(edges, Tensor) and edges.layout == torch.strided


def _is_sparse_tensor(edges: Any) -> bool:
    return isinstance(edges, SparseTensor) and not isinstance(edges, Tensor)


def _ends(edges: Any) -> Tensor:
    """Integers [2, E]: sources and destinations. Never the tensor object itself."""
    if _is_sparse_tensor(edges):
        row, col, _ = edges.coo()
        return torch.stack([col, row])
    if edges.layout == torch.sparse_coo:
        return edges._indices().flip(0)
    if edges.layout == torch.sparse_csr:
        start, col = edges.crow_indices(), edges.col_indices()
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


def _drop(number: int, dead: weakref.ref[Tensor], entries: dict[int, _Entry] = _ENTRIES) -> None:
    """Removes the entry of a tensor that died. `entries` is a default, because globals are None at interpreter exit."""
    entry = entries.get(number)
    if entry is not None and entry.tensor is dead:
        del entries[number]
