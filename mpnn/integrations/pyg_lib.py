"""The functions of points, walks and samples that PyTorch Geometric asks of pyg_lib, which is compiled for each version
of torch.

    python -m mpnn.shim pyg_lib script.py      runs knn_graph, radius_graph, fps, nearest, graclus, voxel_grid,
                                               DynamicEdgeConv, XConv, GravNetConv, Node2Vec, NeighborLoader and
                                               LinkNeighborLoader without a compiler

Before version 2.8, PyTorch Geometric asks torch_cluster for the functions of points. Importing this module also defines
the functions in `torch.ops.pyg`, where they are missing. What is drawn comes from torch's generator.
"""

from typing import Any

import torch
from torch import Tensor

from mpnn.integrations import torch_cluster
from mpnn.integrations.pyg_sampler import (
    by_text,
    hetero_neighbor_sample as hetero_neighbor_sample,
    neighbor_sample as neighbor_sample,
)
from mpnn.integrations.torch_cluster import grid_cluster as grid_cluster, walks
from mpnn.kernels.rows import match


def knn(
    x: Tensor,
    y: Tensor,
    k: int = 1,
    ptr_x: Tensor | None = None,
    ptr_y: Tensor | None = None,
    cosine: bool = False,
    num_workers: int = 1,
) -> Tensor:
    """Returns `torch_cluster.knn` of batch entries that end where `ptr_x` [B + 1] and `ptr_y` say."""
    return torch_cluster.knn(x, y, k, _batch(ptr_x), _batch(ptr_y), cosine)


def radius(
    x: Tensor,
    y: Tensor,
    r: float = 1.0,
    ptr_x: Tensor | None = None,
    ptr_y: Tensor | None = None,
    max_num_neighbors: int = 32,
    num_workers: int = 1,
    ignore_same_index: bool = False,
) -> Tensor:
    """Returns `torch_cluster.radius` of batch entries that end where `ptr_x` [B + 1] and `ptr_y` say.
    `ignore_same_index`: no pair of equal numbers."""
    if x is y:
        options = {"max_num_neighbors": max_num_neighbors, "flow": "target_to_source"}
        return torch_cluster.radius_graph(x, r, _batch(ptr_x), not ignore_same_index, **options)  # type: ignore[arg-type]
    most = max_num_neighbors + ignore_same_index
    edges = torch_cluster.radius(x, y, r, _batch(ptr_x), _batch(ptr_y), most)
    return edges[:, edges[0] != edges[1]] if ignore_same_index else edges


def nearest(x: Tensor, y: Tensor, ptr_x: Tensor | None = None, ptr_y: Tensor | None = None) -> Tensor:
    """Returns `torch_cluster.nearest` of batch entries that end where `ptr_x` [B + 1] and `ptr_y` say."""
    return torch_cluster.nearest(x, y, _batch(ptr_x), _batch(ptr_y))


def fps(src: Tensor, ptr: Tensor, ratio: float = 0.5, random_start: bool = True) -> Tensor:
    """Returns `torch_cluster.fps` of batch entries that end where `ptr` [B + 1] says."""
    return torch_cluster.fps(src, ratio=ratio, random_start=random_start, ptr=ptr)


def graclus_cluster(rowptr: Tensor, col: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns `torch_cluster.graclus_cluster` of edges sorted by row: those of node u are `col[rowptr[u]:rowptr[u +
    1]]`."""
    weights = None if weight is None else weight.double().cpu().contiguous()
    order = torch.randperm(len(rowptr) - 1)
    return match(rowptr.cpu().contiguous(), col.cpu().contiguous(), order, weights).to(col.device)


def random_walk(rowptr: Tensor, col: Tensor, seed: Tensor, walk_length: int, p: float, q: float) -> Tensor:
    """Returns `torch_cluster.random_walk` along edges sorted by row, from the nodes `seed`."""
    return walks(rowptr, col, seed, walk_length, p, q)[0]


def _batch(ptr: Tensor | None) -> Tensor | None:
    return None if ptr is None else torch.repeat_interleave(ptr.diff())


def _knn(x: Tensor, y: Tensor, ptr_x: Tensor | None, ptr_y: Tensor | None, k: int, *options: Any) -> Tensor:
    return knn(x, y, k, ptr_x, ptr_y, *options)


def _radius(x: Tensor, y: Tensor, ptr_x: Tensor | None, ptr_y: Tensor | None, r: float, *options: Any) -> Tensor:
    return radius(x, y, r, ptr_x, ptr_y, *options)


# Their arguments come in another order than those of the functions in Python.
_OPERATORS = {
    "knn": _knn,
    "radius": _radius,
    **{f.__name__: f for f in (nearest, fps, graclus_cluster, grid_cluster, random_walk, neighbor_sample)},
    "hetero_neighbor_sample": by_text,
}
for _name, _function in _OPERATORS.items():
    if not hasattr(torch.ops.pyg, _name):
        setattr(torch.ops.pyg, _name, _function)
