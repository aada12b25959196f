"""Graphs of points in space: neighbors within a radius, periodic cells, line graphs, farthest points."""

import itertools

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least, one_set
from mpnn.graph.runs import Ints


@torch.no_grad()
def radius(positions: Tensor, r: float, *, cell: Tensor | None = None, labels: Tensor | None = None) -> Graph:
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
        cell: [d, d], its rows are the vectors of the lattice, of any shape and smaller than r too.
        labels: integers [N]; points with different labels, as of different molecules of a batch, are no neighbors.

    Raises:
        ValueError: if positions are no matrix or not finite, or an argument does not fit.
    """
    at, label = _points("radius", positions, labels)
    if not (isinstance(r, (int, float)) and 0 < r < float("inf")):
        raise ValueError(f"r must be a positive number; got {r!r}")
    if cell is None:
        clouds = _apart(at, label, 2 * r)
        dst, src = _pairs(clouds, clouds, r)
        other = dst != src
        return _sorted(positions, dst[other], src[other], None, f"radius({r:g})")
    lattice = _lattice(cell, at)
    inverse = np.linalg.inv(lattice)
    wrap = np.floor(at @ inverse)
    inside = at - wrap @ lattice
    reach = r * np.linalg.norm(inverse, axis=0)  # of the radius, in units of the distance between lattice planes
    ranges = [range(-k, k + 1) for k in np.ceil(reach).astype(int)]
    shifts = np.array(list(itertools.product(*ranges)), np.float64)
    places = (at @ inverse - wrap)[None] + shifts[:, None]
    near = ((places >= -reach - 1e-9) & (places <= 1 + reach + 1e-9)).all(-1)
    which, node = near.nonzero()
    images = inside[node] + shifts[which] @ lattice
    of_image = None if label is None else label[node]
    dst, image = _pairs(_apart(inside, label, 2 * r), _apart(images, of_image, 2 * r), r)
    src = node[image]
    shift = shifts[which[image]] - wrap[src] + wrap[dst]
    other = (dst != src) | shift.any(1)
    return _sorted(positions, dst[other], src[other], shift[other], f"radius({r:g}), periodic")


def edge_vectors(graph: Graph, positions: Tensor, cell: Tensor | None = None) -> Tensor:
    """The vector from the destination of each edge to its source, [E, d]: `p_j - p_i`, plus `edge_attr @ cell` in a
    periodic graph of `radius`. It has gradients by positions and cell, of which forces and stresses are made.

    Args:
        positions: [N, d]. cell: [d, d], for a graph with shifts as edge_attr.
    """
    src, dst = graph.ends
    vectors = positions.index_select(0, src) - positions.index_select(0, dst)
    if cell is None:
        return vectors
    if graph.edge_attr is None:
        raise ValueError("the graph has no shifts: build it by graphs.radius(positions, r, cell=cell)")
    return vectors + graph.edge_attr.to(vectors.dtype) @ cell


def line_graph(graph: Graph, backtrack: bool = True) -> Graph:
    """The edges of `graph` as nodes, in the order of `edge_index`: j -> k receives from all edges i -> j.

    ::

        line_graph(from_edges([[0, 1, 1], [1, 2, 0]]))   ..#
                                                         #..
                                                         #..

    Args:
        backtrack: whether j -> i receives from i -> j. DimeNet's angles are without them.

    Raises:
        ValueError: if the graph has two sets of nodes.
    """
    one_set("line_graph", graph)
    (src, dst), csr, num_edges = graph.ends, graph.csr, graph.num_edges
    count = graph.degree()[src]
    receiver = torch.arange(num_edges, device=graph.device).repeat_interleave(count)
    first = (csr.ptr[src] - count.cumsum(0) + count).repeat_interleave(count)
    sender = first + torch.arange(len(receiver), device=graph.device)
    sender = sender if csr.edge_id is None else csr.edge_id[sender]
    if not backtrack:
        forward = src[sender] != dst[receiver]
        sender, receiver = sender[forward], receiver[forward]
    return Graph.from_edges(torch.stack([sender, receiver]), num_edges, num_edges, name="line graph")


@torch.no_grad()
def farthest(positions: Tensor, n: int) -> Tensor:
    """n points that lie far apart, int64 [n]: point 0, then each time the point farthest from those before (Qi et al.
    2017, PointNet++, section 3.2). Ties go to the lower index. O(N n).

    Raises:
        ValueError: if there are fewer than n points.
    """
    at, _ = _points("farthest", positions, None)
    if not 0 <= at_least("n", n, 0) <= len(at):
        raise ValueError(f"n must be at most the number of points, {len(at)}; got {n}")
    chosen, distance = np.zeros(n, np.int64), np.full(len(at), np.inf)
    for k in range(1, n):
        np.minimum(distance, np.square(at - at[chosen[k - 1]]).sum(1), out=distance)
        distance[chosen[k - 1]] = -1.0  # also where all others lie upon it
        chosen[k] = distance.argmax()
    return torch.from_numpy(chosen).to(positions.device)


def nearest(positions: Tensor, k: int, labels: Tensor | None) -> Ints:
    """The k nearest other points of each, [N, k], nearest first, ties by index; those of the same label."""
    from scipy.spatial import cKDTree

    at, label = _points("knn", positions, labels)
    fewest = len(at) if label is None else np.bincount(label).min(initial=len(at))
    if k and k >= fewest:
        raise ValueError(f"k must be less than the number of nodes of each label, at least {fewest}; got {k}")
    if not k or not len(at):
        return np.zeros((len(at), 0), np.int64)
    span = float(np.ptp(at, axis=0).max(initial=0.0)) * at.shape[1] ** 0.5
    clouds = _apart(at, label, 2 * span + 1)
    distance, index = cKDTree(clouds).query(clouds, min(k + 2, len(at)))
    own = index == np.arange(len(at))[:, None]
    distance = np.where(own, -1.0, distance)  # first
    order = np.lexsort((index, distance))
    found, distance = (np.take_along_axis(x, order, 1) for x in (index, distance))
    found = found[:, 1 : k + 1]
    tied = ~own.any(1) | (distance[:, k] == distance[:, -1]) & (distance.shape[1] > k + 1)
    for row in tied.nonzero()[0]:  # more points at the distance of the last one
        exact = np.linalg.norm(clouds - clouds[row], axis=1)
        exact[row] = np.inf
        found[row] = exact.argsort(kind="stable")[:k]
    return found


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
    if not isinstance(labels, Tensor) or labels.shape != positions.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be integers [{len(at)}], one for each point")
    return at, np.unique(labels.cpu().numpy(), return_inverse=True)[1]


def _lattice(cell: Tensor, at: np.ndarray) -> np.ndarray:
    d = at.shape[1]
    lattice: np.ndarray = torch.as_tensor(cell).detach().double().cpu().numpy()
    if lattice.shape != (d, d) or not np.isfinite(lattice).all() or not abs(np.linalg.det(lattice)) > 0:
        raise ValueError(f"cell must be an invertible matrix [{d}, {d}] of lattice vectors; got {lattice.tolist()}")
    return lattice


def _apart(at: np.ndarray, label: Ints | None, distance: float) -> np.ndarray:
    """Points with one more coordinate, which holds points of different labels apart."""
    return at if label is None else np.concatenate([at, label[:, None] * distance], 1)


def _pairs(dst: np.ndarray, src: np.ndarray, r: float) -> tuple[Ints, Ints]:
    """All pairs within r."""
    from scipy.spatial import cKDTree

    if not len(dst) or not len(src):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    pairs = cKDTree(dst).sparse_distance_matrix(cKDTree(src), r, output_type="ndarray")
    return pairs["i"], pairs["j"]


def _sorted(positions: Tensor, dst: Ints, src: Ints, shift: np.ndarray | None, name: str) -> Graph:
    keys = (src, dst) if shift is None else (*shift.T[::-1], src, dst)
    order = np.lexsort(keys)
    edges = torch.from_numpy(np.stack([src[order], dst[order]]).astype(np.int64)).to(positions.device)
    shifts = None if shift is None else torch.from_numpy(shift[order]).to(positions)
    return Graph.from_edges(edges, len(positions), len(positions), edge_attr=shifts, name=name)
