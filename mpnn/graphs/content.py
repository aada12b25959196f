"""Graphs built from features, anew at each call: hashing buckets and nearest neighbours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graphs.check import at_least, whole

_CHUNK = 1 << 24


@torch.no_grad()
def lsh(x: Tensor, buckets: int, rounds: int = 1, seed: int = 0) -> Graph:
    """Reformer's hashing (Kitaev et al. 2020): i hears j when some round puts both into the same bucket.

    A round draws R [d, buckets / 2] and takes `argmax([xR; -xR])`: nearby directions mostly share a bucket. One round
    is a graph of disjoint cliques; several are united.

    ::

        lsh(torch.tensor([[1.0], [-1.0], [2.0], [-3.0]]), buckets=2)   #.#.
                                                                       .#.#
                                                                       #.#.
                                                                       .#.#

    Args:
        x: features [N, d].

    Raises:
        ValueError: x is no matrix or not finite, or `buckets` is not a positive even number.
    """
    _check_features("lsh", x)
    if x.numel() and not x.isfinite().all():
        raise ValueError(f"lsh needs finite features; those of node {_first(~x.isfinite())} are not all finite")
    at_least("buckets", buckets, 2)
    at_least("rounds", rounds, 1)
    if buckets % 2:
        raise ValueError(f"buckets must be even, half of them for each sign of the projection; got {buckets}")
    generator = torch.Generator().manual_seed(whole("seed", seed))
    graph: Graph | None = None
    for _ in range(rounds):
        directions = torch.randn(x.shape[1], buckets // 2, generator=generator).to(x)
        projected = x @ directions
        bucket = torch.cat([projected, -projected], 1).argmax(1)
        one = Graph.from_labels(bucket.cpu().numpy().astype(np.int64))
        graph = one if graph is None else graph | one
    assert graph is not None
    graph.name = f"lsh({buckets} buckets, {rounds} rounds)"
    return graph.to(x.device)


def chunks(
    order: Tensor, size: int, num_nodes: int, *, before: int = 1, after: int = 0, edge_type: Tensor | None = None
) -> Graph:
    """Nodes in lists that are cut into chunks: i hears all in its own chunk and in so many chunks before and after it,
    the first chunk following the last. Where i stands several times, it hears as often; edges may repeat.

    ::

        chunks(torch.tensor([[0, 2, 1, 3, 4, 5]]), size=2, num_nodes=6)   #.#.##
                                                                          ####..
                                                                          #.#.##
                                                                          ####..
                                                                          .#.###
                                                                          .#.###

    Args:
        order: int64 [lists, length], -1 where nobody stands; the length is a multiple of `size`.
        edge_type: the class of the edges that each list makes, int64 [lists].
    """
    at_least("size", size, 1)
    at_least("num_nodes", num_nodes, 0)
    if order.dim() != 2 or order.shape[1] % size:
        raise ValueError(f"order must be [lists, length], the length a multiple of {size}; got {list(order.shape)}")
    if edge_type is not None and edge_type.shape != order.shape[:1]:
        raise ValueError(f"edge_type must be [{len(order)}], a class for each list; got {list(edge_type.shape)}")
    at_least("before", before, 0)
    at_least("after", after, 0)
    hears = order.unflatten(1, (-1, size))
    heard = torch.cat([hears.roll(-shift, 1) for shift in range(-before, after + 1)], 2)
    dst, src = torch.broadcast_tensors(hears[..., None], heard[..., None, :])  # [lists, chunks, size, heard]
    there = (dst >= 0) & (src >= 0)
    edges = torch.stack([src[there], dst[there]])
    kind = None if edge_type is None else edge_type.view(-1, 1, 1, 1).expand_as(dst)[there]
    return Graph.from_edges(edges, num_nodes, num_nodes, edge_type=kind, name=f"chunks of {size}")


@torch.no_grad()
def knn(x: Tensor, k: int) -> Graph:
    """i hears its k nearest other nodes by Euclidean distance, nearest first; ties go to the lower index.

    ::

        knn(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), k=1)   .#..
                                                               #...
                                                               ...#
                                                               ..#.

    Args:
        x: features [N, d].

    Raises:
        ValueError: x is no matrix or holds NaN, or there are not k other nodes.
    """
    _check_features("knn", x)
    if x.isnan().any():
        raise ValueError(f"knn has no distance to NaN; node {_first(x.isnan())} has features that are NaN")
    at_least("k", k, 0)
    n = len(x)
    x = x if x.dtype == torch.float64 else x.float()
    far = torch.finfo(x.dtype).max
    if k and k >= n:
        raise ValueError(f"k must be less than the number of nodes, {n}; got {k}")
    sources = []
    for rows in torch.arange(n, device=x.device).split(max(1, _CHUNK // max(n, 1))):
        distance = torch.cdist(x[rows], x, compute_mode="donot_use_mm_for_euclid_dist")
        distance.nan_to_num_(nan=far, posinf=far)  # farther than any node, but nearer than a node is to itself
        distance[torch.arange(len(rows), device=x.device), rows] = float("inf")
        sources.append(_smallest(distance, k))
    src = torch.cat(sources).reshape(-1) if sources else torch.zeros(0, dtype=torch.int64, device=x.device)
    dst = torch.arange(n, device=x.device).repeat_interleave(k)
    return Graph.from_edges(torch.stack([src, dst]), n, n, name=f"knn({k})")


def _smallest(x: Tensor, k: int) -> Tensor:
    """The columns of the k smallest numbers of each row, [rows, k], ascending; of equal ones the first."""
    if not 0 < k <= x.shape[1] // 8:
        return x.sort(dim=1, stable=True).indices[:, :k]
    # as good as a sort, and sorts no more than the numbers up to the k-th
    row, column = (x <= x.topk(k, dim=1, largest=False).values[:, -1:]).nonzero(as_tuple=True)
    order = x[row, column].argsort(stable=True)
    order = order[row[order].argsort(stable=True)]
    first = torch.searchsorted(row, torch.arange(len(x), device=x.device))
    return column[order[first[:, None] + torch.arange(k, device=x.device)]]


def _first(bad: Tensor) -> int:
    """The first row of [N, d] in which something is True."""
    return int(bad.any(1).nonzero()[0])


def _check_features(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} needs a tensor of features [N, d]; got {type(x).__name__}")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"{name} needs floating-point features [N, d]; got {x.dtype} of shape {list(x.shape)}")
