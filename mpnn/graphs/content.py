"""Graphs of edges that are chosen by content: hash buckets, nearest neighbors, and blocks of sources, or single ones,
for each item and head.

The choice is data, so these graphs are built again for each call. Chosen sources are rows of runs: their edges are
never written out.
"""

import operator
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import FLOATS, INTEGERS, as_integer, at_least, check_form
from mpnn.graph.data import selected
from mpnn.graph.runs import Runs
from mpnn.graph.stacked import StackedGraph
from mpnn.graphs.geometry import nearest, smallest

_CHUNK = 1 << 24
_MAX_ROUNDS = 1024  # of hashing: each takes time, and Reformer has 8


@torch.no_grad()
def lsh(x: Tensor, buckets: int, rounds: int = 1, seed: int = 0) -> Graph:
    """i receives from j if some round of Reformer's hashing (Kitaev et al. 2020) puts both into the same bucket.

    Each round samples R [d, buckets / 2] and computes `argmax([xR; -xR])`, so that vectors of similar direction tend to
    share a bucket. One round is a graph of disjoint cliques; the result is the union of all rounds.

    ::

        lsh(torch.tensor([[1.0], [-1.0], [2.0], [-3.0]]), buckets=2)   #.#.
                                                                       .#.#
                                                                       #.#.
                                                                       .#.#

    Args:
        x: features [N, d].

    Raises:
        ValueError: if x is not a matrix or not finite, `buckets` is not a positive even number, or there are more than
            1,024 rounds.
        MemoryError: if the projections to the buckets do not fit into memory.
    """
    _check_features("lsh", x)
    if x.numel() and not x.isfinite().all():
        raise ValueError(f"lsh needs finite features; those of node {_first(~x.isfinite())} are not all finite")
    at_least("buckets", buckets, 2)
    at_least("rounds", rounds, 1)
    if rounds > _MAX_ROUNDS:
        raise ValueError(f"rounds must be at most {_MAX_ROUNDS:,}; got {rounds}")
    what = f"the projections of {len(x)} nodes to {buckets} buckets"
    capacity.require(4 * buckets * (2 * len(x) + x.shape[1]), what, "use fewer buckets")
    if buckets % 2:
        raise ValueError(f"buckets must be even, half of them for each sign of the projection; got {buckets}")
    generator = torch.Generator().manual_seed(as_integer("seed", seed))
    of_rounds = (_bucket(x, buckets, generator).cpu().numpy() for _ in range(rounds))
    graph = reduce(operator.or_, map(Graph.from_labels, of_rounds))
    graph.name = f"lsh({buckets} buckets, {rounds} rounds)"
    return graph.to(x.device)


def _bucket(x: Tensor, buckets: int, generator: torch.Generator) -> Tensor:
    """The bucket of each vector in a round, int64 [N]."""
    directions = torch.randn(x.shape[1], buckets // 2, generator=generator, dtype=torch.float32).to(x)
    projected = x @ directions
    return torch.cat([projected, -projected], 1).argmax(1)


def chunks(
    order: Tensor, size: int, num_nodes: int, *, before: int = 1, after: int = 0, edge_type: Tensor | None = None
) -> Graph:
    """Lists of nodes are cut into chunks. i receives from all nodes of its own chunk, of the `before` chunks before it
    and of the `after` chunks after it; the first chunk follows the last.

    If a node occurs several times, each occurrence adds its edges, so edges may repeat.

    ::

        chunks(torch.tensor([[0, 2, 1, 3, 4, 5]]), size=2, num_nodes=6)   #.#.##
                                                                          ####..
                                                                          #.#.##
                                                                          ####..
                                                                          .#.###
                                                                          .#.###

    Args:
        order: int64 [lists, length], padded with -1; the length is a multiple of `size`.
        edge_type: the type of the edges of each list, int64 [lists].
    """
    at_least("size", size, 1)
    at_least("num_nodes", num_nodes, 0)
    if order.dim() != 2 or order.shape[1] % size:
        raise ValueError(f"order must be [lists, length], the length a multiple of {size}; got {list(order.shape)}")
    if edge_type is not None:
        check_form(f"edge_type must be [{len(order)}], a type for each list", edge_type, INTEGERS, order.shape[:1])
    at_least("before", before, 0)
    at_least("after", after, 0)
    edges_of_one = size * (before + after + 1)
    what = f"the {order.numel() * edges_of_one} edges of chunks with before={before} and after={after}"
    capacity.require(40 * order.numel() * edges_of_one, what, "use smaller chunks, or fewer of them")
    destinations = order.unflatten(1, (-1, size))
    sources = torch.cat([destinations.roll(-shift, 1) for shift in range(-before, after + 1)], 2)
    dst, src = torch.broadcast_tensors(destinations[..., None], sources[..., None, :])  # [lists, chunks, size, sources]
    valid = (dst >= 0) & (src >= 0)
    edges = torch.stack([src[valid], dst[valid]])
    per_edge = None if edge_type is None else edge_type.view(-1, 1, 1, 1).expand_as(dst)[valid]
    return Graph.from_edges(edges, num_nodes, num_nodes, edge_type=per_edge, name=f"chunks of {size}")


@torch.no_grad()
def knn(x: Tensor, k: int, labels: Tensor | None = None) -> Graph:
    """i receives from its k nearest other nodes by Euclidean distance, nearest first. Ties go to the lower index.

    ::

        knn(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), k=1)   .#..
                                                               #...
                                                               ...#
                                                               ..#.

    Args:
        x: features [N, d]. On a CPU, finite ones are compared in float64.
        labels: integers [N]; points with different labels, as of different clouds of a batch, are not neighbors.

    Raises:
        ValueError: if x is not a matrix or contains NaN, or there are fewer than k other nodes (of a label).
    """
    _check_features("knn", x)
    if labels is not None or (x.is_cpu and x.numel() and bool(x.isfinite().all())):
        src = torch.from_numpy(nearest(x, at_least("k", k, 0), labels)).to(x.device).reshape(-1)
        dst = torch.arange(len(x), device=x.device).repeat_interleave(k)
        return Graph.from_edges(torch.stack([src, dst]), len(x), len(x), name=f"knn({k})")
    if x.isnan().any():
        raise ValueError(f"knn needs features without NaN; those of node {_first(x.isnan())} hold NaN")
    at_least("k", k, 0)
    n = len(x)
    x = x if x.dtype == torch.float64 else x.float()
    far = torch.finfo(x.dtype).max
    if k and k >= n:
        raise ValueError(f"k must be less than the number of nodes, {n}; got {k}")
    sources = []
    for rows in torch.arange(n, device=x.device).split(max(1, _CHUNK // max(n, 1))):
        distance = torch.cdist(x[rows], x, compute_mode="donot_use_mm_for_euclid_dist")
        distance.nan_to_num_(nan=far, posinf=far)  # farther than any other node, but nearer than the node itself
        distance[torch.arange(len(rows), device=x.device), rows] = float("inf")
        sources.append(smallest(distance, k))
    src = torch.cat(sources).reshape(-1) if sources else torch.zeros(0, dtype=torch.int64, device=x.device)
    dst = torch.arange(n, device=x.device).repeat_interleave(k)
    return Graph.from_edges(torch.stack([src, dst]), n, n, name=f"knn({k})")


def _first(bad: Tensor) -> int:
    """The first row of [N, d] that contains True."""
    return int(bad.any(1).nonzero()[0])


def _check_features(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.is_nested:
        kind = "a nested tensor" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} needs a tensor of features [N, d]; got {kind}")
    check_form(f"{name} needs floating-point features [N, d]", x, FLOATS, (None, None))


def drop_self_loops(graph: Graph) -> Graph:
    """Removes the self-loops of each edge type, then adds one to each node without in-neighbors of this type (Reformer,
    section 2, "Causal masking for shared-QK": the type is the head)."""
    src, dst = graph.edge_index
    others = selected(graph, src != dst)
    head = torch.zeros_like(dst) if graph.edge_type is None else graph.edge_type
    reached = torch.zeros(int(head.max()) + 1 if len(head) else 1, graph.num_dst, dtype=torch.bool, device=dst.device)
    reached[head[src != dst], others.edge_index[1]] = True
    isolated_head, isolated = (~reached).nonzero().T
    edges = torch.cat([others.edge_index, isolated.expand(2, -1)], 1)
    edge_type = None if others.edge_type is None else torch.cat([others.edge_type, isolated_head])
    return Graph.from_edges(edges, graph.num_dst, graph.num_src, edge_type=edge_type)


@torch.no_grad()
def blocks(chosen: Tensor, size: int, num_src: int, *, num_dst: int | None = None) -> Graph:
    """Each destination receives from the blocks of `size` consecutive sources that are chosen for it, or for its block
    of destinations (MoBA, Lu et al. 2025, arXiv:2502.13189; NSA, Yuan et al. 2025, arXiv:2502.11089).

    ::

        blocks(torch.tensor([[True, False], [True, True]]), size=2, num_src=4)   ##..
                                                                                 ##..
                                                                                 ####
                                                                                 ####

    Args:
        chosen: bool [..., R, ceil(num_src / size)]. R is the number of destinations, or of their blocks. Leading
            dimensions: none; (items,) for a choice of each item of a batch; or (items, heads) for one of each item and
            head, with 1 for items that share it. The number of heads divides that of the attention: groups of heads
            share a choice.
        num_src: number of sources. The last block may be shorter.
        num_dst: number of destinations. Default: `num_src` if R is the number of blocks of sources, else R.

    Returns:
        A graph of `num_dst` x `num_src`; with leading dimensions a `StackedGraph`. Compose it with topologies:
        `blocks(...) & causal()`.

    Raises:
        TypeError: if `chosen` is not a tensor of bools.
        ValueError: if its shape does not fit.
    """
    at_least("size", size, 1)
    at_least("num_src", num_src, 0)
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool:
        raise TypeError(f"chosen must be a tensor of bools; got {getattr(chosen, 'dtype', type(chosen).__name__)}")
    _check_dimensions("chosen", chosen)
    rows, across = chosen.shape[-2:]
    if across != -(-num_src // size):
        raise ValueError(f"{num_src} sources form {-(-num_src // size)} blocks of {size}; got {across} columns")
    if num_dst is None:
        num_dst = num_src if rows == across else rows
    at_least("num_dst", num_dst, 0)
    if rows not in (num_dst, -(-num_dst // size)):
        raise ValueError(
            f"chosen must have a row for each of {num_dst} destinations, or for each block of {size}; got {rows} rows"
        )
    flat = Runs.from_dense(chosen.flatten(0, -2).cpu().numpy())
    runs = Runs(flat.num_dst, num_src, flat.ptr, flat.start * size, np.minimum(flat.stop * size, num_src))
    if rows != num_dst:
        block = np.arange(num_dst) // size
        runs = runs.take((np.arange(flat.num_dst // max(rows, 1))[:, None] * rows + block).reshape(-1))
    return _stacked(runs, chosen, f"blocks of {size}")


@torch.no_grad()
def chosen(indices: Tensor, num_src: int) -> Graph:
    """Each destination receives from the sources that are listed for it (DeepSeek's sparse attention, DSA; top-k
    attention). Repeated sources count once.

    ::

        chosen(torch.tensor([[0, -1], [0, 1], [2, 0]]), num_src=3)   #..
                                                                     ##.
                                                                     #.#

    Args:
        indices: integers [..., num_dst, k], from 0 to num_src - 1, or -1 for none. Leading dimensions as in `blocks`.

    Returns:
        A graph of `num_dst` x `num_src`; with leading dimensions a `StackedGraph`.

    Raises:
        TypeError: if `indices` is not a tensor of integers.
        ValueError: if its shape does not fit.
        IndexError: if an index is not among the sources.
    """
    at_least("num_src", num_src, 0)
    if not isinstance(indices, Tensor) or indices.dtype not in _INTEGERS:
        raise TypeError(
            f"indices must be a tensor of integers; got {getattr(indices, 'dtype', type(indices).__name__)}"
        )
    _check_dimensions("indices", indices)
    outside = (indices < -1) | (indices >= num_src)
    if outside.any():
        raise IndexError(
            f"indices{outside.nonzero()[0].tolist()} is {int(indices[outside][0])}; expected 0 to {num_src - 1}, or -1 "
            "for none"
        )
    listed: NDArray[Any] = indices.flatten(0, -2).cpu().numpy()
    narrow = np.sort(listed.astype(np.int32 if num_src < 2**31 else np.int64), axis=1)
    narrow[narrow < 0] = -2  # so that source 0 does not follow it
    before = np.full_like(narrow, -2)
    before[:, 1:] = narrow[:, :-1]
    begins = narrow > before + 1
    ends = np.ones_like(begins)
    ends[:, :-1] = narrow[:, 1:] > narrow[:, :-1] + 1
    ends &= narrow >= 0
    ptr = np.append(0, np.cumsum(begins.sum(1)))
    start = narrow[begins].astype(np.int64)
    stop = narrow[ends].astype(np.int64) + 1
    return _stacked(Runs(len(listed), num_src, ptr, start, stop), indices, f"{indices.shape[-1]} chosen")


_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def _check_dimensions(name: str, x: Tensor) -> None:
    if not 2 <= x.dim() <= 4 or 0 in x.shape[:-2]:
        raise ValueError(
            f"{name} must have two dimensions, after (items,) or (items, heads) for graphs that differ; got "
            f"{list(x.shape)}"
        )


def _stacked(runs: Runs, choice: Tensor, name: str) -> Graph:
    graph = Graph.from_runs(runs).to(choice.device)
    graph.name = name
    if choice.dim() == 2:
        return graph
    # The type of a tensor does not say how many dimensions it has.
    return cast(Graph, StackedGraph(graph, tuple(choice.shape[:-2])))
