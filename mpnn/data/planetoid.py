"""Cora and Citeseer, the citation graphs of the GCN and GAT papers, with the fixed Planetoid split."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.from_pyg import one_graph, tensors
from mpnn.data.links import both_directions
from mpnn.data.locate import locate
from mpnn.data.pickles import load_plain
from mpnn.data.read import read_bytes

_VALIDATION_NODES = 500


@dataclass(frozen=True, eq=False)
class NodeClassification:
    """A graph for node classification.

    Args:
        x: features, float32 `[N, F]`.
        edge_index: int64 `[2, E]`; `edge_index[0]` is src, `edge_index[1]` is dst; both directions of
            every link, no duplicates, no self-loops, ordered by dst, then src.
        y: classes, int64 `[N]`.
        train_mask, val_mask, test_mask: bool `[N]`, disjoint.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor

    @classmethod
    def from_pyg(cls, source: Any, split: int = 0) -> NodeClassification:
        """From PyTorch Geometric: a `Data`, or a dataset of one graph. Edges stay as they are there.

        Args:
            source: with `x`, `y` and the masks `train_mask`, `val_mask`, `test_mask`.
            split: the column of masks [N, splits].

        Raises:
            TypeError, ValueError: if `source` holds no graph or several, or lacks one of these tensors.
        """
        data = one_graph(source)
        x, edge_index, y, train, val, test = tensors(
            data, "x", "edge_index", "y", "train_mask", "val_mask", "test_mask"
        )
        masks = [mask.bool() if mask.dim() == 1 else mask[:, split].bool() for mask in (train, val, test)]
        if y.is_floating_point() or y.dim() > 2 or (y.dim() == 2 and y.shape[1] > 1):
            raise ValueError(f"y must hold one class for each node, int64 [N]; got {y.dtype} {list(y.shape)}")
        return cls(x.float(), edge_index, y.view(-1).long(), *masks)

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    @property
    def num_classes(self) -> int:
        return int(self.y.max()) + 1


def cora() -> NodeClassification:
    """Cora: 2,708 papers, 1,433 words (0 or 1 each), 7 topics, 5,278 links, split 140 / 500 / 1000.

    The file lists 10,858 neighbors: every link in both directions, and 151 links twice. Duplicates and self-loops
    (Cora has none) are dropped, which leaves 10,556 directed edges.

    Raises:
        DatasetNotFound, DamagedFile, UnsafePickle: see `mpnn.data.errors`.
    """
    return read_planetoid(locate("cora"), "cora")


def citeseer() -> NodeClassification:
    """Citeseer: 3,327 papers, 3,703 words (0 or 1 each), 6 topics, 4,552 links, split 120 / 500 / 1000.

    15 papers have neither words nor a topic nor links: they have features of zeros and class 0, and are in no part of
    the split. Duplicates and 124 self-loops are dropped, which leaves 9,104 directed edges.

    Raises:
        DatasetNotFound, DamagedFile, UnsafePickle: see `mpnn.data.errors`.
    """
    return read_planetoid(locate("citeseer"), "citeseer")


def read_planetoid(folder: Path, name: str) -> NodeClassification:
    """Reads the files `ind.<name>.*` in `folder`.

    The training nodes come first, then 500 validation nodes (fewer if the test nodes begin before). The test nodes come
    last; in the files they are in the shuffled order of `ind.<name>.test.index`. Nodes among them that this file does
    not list have features of zeros and class 0, and are in no mask.
    """
    test = _read_index(folder / f"ind.{name}.test.index")
    known_x, test_x = (_features(folder / f"ind.{name}.{part}") for part in ("allx", "tx"))
    train_y, known_y, test_y = labels = [_one_hot(folder / f"ind.{name}.{part}") for part in ("y", "ally", "ty")]
    widths = [known_x.shape[1], test_x.shape[1]], [y.shape[1] for y in labels]
    if any(len(set(width)) > 1 for width in widths):
        raise DamagedFile(
            f"{folder} holds features of widths {widths[0]}, labels of {widths[1]}; fetch its files again"
        )
    num_known = len(known_y)
    if known_x.shape[0] != num_known or test_x.shape[0] != len(test_y):
        raise DamagedFile(
            f"{folder} holds {known_x.shape[0]} + {test_x.shape[0]} rows of features for "
            f"{num_known} + {len(test_y)} labels; fetch its files again"
        )
    if len(train_y) > num_known:
        raise DamagedFile(f"{folder} holds {len(train_y)} labels for training among {num_known}; fetch its files again")
    if len(np.unique(test)) != len(test_y) or len(test) != len(test_y) or test.min(initial=num_known) < num_known:
        raise DamagedFile(
            f"{folder / f'ind.{name}.test.index'} does not list {len(test_y)} different nodes from {num_known} on; "
            f"delete it and fetch it again"
        )
    num_nodes = int(max(num_known, test.max(initial=-1) + 1))
    edge_index = _edge_index(folder / f"ind.{name}.graph", num_nodes)  # before features for nodes that do not exist
    x = np.zeros((num_nodes, known_x.shape[1]), dtype=np.float32)
    y = np.zeros(num_nodes, dtype=np.int64)
    x[:num_known], x[test] = known_x, test_x
    y[:num_known], y[test] = known_y.argmax(axis=1), test_y.argmax(axis=1)
    node, num_train = torch.arange(num_nodes), len(train_y)
    return NodeClassification(
        x=torch.from_numpy(x),
        edge_index=edge_index,
        y=torch.from_numpy(y),
        train_mask=node < num_train,
        val_mask=(node >= num_train) & (node < min(num_train + _VALIDATION_NODES, num_known)),
        test_mask=torch.zeros(num_nodes, dtype=torch.bool).index_fill(0, torch.from_numpy(test), True),
    )


def row_normalize(x: Tensor) -> Tensor:
    """Scales every row of `x` `[..., F]` to the sum 1, as GCN and GAT do; rows with the sum 0 are unchanged."""
    total = x.sum(dim=-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1)


def _features(path: Path) -> np.ndarray:
    matrix = load_plain(path)
    if not sp.issparse(matrix):
        raise DamagedFile(f"{path} does not hold a sparse matrix; delete it and fetch it again")
    return matrix.toarray().astype(np.float32)


def _one_hot(path: Path) -> np.ndarray:
    one_hot = load_plain(path)
    if not isinstance(one_hot, np.ndarray) or one_hot.ndim != 2 or (one_hot.sum(axis=1) != 1).any():
        raise DamagedFile(f"{path} does not hold one label a row; delete it and fetch it again")
    return one_hot


def _read_index(path: Path) -> np.ndarray:
    try:
        return np.array([int(line) for line in read_bytes(path).decode("ascii").split()], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise DamagedFile(f"{path} is not a list of node numbers ({error}); fetch it again") from error


def _edge_index(path: Path, num_nodes: int) -> Tensor:
    neighbors = load_plain(path)
    if not isinstance(neighbors, dict):
        raise DamagedFile(f"{path} does not hold a dictionary of neighbors; delete it and fetch it again")
    if len(neighbors) != num_nodes:
        raise DamagedFile(f"{path} lists the neighbors of {len(neighbors)} nodes, expected {num_nodes}; fetch it again")
    listed = [(i, j) for i, others in neighbors.items() for j in others]
    for i, j in listed:
        if not all(isinstance(node, int) and 0 <= node < num_nodes for node in (i, j)):
            raise DamagedFile(
                f"{path} links {reprlib.repr(i)} to {reprlib.repr(j)}, but the nodes are 0 to {num_nodes - 1}"
            )
    return both_directions(listed)
