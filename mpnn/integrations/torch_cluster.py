"""torch_cluster's functions, which has to be compiled against each version of torch; these need no compiler.

    from mpnn.integrations.torch_cluster import knn_graph      instead of torch_cluster
    python -m mpnn.shim torch_cluster script.py                for code that imports torch_cluster itself

Signatures and results are those of torch_cluster 1.6.3, on any device; points are compared on the CPU, in float64. Its
CPU functions leave open which of equally near points are kept, and in which order edges come. Here

- `knn` has the nearest first, `radius` the lowest index first; of more than `max_num_neighbors` the nearest are kept;
- `cosine=True` is served, also without a GPU;
- batch vectors need not be sorted;
- no point is chosen twice by `fps`.

`num_workers` has no effect. What is drawn comes from torch's generator.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graphs import geometry
from mpnn.kernels.rows import match

Ints = np.ndarray[Any, np.dtype[np.int64]]
_FLOWS = ("source_to_target", "target_to_source")


def knn(
    x: Tensor,
    y: Tensor,
    k: int,
    batch_x: Tensor | None = None,
    batch_y: Tensor | None = None,
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Returns the k points of x [N, F] nearest to each point of y [M, F] of the same batch entry; all if there are
    fewer.

    Args:
        batch_x, batch_y: int64 [N] and [M], the entry of a batch that each point is in.
        cosine: the distance is that of directions.

    Returns:
        int64 [2, E]: points of y, ascending, and of x, nearest first.
    """
    points, queries = _points(x, cosine), _points(y, cosine)
    row, column = geometry.nearest_of(points, queries, k, _labels(points, queries, batch_x, batch_y))
    return _edges(row, column, x)


def knn_graph(
    x: Tensor,
    k: int,
    batch: Tensor | None = None,
    loop: bool = False,
    flow: str = "source_to_target",
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Returns edges from the k nearest points of the same batch entry to each point of x [N, F]; all if there are
    fewer.

    Args:
        loop: whether a point is one of its own k.
        flow: "source_to_target", or "target_to_source" for edges from each point.

    Returns:
        int64 [2, E].
    """
    points = _points(x, cosine)
    label = None if batch is None else _ranks(_label(batch, len(points)))
    smallest = len(points) if label is None else np.bincount(label).min(initial=len(points))
    if loop or k >= smallest:
        labels = None if label is None else (label, label)
        row, column = geometry.nearest_of(points, points, k if loop else k + 1, labels)
        if not loop:
            other = row != column
            row, column = _first(row[other], column[other], k)
    else:
        at = torch.from_numpy(points)
        column = geometry.nearest(at, k, None if label is None else torch.from_numpy(label)).ravel()
        row = np.arange(len(points)).repeat(k)
    return _flowing(_edges(row, column, x), flow)


def radius(
    x: Tensor,
    y: Tensor,
    r: float,
    batch_x: Tensor | None = None,
    batch_y: Tensor | None = None,
    max_num_neighbors: int = 32,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Returns the points of x [N, F] nearer than r to each point of y [M, F] of the same batch entry, at most
    `max_num_neighbors`.

    Returns:
        int64 [2, E]: points of y and of x, both ascending.
    """
    points, queries = _points(x), _points(y)
    pairs = geometry.nearer_than(points, queries, r, _labels(points, queries, batch_x, batch_y))
    return _edges(*_nearest(points, queries, *pairs, max_num_neighbors), x)


def radius_graph(
    x: Tensor,
    r: float,
    batch: Tensor | None = None,
    loop: bool = False,
    max_num_neighbors: int = 32,
    flow: str = "source_to_target",
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Returns edges from the points nearer than r of the same batch entry to each point of x [N, F], at most
    `max_num_neighbors`.

    Args:
        loop: whether a point is among its own neighbors.
        flow: "source_to_target", or "target_to_source" for edges from each point.

    Returns:
        int64 [2, E].
    """
    points = _points(x)
    label = None if batch is None else _ranks(_label(batch, len(points)))
    row, column = geometry.nearer_than(points, points, r, None if label is None else (label, label))
    if loop and r > 0:
        every = np.arange(len(points))
        row, column = np.concatenate([row, every]), np.concatenate([column, every])
        order = np.argsort(row * np.int64(len(points)) + column)
        row, column = row[order], column[order]
    return _flowing(_edges(*_nearest(points, points, row, column, max_num_neighbors), x), flow)


def nearest(x: Tensor, y: Tensor, batch_x: Tensor | None = None, batch_y: Tensor | None = None) -> Tensor:
    """Returns the point of y [M, F] nearest to each point of x [N, F] of the same batch entry: int64 [N].

    Raises:
        ValueError: an entry has points in x and none in y.
    """
    points, queries = _points(y), _points(x)
    labels = _labels(points, queries, batch_y, batch_x)
    of_points, of_queries = labels or (np.zeros(len(x), np.int64) for x in (points, queries))
    if not np.isin(of_queries, of_points).all():
        raise ValueError("Some batch indices occur in 'batch_x' that do not occur in 'batch_y'")
    _, column = geometry.nearest_of(points, queries, 1, labels)
    return torch.from_numpy(column).to(x.device)


def fps(
    src: Tensor,
    batch: Tensor | None = None,
    ratio: Tensor | float | None = None,
    random_start: bool = True,
    batch_size: int | None = None,
    ptr: Tensor | list[int] | None = None,
) -> Tensor:
    """Selects points of `src` [N, F] that lie far apart (Qi et al. 2017, PointNet++): a first one, then each time the
    point farthest from those before.

    Args:
        ratio: the share of the points of each batch entry that is chosen, rounded up; one number, or one for each
            entry. Default: .5.
        random_start: whether the first point of an entry is drawn; else it is the entry's first.
        ptr: [B + 1], entry b has the points from `ptr[b]` to `ptr[b + 1]`; instead of `batch`.

    Returns:
        int64, the chosen points, entry by entry.
    """
    at = _points(src.flatten(1) if src.dim() > 1 else src)
    if ptr is not None:
        sizes = torch.as_tensor(ptr).cpu().diff()
        batch = torch.arange(len(sizes)).repeat_interleave(sizes)
    label = np.zeros(len(at), np.int64) if batch is None else _label(batch, len(at))
    sizes = torch.from_numpy(np.bincount(label, minlength=batch_size or 0))
    # In the arithmetic of torch_cluster: .1 of 10 points is 1 in float32.
    share = torch.as_tensor(0.5 if ratio is None else ratio, dtype=src.dtype).cpu()
    counts = (sizes.float() * share).ceil().long().minimum(sizes).numpy()
    first = (
        (torch.rand(len(sizes), dtype=torch.float64) * sizes).long().numpy() if random_start else np.zeros_like(counts)
    )
    some = sizes.numpy() > 0
    rank = np.cumsum(some) - 1
    chosen = geometry.far_apart(at, rank[label], counts[some], first[some])
    return torch.from_numpy(chosen).to(src.device)


def grid_cluster(pos: Tensor, size: Tensor, start: Tensor | None = None, end: Tensor | None = None) -> Tensor:
    """Returns the number of the cell of a regular grid that each point of `pos` [N, F] is in, int64 [N].

    Args:
        size: [F], of a cell. start, end: [F], the ends of the grid. Default: the smallest and the largest positions.
    """
    pos = pos.view(len(pos), -1)
    if size.numel() != pos.shape[1]:
        raise ValueError(f"size must have {pos.shape[1]} numbers, one for each dimension; got {size.numel()}")
    start = pos.amin(0) if start is None else start
    end = pos.amax(0) if end is None else end
    cells = ((end - start) / size).long() + 1
    strides = torch.cat([cells.new_ones(1), cells.cumprod(0)[:-1]])
    return (((pos - start) / size).long() * strides).sum(1)


def graclus_cluster(row: Tensor, col: Tensor, weight: Tensor | None = None, num_nodes: int | None = None) -> Tensor:
    """Computes clusters of one or two nodes: each node in a random order, if it has no partner yet, takes the neighbor
    without one whose edge weighs most, or any (Dhillon et al. 2007, Graclus).

    Args:
        row, col: int64 [E], the ends of edges; both directions of each. weight: [E], not negative.

    Returns:
        int64 [N], the lower node of each cluster.
    """
    count = _num_nodes(row, col) if num_nodes is None else num_nodes
    others = (row != col).nonzero().squeeze(1)
    if weight is None:
        others = others[torch.randperm(len(others), device=others.device)]
    others = others[row[others].argsort(stable=True)]
    ptr = torch.searchsorted(row[others], torch.arange(count + 1, device=row.device))
    weights = None if weight is None else weight[others].double().cpu().contiguous()
    order = torch.randperm(count)
    return match(ptr.cpu(), col[others].cpu().contiguous(), order, weights).to(row.device)


def random_walk(
    row: Tensor,
    col: Tensor,
    start: Tensor,
    walk_length: int,
    p: float = 1,
    q: float = 1,
    coalesced: bool = True,
    num_nodes: int | None = None,
    return_edge_indices: bool = False,
) -> Any:
    """Samples random walks along edges from `row` to `col` (Grover and Leskovec 2016, node2vec); a walk stays at a node
    without edges.

    Args:
        start: int64 [W], the first nodes. walk_length: the number of steps.
        p: the larger, the less often a walk returns to the previous node. q: the larger, the closer it stays to that
        node. coalesced: whether the edges are sorted first; otherwise they must be sorted by row. return_edge_indices:
        also return the edges [W, walk_length] that were taken, among the sorted ones; -1 for none.

    Returns:
        int64 [W, walk_length + 1].
    """
    count = max(_num_nodes(row, col), int(start.max()) + 1 if start.numel() else 0) if num_nodes is None else num_nodes
    if coalesced:
        order = (row * count + col).argsort()
        row, col = row[order], col[order]
    ptr = torch.searchsorted(row, torch.arange(count + 1, device=row.device))
    nodes, edges = walks(ptr, col, start, walk_length, p, q)
    return (nodes, edges) if return_edge_indices else nodes


def walks(ptr: Tensor, col: Tensor, start: Tensor, length: int, p: float, q: float) -> tuple[Tensor, Tensor]:
    """Returns `random_walk` over edges sorted by row: the nodes [W, length + 1] and the edges [W, length]."""
    count = len(ptr) - 1
    row = torch.repeat_interleave(ptr.diff())
    known = (row * count + col).sort().values  # of all edges, to look up whether two nodes are neighbors
    before = at = start
    nodes = [start]
    edges: list[Tensor] = []
    for _ in range(length):
        edge = _step(ptr, col, at)
        if p != 1 or q != 1:
            edge = _accepted(ptr, col, known, before, at, edge, p, q, first=not edges)
        before = at
        at = torch.where(edge < 0, at, col[edge.clamp(min=0)]) if len(col) else at
        nodes.append(at)
        edges.append(edge)
    taken = torch.stack(edges, 1) if edges else start.new_empty(len(start), 0)
    return torch.stack(nodes, 1), taken


def _step(ptr: Tensor, col: Tensor, at: Tensor) -> Tensor:
    """An edge of each node with the same probability, -1 without any."""
    degree = ptr[at + 1] - ptr[at]
    place = (torch.rand(len(at), dtype=torch.float64, device=at.device) * degree).long()
    return torch.where(degree > 0, ptr[at] + place.minimum(degree - 1), -1)


def _accepted(
    ptr: Tensor, col: Tensor, known: Tensor, before: Tensor, at: Tensor, edge: Tensor, p: float, q: float, first: bool
) -> Tensor:
    """The edges of a step that weigh 1 / p back to the node before, 1 to a neighbor of it, and 1 / q to others: drawn
    again until they are accepted."""
    if first:
        return edge
    count = len(ptr) - 1
    largest = max(1 / p, 1.0, 1 / q)
    open_ = (edge >= 0).nonzero().squeeze(1)
    while len(open_):
        to, origin = col[edge[open_]], before[open_]
        key = to * count + origin
        place = torch.searchsorted(known, key).clamp(max=len(known) - 1)
        weight = torch.where(known[place] == key, 1.0, 1 / q)
        weight = torch.where(to == origin, 1 / p, weight)
        rejected = torch.rand(len(open_), dtype=torch.float64, device=at.device) * largest >= weight
        open_ = open_[rejected]
        edge = edge.index_copy(0, open_, _step(ptr, col, at[open_]))
    return edge


# ------------------------------------------------------------------------------------------------ arguments


def _points(x: Tensor, cosine: bool = False) -> np.ndarray:
    """Points [N, F] in float64; directions of length 1 for cosines."""
    at = x.detach().double().cpu()
    at = at[:, None] if at.dim() == 1 else at
    if at.dim() != 2:
        raise ValueError(f"points must be [N, F]; got {list(x.shape)}")
    if not at.isfinite().all():
        raise ValueError("points must be finite")
    points: np.ndarray = (torch.nn.functional.normalize(at, dim=1) if cosine else at).numpy()
    return points


def _label(batch: Tensor, count: int) -> Ints:
    if batch.shape != (count,):
        raise ValueError(f"a batch vector must have one number for each of {count} points; got {list(batch.shape)}")
    label: Ints = batch.cpu().numpy()
    return label


def _ranks(label: Ints) -> Ints:
    """Labels from 0 on without gaps."""
    numbers: Ints = np.unique(label, return_inverse=True)[1].reshape(-1)
    return numbers


def _labels(
    points: np.ndarray, queries: np.ndarray, of_points: Tensor | None, of_queries: Tensor | None
) -> tuple[Ints, Ints] | None:
    """The entries that points and queries are in. All are in entry 0 where one of the vectors is missing."""
    if of_points is None and of_queries is None:
        return None
    first, second = (
        np.zeros(len(x), np.int64) if batch is None else _label(batch, len(x))
        for x, batch in ((points, of_points), (queries, of_queries))
    )
    return first, second


def _num_nodes(row: Tensor, col: Tensor) -> int:
    return int(max(row.max(), col.max())) + 1 if row.numel() else 0


def _edges(row: Ints, column: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(np.stack([row, column]).astype(np.int64, copy=False)).to(like.device)


def _flowing(edges: Tensor, flow: str) -> Tensor:
    """Edges (point, neighbor) as edges that flow this way."""
    if flow not in _FLOWS:
        raise ValueError(f"flow must be {' or '.join(map(repr, _FLOWS))}; got {flow!r}")
    return edges.flip(0) if flow == "source_to_target" else edges


def _first(row: Ints, column: Ints, most: int) -> tuple[Ints, Ints]:
    """The first edges of each row, at most this many; rows are ascending."""
    is_first = _place(row) < most
    return row[is_first], column[is_first]


def _place(row: Ints) -> Ints:
    """The number of each edge among those of its row; rows are ascending."""
    place: Ints = np.arange(len(row)) - np.searchsorted(row, row)
    return place


def _nearest(points: np.ndarray, queries: np.ndarray, row: Ints, column: Ints, most: int) -> tuple[Ints, Ints]:
    """The nearest of the points of each query, at most this many, in the same order."""
    crowded = np.flatnonzero(np.bincount(row)[row] > most) if len(row) else row
    distance = np.square(points[column[crowded]] - queries[row[crowded]]).sum(1)
    crowded = crowded[np.lexsort((distance, row[crowded]))]
    kept = np.ones(len(row), bool)
    kept[crowded[_place(row[crowded]) >= most]] = False
    return row[kept], column[kept]
