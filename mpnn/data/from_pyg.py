"""Reads objects of PyTorch Geometric for the datasets; the package need not be installed."""

from typing import Any

import torch
from torch import Tensor

from mpnn.graphs.convert import edges_of_pyg


def one_graph(source: Any) -> Any:
    """The `Data` of a dataset of one graph, or `source` if it is a `Data`."""
    if isinstance(source, (list, tuple)) or hasattr(source, "indices"):  # torch_geometric.data.Dataset
        if len(source) != 1:
            raise ValueError(f"a dataset of one graph is needed; got {len(source)} graphs: pass one of them")
        source = source[0]
    if hasattr(source, "edge_types"):
        raise ValueError("data with one type of edges is needed; got HeteroData: pass data.to_homogeneous()")
    return source


def tensors(data: Any, *names: str) -> list[Tensor]:
    """These attributes of a `Data`."""
    values: list[Any] = [getattr(data, name, None) for name in names]
    for name, x in zip(names, values, strict=True):
        if not isinstance(x, Tensor):
            advice = "; torch_geometric.transforms.RandomNodeSplit adds masks" if name.endswith("_mask") else ""
            raise TypeError(f"{name} of {type(data).__name__} must be a tensor; got {type(x).__name__}{advice}")
    return values


def edges(data: Any) -> Tensor:
    """The edges of a `Data`, int64 [2, E], of `edge_index` or `adj_t`."""
    edge_index, _ = edges_of_pyg(data)
    return tensors(data, "edge_index")[0] if edge_index is None else edge_index


def is_one_hot(data: Any) -> bool:
    """Whether each row of `x` has a single 1 and zeros, if it has several columns."""
    x: Tensor | None = getattr(data, "x", None)
    if x is None or x.dim() != 2 or x.shape[1] < 2:
        return True
    return bool(((x == 0) | (x == 1)).all() & (x.sum(1) == 1).all())


def node_types(data: Any, one_hot: bool) -> Tensor:
    """The types of the nodes, int64 [N], of integer `x` [N, 1] or one-hot `x`; [N, F] of F columns of integers; zeros
    without `x`."""
    x: Tensor | None = getattr(data, "x", None)
    if x is None:
        return torch.zeros(data.num_nodes, dtype=torch.int64)
    if one_hot and x.dim() == 2 and x.shape[1] > 1:
        return x.argmax(1)
    if x.is_floating_point() or x.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"x must be one-hot, or integers [N, F], the types of nodes; got {x.dtype} {list(x.shape)}")
    return x[:, 0].long() if x.shape[1] == 1 else x.long()


def target(data: Any) -> int | Tensor:
    """The class of a graph, or its numbers, float32 [C]."""
    (y,) = tensors(data, "y")
    if y.is_floating_point():
        return y.float().reshape(-1)
    if y.numel() != 1:
        raise ValueError(
            f"y must be one class for each graph, int64 [1], or numbers, float [1, C]; got {y.dtype} {list(y.shape)}"
        )
    return int(y)
