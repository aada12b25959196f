"""Meshes of the globe: icosahedra whose triangles are divided again and again."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least
from mpnn.graph.runs import Ints


def icosphere(level: int) -> Graph:
    """Returns the multi-mesh of GraphCast (Lam et al. 2023, arXiv:2212.12794). Its nodes are `icosphere_points(level)`,
    and the edges of the meshes of all levels from 0 to `level`, in both directions, from coarse to fine. edge_attr
    [E, 3], float32, holds the vector from destination to source.

    Level 6 has 40,962 nodes and 327,660 edges.
    """
    points, edges = _multi_mesh(at_least("level", level, 0))
    src, dst = torch.from_numpy(np.concatenate([edges, edges[:, ::-1]]).T)
    at = torch.from_numpy(points)
    vectors = (at[src] - at[dst]).float()
    return Graph.from_edges(torch.stack([src, dst]), len(at), len(at), edge_attr=vectors, name=f"icosphere({level})")


def icosphere_points(level: int) -> Tensor:
    """Returns the nodes of `icosphere(level)` on the unit sphere, float32 [10 * 4 ** level + 2, 3]: those of all
    coarser levels first."""
    return torch.from_numpy(_multi_mesh(at_least("level", level, 0))[0]).float()


_OF_TRIANGLE = 300  # bytes at most, while the mesh of a level is made


@cache
def _multi_mesh(level: int) -> tuple[np.ndarray, Ints]:
    """Points [V, 3] and the edges of all levels [E, 2], each in one direction."""
    what = f"the 20 * 4 ** {level} triangles of level {level}"
    # Exponents above 40 say no more, and take time to compute.
    capacity.require(20 * 4 ** min(level, 40) * _OF_TRIANGLE, what, "use a lower level")
    points, faces = _icosahedron()
    edges = []
    for k in range(level + 1):
        pairs = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]], -1).reshape(-1, 2)  # three of each face
        unique, which = np.unique(pairs, axis=0, return_inverse=True)
        edges.append(unique)
        if k < level:
            a, b, c = faces.T
            ab, bc, ca = (len(points) + which.reshape(-1, 3)).T
            middles = points[unique].sum(1)
            points = np.concatenate([points, middles / np.linalg.norm(middles, axis=1, keepdims=True)])
            corners = ((a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca))
            faces = np.concatenate([np.stack(corner, 1) for corner in corners])
    return points, np.concatenate(edges)


def _icosahedron() -> tuple[np.ndarray, Ints]:
    """Its 12 points and 20 faces: three points that are neighbors of one another."""
    golden = (1 + 5**0.5) / 2
    signs = [(a, b) for a in (-1.0, 1.0) for b in (-golden, golden)]
    points = np.array([at for a, b in signs for at in ((0, a, b), (a, b, 0), (b, 0, a))])
    near = np.linalg.norm(points[:, None] - points, axis=-1) < 2.1  # its edges have length 2
    faces = [
        (i, j, k) for i in range(12) for j in range(i) for k in range(j) if near[i, j] and near[j, k] and near[i, k]
    ]
    return points / np.linalg.norm(points, axis=1, keepdims=True), np.array(faces)
