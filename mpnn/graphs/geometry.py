"""Graphs of points in space: neighbors within a radius, periodic cells, line graphs, farthest points."""

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import INTEGERS, at_least, check_form, one_set
from mpnn.graph.csr import narrow
from mpnn.graph.runs import Ints

_FEW_DIMENSIONS = 8  # up to which a tree is faster than all pairs
_SMALL_CLOUD = 256  # points of a label, on average, up to which all pairs are faster than a tree
_PAIRS_AT_ONCE = 1 << 22
_ROUNDING = 1e-12  # of a tree's distances, many times over
_A_LITTLE_MORE = 1 + 1e-12  # so that rounding in a tree loses no pair; what it adds is compared again


@torch.no_grad()
def radius(
    positions: Tensor,
    r: float,
    *,
    cell: Tensor | None = None,
    periodic: Sequence[bool] | None = None,
    labels: Tensor | None = None,
) -> Graph:
    """i receives from all other points within distance r. Edges are sorted by destination, then source.

    In a periodic cell, i also receives from images of points, its own included: an edge for each image, with the
    lattice shift as edge_attr, [E, d] in the dtype of `positions`. `edge_vectors` gives the vectors along edges.

    ::

        radius(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), 1.0)   .#..
                                                                  #...
                                                                  ...#
                                                                  ..#.

    Args:
        positions: floating point [N, d].
        r: a positive number. Distances are computed in float64 and compared by <=.
        cell: [d, d], its rows are the vectors of the lattice, of any shape and smaller than r too; or [G, d, d], one
            for each of G labels, which then are 0 to G - 1.
        periodic: d booleans, the vectors of the lattice along which the cell repeats; default: all.
        labels: integers [N]; points with different labels, as of different molecules of a batch, are not neighbors.

    Raises:
        ValueError: if positions are not a matrix or not finite, or an argument does not fit.
    """
    at, label = _points("radius", positions, labels)
    if not (isinstance(r, (int, float)) and 0 < r < float("inf")):
        raise ValueError(f"r must be a positive number; got {r!r}")
    if cell is None:
        if periodic is not None:
            raise ValueError("periodic says along which vectors of a cell it repeats: pass cell, too")
        dst, src = _pairs(at, at, r, label, label)
        return _sorted(positions, dst, src, None, f"radius({r:g})")
    lattices = _lattices(cell, at, None if labels is None else labels.cpu().numpy())
    repeats = _repeats(periodic, at.shape[1])
    if len(lattices) == 1:
        dst, src, shift = _periodic_pairs(at, r, lattices[0], repeats, label)
    else:
        assert label is not None
        of_label = [np.flatnonzero(label == k) for k in range(len(lattices))]
        pairs = [
            _periodic_pairs(at[own], r, *one, None)
            for own, one in zip(of_label, ((c, repeats) for c in lattices), strict=True)
        ]
        dst, src = (np.concatenate([own[x[k]] for own, x in zip(of_label, pairs, strict=True)]) for k in (0, 1))
        shift = np.concatenate([x[2] for x in pairs])
    return _sorted(positions, dst, src, shift, f"radius({r:g}), periodic")


def _periodic_pairs(
    at: np.ndarray, r: float, lattice: np.ndarray, repeats: np.ndarray, label: Ints | None
) -> tuple[Ints, Ints, np.ndarray]:
    """Destinations, sources and shifts of all pairs of a point and an image within r, but a point and itself."""
    inverse = np.linalg.inv(lattice)
    wrap = np.where(repeats, np.floor(at @ inverse), 0.0)
    inside = at - wrap @ lattice
    reach = r * np.linalg.norm(inverse, axis=0)  # of the radius, in units of the distance between lattice planes
    sides = [int(k) if again else 0 for k, again in zip(np.ceil(np.minimum(reach, 2**31)), repeats, strict=True)]
    count = prod(2 * k + 1 for k in sides)
    what = f"the {count:,} images of a cell within r={r:g}"
    capacity.require(24 * len(sides) * count * (len(at) + 1), what, "use a smaller r")
    ranges = [range(-k, k + 1) for k in sides]
    shifts = np.array(list(itertools.product(*ranges)), np.float64)
    places = (at @ inverse - wrap)[None] + shifts[:, None]
    near = ((places >= -reach - 1e-9) & (places <= 1 + reach + 1e-9) | ~repeats).all(-1)
    which, node = near.nonzero()
    images = inside[node] + shifts[which] @ lattice
    dst, image = _pairs(inside, images, r, label, None if label is None else label[node])
    src = node[image]
    shift = shifts[which[image]] - wrap[src] + wrap[dst]
    other = (dst != src) | shift.any(1)
    return dst[other], src[other], shift[other]


def edge_vectors(graph: Graph, positions: Tensor, cell: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """Returns the vector from the destination of each edge to its source, [E, d]: `p_j - p_i`, plus `edge_attr @ cell`
    in a periodic graph of `radius`. It is differentiable by positions and cell, so that forces and stresses can be
    computed.

    Args:
        positions: [N, d].
        cell: [d, d], for a graph with shifts as edge_attr; or [G, d, d], a cell for each graph of a batch.
        labels: int64 [N], the graph of each node, for cells of several graphs. Default: those of `graphs.batch`.

    Raises:
        ValueError: the graph was built in a cell and `cell` is missing, the graph has no shifts, or cells of several
            graphs do not fit it.
    """
    if cell is None and graph.periodic:
        raise ValueError(
            f"{graph} was built in a cell, and its edges lead to images of the points: pass the cell, as in "
            "edge_vectors(graph, positions, cell)"
        )
    src, dst = graph.ends
    vectors = positions.index_select(0, src) - positions.index_select(0, dst)
    if cell is None:
        return vectors
    if graph.edge_attr is None:
        raise ValueError("the graph has no shifts: build it by graphs.radius(positions, r, cell=cell)")
    shifts = graph.edge_attr.to(vectors.dtype)
    if cell.dim() == 2:
        return vectors + shifts @ cell
    if labels is None:
        labels = _graph_of_node(graph, len(cell))
    of_edge = cell.index_select(0, labels.index_select(0, dst))
    return vectors + (shifts[:, None] @ of_edge).squeeze(1)


def _graph_of_node(graph: Graph, count: int) -> Tensor:
    """The number of the graph of a batch that each node is in, int64 [N]."""
    sizes = graph.batch_sizes
    if sizes is None or len(sizes) != count:
        known = "one graph" if sizes is None else f"a batch of {len(sizes)} graphs"
        raise ValueError(
            f"cell has {count} cells, and the graph is {known}: pass labels, the number of the graph of each node, or "
            "join the graphs by graphs.batch"
        )
    sizes_of = torch.tensor(sizes, device=graph.device)
    return torch.arange(count, device=graph.device).repeat_interleave(sizes_of, output_size=graph.num_dst)


def line_graph(graph: Graph, backtrack: bool = True) -> Graph:
    """Returns the edges of `graph` as nodes, in the order of `edge_index`: j -> k receives from all edges i -> j.

    ::

        line_graph(from_edges([[0, 1, 1], [1, 2, 0]]))   ..#
                                                         #..
                                                         #..

    Args:
        backtrack: whether j -> i receives from i -> j. DimeNet's angles are without them. In a periodic graph, where
            every edge with the shift s as edge_attr has a reverse with the shift -s, only that reverse counts as i
            -> j: an edge from another image of i makes an angle.

    Raises:
        ValueError: if the graph has two sets of nodes.
    """
    one_set("line_graph", graph)
    (src, dst), csr, num_edges = graph.ends.unbind(), graph.csr, graph.num_edges
    count = csr.ptr.diff().index_select(0, src)
    total = count.cumsum(0)
    pairs = int(total[-1]) if num_edges else 0
    kind = torch.int32 if max(pairs, num_edges, graph.num_src) < 2**31 else torch.int64  # half the memory to pass
    receiver = torch.repeat_interleave(count.to(kind), output_size=pairs)
    first = (csr.ptr.index_select(0, src) - total + count).to(kind)
    place = first.index_select(0, receiver).add_(torch.arange(pairs, dtype=kind, device=graph.device))
    sender = place if csr.edge_id is None else csr.edge_id.to(kind).index_select(0, place)
    if not backtrack:
        forward = csr.columns.to(kind).index_select(0, place) != dst.to(kind).index_select(0, receiver)
        if (shift := graph.edge_attr) is not None and _are_shifts(graph, shift):
            forward |= (shift.index_select(0, sender) != -shift.index_select(0, receiver)).any(1)
        kept = forward.nonzero().squeeze(1)
        sender, receiver = sender.index_select(0, kept), receiver.index_select(0, kept)
    # These ends are edges of a graph: nothing is validated again.
    stored = narrow(torch.stack([sender, receiver]), num_edges, num_edges)
    return Graph(num_edges, num_edges, edges=stored, name="line graph", device=graph.device)


def _are_shifts(graph: Graph, attr: Tensor) -> bool:
    """Whether each edge has a reverse of the negative attribute, as edges to images in a periodic cell have."""
    if attr.dim() != 2 or not attr.is_floating_point():
        return False
    src, dst = graph.ends.cpu().numpy()
    shift = attr.detach().double().cpu().numpy() + 0.0  # no negative zeros
    edges = np.concatenate([src[:, None], dst[:, None], shift], 1)
    back = np.concatenate([dst[:, None], src[:, None], 0.0 - shift], 1)
    edges, back = (x[np.lexsort(x.T)] for x in (edges, back))
    return np.array_equal(edges, back)


@torch.no_grad()
def farthest(positions: Tensor, n: int, labels: Tensor | None = None) -> Tensor:
    """Selects n points that lie far apart, int64 [n]: point 0, then each time the point farthest from those before (Qi
    et al. 2017, PointNet++, section 3.2). Ties go to the lower index. O(N n).

    Args:
        positions: floating point [N, d].
        labels: integers [N]; then n points of each label, from its first point on: int64 [labels * n], label by label.

    Raises:
        ValueError: if there are fewer than n points (of a label).
    """
    at, label = _points("farthest", positions, labels)
    sizes = np.array([len(at)]) if label is None else np.bincount(label)
    if not 0 <= at_least("n", n, 0) <= sizes.min(initial=len(at)):
        of = "" if label is None else " of each label"
        raise ValueError(f"n must be at most the number of points{of}, {sizes.min(initial=len(at))}; got {n}")
    counts = np.full(len(sizes), n)
    return torch.from_numpy(far_apart(at, label, counts, np.zeros_like(counts))).to(positions.device)


def far_apart(at: np.ndarray, label: Ints | None, counts: Ints, first: Ints) -> Ints:
    """`farthest` of each label, label by label: `counts[g]` points of label g, beginning with its point `first[g]`."""
    chosen = np.zeros((len(counts), int(counts.max(initial=0))), np.int64)
    if not chosen.size:
        return chosen.ravel()
    for nodes, cloud in _clouds(at, label, torch.float64):
        rows = np.arange(len(nodes))
        places = cloud.numpy()
        of_label = np.zeros(1, np.int64) if label is None else label[nodes[:, 0]]
        last = first[of_label]
        along = [np.ascontiguousarray(places[..., axis]) for axis in range(at.shape[1])]
        distance = np.where(nodes < 0, -1.0, np.inf)
        for k in range(int(counts[of_label].max())):
            chosen[of_label, k] = nodes[rows, last]
            square = np.zeros_like(distance)
            for x in along:
                square += np.square(x - x[rows, last][:, None])
            np.minimum(distance, square, out=distance)
            distance[rows, last] = -1.0  # also where all others lie upon it
            last = distance.argmax(1)
    return chosen[np.arange(chosen.shape[1]) < counts[:, None]]


def nearest(positions: Tensor, k: int, labels: Tensor | None) -> Ints:
    """The k nearest other points of each, [N, k], nearest first, ties by index; those of the same label."""
    at, label = _points("knn", positions, labels)
    fewest = len(at) if label is None else np.bincount(label).min(initial=len(at))
    if k and k >= fewest:
        of_label = "" if label is None else " of each label, at least"
        raise ValueError(f"k must be less than the number of nodes{of_label or ','} {fewest}; got {k}")
    if not k or not len(at):
        return np.zeros((len(at), 0), np.int64)
    if at.shape[1] <= _FEW_DIMENSIONS and not _has_small_clouds(label):
        return _nearest_by_tree(at, k, label)
    return _nearest_of_all(at, k, label)


def nearest_of(points: np.ndarray, queries: np.ndarray, k: int, labels: tuple[Ints, Ints] | None) -> tuple[Ints, Ints]:
    """The numbers of queries, and of the k nearest points of each, nearest first; all points of its label if they are
    fewer. Equally near points come in any order. `labels` are those of the points and of the queries."""
    if not k or not len(points) or not len(queries):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if points.shape[1] <= _FEW_DIMENSIONS:
        return _nearest_of_tree(points, queries, k, labels)
    if labels is None:
        return _nearest_by_products(points, queries, k)
    pairs = []
    for label in np.unique(labels[1]):
        own, asking = ((x == label).nonzero()[0] for x in labels)
        row, column = _nearest_by_products(points[own], queries[asking], k)
        pairs.append((asking[row], own[column]))
    row, column = (np.concatenate(part) for part in zip(*pairs, strict=True))
    order = np.argsort(row, kind="stable")
    return row[order], column[order]


def _nearest_of_tree(
    points: np.ndarray, queries: np.ndarray, k: int, labels: tuple[Ints, Ints] | None
) -> tuple[Ints, Ints]:
    from scipy.spatial import cKDTree

    of_points, of_queries = (None, None) if labels is None else labels
    both = np.concatenate([points, queries])
    apart = 2 * float(np.ptp(both, axis=0).max()) * points.shape[1] ** 0.5 + 1
    tree = cKDTree(_apart(points, of_points, apart))
    _, index = tree.query(_apart(queries, of_queries, apart), range(1, min(k, len(points)) + 1))
    if of_points is None or of_queries is None:
        row = np.arange(len(queries)).repeat(index.shape[1])
        return row, index.ravel()
    row, place = (of_points[index] == of_queries[:, None]).nonzero()
    return row, index[row, place]


def _nearest_by_products(points: np.ndarray, queries: np.ndarray, k: int) -> tuple[Ints, Ints]:
    """`nearest_of` from squared distances by a product, around the mean of the points."""
    middle = points.mean(0) if len(points) else 0.0
    of_points, of_queries = (torch.from_numpy(x - middle) for x in (points, queries))
    squares = of_points.square().sum(1)
    k = min(k, len(points))
    nearest = [
        torch.addmm(squares, part, of_points.mT, alpha=-2).topk(k, largest=False).indices
        for part in of_queries.split(max(1, _PAIRS_AT_ONCE // max(len(points), 1)))
    ]
    return np.arange(len(queries)).repeat(k), torch.cat(nearest).numpy().ravel()


def nearer_than(
    points: np.ndarray, queries: np.ndarray, r: float, labels: tuple[Ints, Ints] | None
) -> tuple[Ints, Ints]:
    """The numbers of queries and of all points that are nearer than r and have the same label, in order. If `queries`
    is `points`, no pair of a point and itself."""
    if not r > 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    of_points, of_queries = (None, None) if labels is None else labels
    row, column = _pairs(queries, points, float(np.nextafter(r, 0.0)), of_queries, of_points)
    order = np.argsort(row * np.int64(len(points)) + column)
    return row[order], column[order]


def _nearest_by_tree(at: np.ndarray, k: int, label: Ints | None) -> Ints:
    from scipy.spatial import cKDTree

    span = float(np.ptp(at, axis=0).max(initial=0.0)) * at.shape[1] ** 0.5
    clouds = _apart(at, label, 2 * span + 1)
    neighbors = np.empty((len(at), k), np.int64)
    rows = np.arange(len(at))
    if len(crowded := _in_crowds(clouds, k)):
        neighbors[crowded] = _at_the_same_place(clouds, crowded, k)
        rows = np.delete(rows, crowded)
        if not len(rows):
            return neighbors
    tree = cKDTree(clouds)
    distance, index = tree.query(clouds[rows], min(k + 2, len(at)))
    # Of points whose distances differ by more than rounding, the tree's order is the order.
    is_clear = (index[:, 0] == rows) & (np.diff(distance, axis=1) > _ROUNDING * distance[:, -1:]).all(1)
    neighbors[rows[is_clear]] = index[is_clear, 1 : k + 1]
    if is_clear.all():
        return neighbors
    rows = rows[~is_clear]
    index = index[~is_clear]
    neighbors[rows], (tied, radii) = _ranked(at, label, rows, index, k, len(at))
    if len(upon := tied[radii <= 0]):
        neighbors[upon] = _at_the_same_place(clouds, upon, k)
    for rows, columns in _within(tree, clouds, tied[radii > 0], radii[radii > 0] * _A_LITTLE_MORE):
        neighbors[rows], _ = _ranked(at, label, rows, columns, k)
    return neighbors


def _in_crowds(at: np.ndarray, k: int) -> Ints:
    """The points at whose place there are k others or more."""
    along = np.sort(at[:, 0])
    if len(at) <= k or not (along[k:] == along[:-k]).any():  # quick to see where points are apart
        return np.zeros(0, np.int64)
    order = np.lexsort(at.T)
    starts = np.flatnonzero(np.append(True, (at[order[1:]] != at[order[:-1]]).any(1)))
    sizes = np.diff(np.append(starts, len(at)))
    return np.sort(order[np.repeat(sizes > k, sizes)])


def _at_the_same_place(at: np.ndarray, rows: Ints, k: int) -> Ints:
    """The first k others at the place of each of these points, [rows, k]; there are as many."""
    order = np.lexsort(at.T)
    starts = np.append(True, (at[order[1:]] != at[order[:-1]]).any(1))
    first = np.empty_like(order)
    first[order] = np.flatnonzero(starts)[np.cumsum(starts) - 1]
    first = first[rows]
    same = order[first[:, None] + np.arange(k)]
    after = order[np.minimum(first + k, len(order) - 1)]
    is_before = same < rows[:, None]
    return np.where(is_before, same, np.concatenate([same[:, 1:], after[:, None]], 1))


def _nearest_of_all(at: np.ndarray, k: int, label: Ints | None) -> Ints:
    """From squared distances by one product in float32, of which a few more than k are computed exactly."""
    neighbors = np.empty((len(at), k), np.int64)
    for nodes, cloud in _clouds(at - at.mean(0), label):
        squares = cloud.square().sum(-1)
        missing = torch.from_numpy(nodes < 0)
        size = nodes.shape[1]
        error = (cloud.shape[2] + 4) * 2.0**-23 * float(squares.max())
        candidates = min(k + 1 + max(4, k // 4), size)
        for rows in torch.arange(size).split(max(1, _PAIRS_AT_ONCE // nodes.size)):
            distance = torch.baddbmm(squares[:, None], cloud[:, rows], cloud.mT, alpha=-2)
            distance.masked_fill_(missing[:, None], torch.inf)
            value, column = distance.topk(candidates, dim=2, largest=False)
            apart = (value[..., 1 : k + 2].diff(dim=2, prepend=value[..., :1]) > 2 * error).all(2).numpy()
            for own, row, index, clear in zip(nodes, nodes[:, rows], column.numpy(), apart, strict=True):
                nearest = own[index[:, : k + 1]]
                exists = row >= 0
                clear = clear & exists & (nearest[:, 0] == row)
                neighbors[row[clear]] = nearest[clear, 1:]
                close = exists & ~clear
                neighbors[row[close]], (tied, _) = _ranked(at, None, row[close], own[index[close]], k, size, error)
                for some in np.array_split(tied, -(-len(tied) * size * at.shape[1] // _PAIRS_AT_ONCE) or 1):
                    neighbors[some] = _nearest_exactly(at, some, own[own >= 0], k)
    return neighbors


def _nearest_exactly(at: np.ndarray, rows: Ints, nodes: Ints, k: int) -> Ints:
    """The k nearest others of `rows` among ascending `nodes`, [rows, k], from all distances."""
    distance = _lengths(at[nodes] - at[rows][:, None])
    distance[nodes == rows[:, None]] = np.inf
    return nodes[smallest(torch.from_numpy(distance), k).numpy()]


def smallest(x: Tensor, k: int) -> Tensor:
    """The columns of the k smallest values of each row, [rows, k], in ascending order. Ties go to the first column."""
    if not 0 < k <= x.shape[1] // 8:
        return x.sort(dim=1, stable=True).indices[:, :k]
    # Equals a stable sort, but sorts only the values up to the k-th smallest.
    row, column = (x <= x.topk(k, dim=1, largest=False).values[:, -1:]).nonzero(as_tuple=True)
    order = x[row, column].argsort(stable=True)
    order = order[row[order].argsort(stable=True)]
    first = torch.searchsorted(row, torch.arange(len(x), device=x.device))
    return column[order[first[:, None] + torch.arange(k, device=x.device)]]


def _ranked(
    at: np.ndarray, label: Ints | None, rows: Ints, index: Ints, k: int, size: int = 0, error: float = 0.0
) -> tuple[Ints, tuple[Ints, np.ndarray]]:
    """The k nearest others of each row among its candidates `index` [rows, m], -1 for none; and those rows, with the
    distance of the k-th, for which one of the `size` points that is not a candidate could be as near: the candidates
    are nearest by squares of distances that are off by at most `error`."""
    distance = _lengths(at[index] - at[rows][:, None])
    distance[index < 0] = np.inf
    if label is not None:
        distance[label[index] != label[rows][:, None]] = np.inf
    own = index == rows[:, None]
    distance[own] = -1.0
    order = distance.argsort(1)
    index, distance = (np.take_along_axis(x, order, 1) for x in (index, distance))
    if len(equal := (distance[:, 1:] == distance[:, :-1]).any(1).nonzero()[0]):
        again = np.lexsort((index[equal], distance[equal]))
        index[equal] = np.take_along_axis(index[equal], again, 1)
    others = own.any(1).astype(np.int64)[:, None] + np.arange(k)
    neighbors = np.take_along_axis(index, np.minimum(others, index.shape[1] - 1), 1)
    if index.shape[1] >= size:
        return neighbors, (rows[:0], distance[:0, 0])
    last = distance[:, k]
    tied = (distance[:, -1] ** 2 <= last**2 * _A_LITTLE_MORE + 2 * error) | ~own.any(1)
    return neighbors, (rows[tied], last[tied])


def _within(tree: Any, at: np.ndarray, rows: Ints, radii: np.ndarray) -> Iterator[tuple[Ints, Ints]]:
    """Some of these rows, and the points within their radii, [rows, m], -1 after the last."""
    if not len(rows):
        return
    counts = tree.query_ball_point(at[rows], radii, return_length=True)
    by_count = np.argsort(counts, kind="stable")
    for some in _in_groups(counts[by_count], _PAIRS_AT_ONCE):
        own = by_count[some]
        near = tree.query_ball_point(at[rows[own]], radii[own], return_sorted=False)
        columns = np.full((len(own), counts[own].max()), -1)
        columns[np.arange(columns.shape[1]) < counts[own][:, None]] = np.concatenate(near)
        yield rows[own], columns


def _in_groups(sizes: Ints, most: int) -> Iterator[slice]:
    """Slices of consecutive elements whose sizes add up to at most `most`, or of one element."""
    begin = 0
    total = np.cumsum(sizes)
    while begin < len(sizes):
        before = total[begin - 1] if begin else 0
        end = max(int(np.searchsorted(total, before + most, side="right")), begin + 1)
        yield slice(begin, end)
        begin = end


def _clouds(at: np.ndarray, label: Ints | None, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Ints, Tensor]]:
    """The points of each label, labels of about the same size together: their numbers [G, n], -1 after the last, and
    their positions [G, n, d]."""
    order = np.arange(len(at)) if label is None else np.argsort(label, kind="stable")
    sizes = np.array([len(at)]) if label is None else np.bincount(label)
    if (sizes == sizes[:1]).all() and len(at) * sizes[0] <= _PAIRS_AT_ONCE:
        yield (nodes := order.reshape(-1, sizes[0])), torch.from_numpy(at[nodes]).to(dtype)
        return
    start = np.cumsum(sizes) - sizes
    by_size = np.argsort(-sizes, kind="stable")
    while len(by_size):
        size = int(sizes[by_size[0]])
        many = int((sizes[by_size] > size // 2).sum())
        together = by_size[: min(many, max(1, _PAIRS_AT_ONCE // max(size * size, 1)))]
        by_size = by_size[len(together) :]
        column = np.arange(size)
        index = start[together][:, None] + column
        exists = column < sizes[together][:, None]
        nodes = np.where(exists, order[np.minimum(index, len(order) - 1)], -1)
        yield nodes, torch.from_numpy(at[nodes]).to(dtype)


def _points(name: str, positions: Tensor, labels: Tensor | None) -> tuple[np.ndarray, Ints | None]:
    """Positions in float64, and the rank of each point's label."""
    is_matrix = isinstance(positions, Tensor) and positions.dim() == 2 and positions.is_floating_point()
    if not is_matrix or not positions.shape[1]:
        shown = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"{name} needs floating-point positions [N, d]; got {shown}")
    at = positions.detach().double().cpu().numpy()
    if not np.isfinite(at).all():
        bad = int((~np.isfinite(at)).any(1).nonzero()[0][0])
        raise ValueError(f"{name} needs finite positions; those of point {bad} are not all finite")
    if labels is None:
        return at, None
    expected = f"labels must be integers [{len(at)}], one for each point"
    check_form(expected, labels, (*INTEGERS, "bool"), positions.shape[:1])
    label = labels.cpu().numpy()
    if (label[1:] >= label[:-1]).all():  # as batches have them: no sort is needed
        return at, np.append(0, np.cumsum(label[1:] != label[:-1]))[: len(label)]
    return at, np.unique(label, return_inverse=True)[1]


def _lattices(cell: Tensor, at: np.ndarray, labels: Ints | None) -> np.ndarray:
    """The cells, [1, d, d] or [G, d, d] for labels from 0 to G - 1."""
    d = at.shape[1]
    lattices: np.ndarray = torch.as_tensor(cell).detach().double().cpu().numpy()
    is_matrix = lattices.ndim in (2, 3) and lattices.shape[-2:] == (d, d)
    if not is_matrix or not np.isfinite(lattices).all() or not (np.abs(np.linalg.det(lattices)) > 0).all():
        raise ValueError(f"cell must be an invertible matrix [{d}, {d}] of lattice vectors; got {lattices.tolist()}")
    if lattices.ndim == 2:
        return lattices[None]
    if labels is None or not np.array_equal(np.unique(labels), np.arange(len(lattices))):
        raise ValueError(
            f"cell has {len(lattices)} cells: pass labels from 0 to {len(lattices) - 1}, one for each point"
        )
    return lattices


def _repeats(periodic: Sequence[bool] | None, d: int) -> np.ndarray:
    if periodic is None:
        return np.ones(d, bool)
    repeats = [bool(one) for one in periodic]
    if len(repeats) != d:
        raise ValueError(f"periodic must hold {d} booleans, one for each vector of the cell; got {list(periodic)}")
    return np.array(repeats)


def _apart(at: np.ndarray, label: Ints | None, distance: float) -> np.ndarray:
    """Points with one more coordinate, which holds points of different labels apart."""
    return at if label is None else np.concatenate([at, label[:, None] * distance], 1)


def _has_small_clouds(label: Ints | None) -> bool:
    """Whether all pairs of points of one label are so few that no tree is needed."""
    return label is not None and np.square(np.bincount(label)).sum() <= _SMALL_CLOUD * len(label)


def _pairs(
    dst: np.ndarray, src: np.ndarray, r: float, dst_label: Ints | None, src_label: Ints | None
) -> tuple[Ints, Ints]:
    """All pairs of one label within r. If `dst` is `src`, no pair of a point and itself."""
    from scipy.spatial import cKDTree

    if not len(dst) or not len(src):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if dst is src and _has_small_clouds(dst_label):
        of_clouds = [_pairs_of_clouds(nodes, cloud, r) for nodes, cloud in _clouds(dst, dst_label, torch.float64)]
        i, j, near = (np.concatenate(part) for part in zip(*of_clouds, strict=True))
    else:
        trees = [cKDTree(_apart(x, label, 2 * r)) for x, label in ((dst, dst_label), (src, src_label))]
        pairs = trees[0].sparse_distance_matrix(trees[1], r * _A_LITTLE_MORE, output_type="ndarray")
        pairs = pairs[pairs["i"] != pairs["j"]] if dst is src else pairs
        i = pairs["i"]
        j = pairs["j"]
        near = pairs["v"] <= r / _A_LITTLE_MORE
    if not near.all():
        unsure = np.flatnonzero(~near)
        near[unsure] = _lengths(dst[i[unsure]] - src[j[unsure]]) <= r
        i = i[near]
        j = j[near]
    return i, j


def _pairs_of_clouds(nodes: Ints, cloud: Tensor, r: float) -> tuple[Ints, Ints, np.ndarray]:
    """Destinations, sources, and whether they are within r for sure, but for rounding."""
    off = r * 1e-6
    distance = torch.cdist(cloud, cloud, compute_mode="donot_use_mm_for_euclid_dist")  # a product loses far points
    near = distance <= r + off
    unsure = bool((near != (distance <= r - off)).any())
    if (nodes < 0).any():
        exists = torch.from_numpy(nodes >= 0)
        near &= exists[:, None] & exists[..., None]
    near.diagonal(dim1=1, dim2=2).fill_(False)
    flags = near.numpy().reshape(nodes.size, -1)
    all_nodes = nodes.ravel()
    size = nodes.shape[1]
    place = np.flatnonzero(flags)
    count = np.count_nonzero(flags, axis=1)
    every = np.arange(nodes.size)
    source = place + np.repeat((every // size - every) * size, count)  # its number among all nodes
    src = source if np.array_equal(all_nodes, every) else all_nodes[source]
    sure = distance.numpy().ravel()[place] <= r - off if unsure else np.ones(len(place), bool)
    return np.repeat(all_nodes, count), src, sure


def _lengths(x: np.ndarray) -> np.ndarray:
    """The lengths of vectors x [..., d]."""
    return np.sqrt(np.square(x).sum(-1))


def _sorted(positions: Tensor, dst: Ints, src: Ints, shift: np.ndarray | None, name: str) -> Graph:
    key = dst * np.int64(len(positions)) + src
    if shift is not None or not (key[1:] > key[:-1]).all():
        order = np.argsort(key) if shift is None else np.lexsort((*shift.T[::-1], key))
        dst = dst[order]
        src = src[order]
        shift = None if shift is None else shift[order]
    edges = np.empty((2, len(src)), np.int64)
    edges[0], edges[1] = src, dst
    stored = narrow(torch.from_numpy(edges).to(positions.device), len(positions), len(positions))
    shifts = None if shift is None else torch.from_numpy(shift).to(positions)
    # These ends are points: nothing is validated again.
    size = len(positions)
    periodic = shifts is not None
    return Graph(size, size, edges=stored, edge_attr=shifts, name=name, periodic=periodic, device=positions.device)
