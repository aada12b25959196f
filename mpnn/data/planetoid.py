"""Cora and Citeseer, the citation graphs of the GCN and GAT papers, with the fixed Planetoid split.

Their files are pickles. A pickle is a program, and unpickling runs it. So only bytes with a known digest are unpickled,
and by an unpickler that refuses every name but the six that arrays, sparse matrices and dictionaries of lists need.
"""

import pickle
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.data.digits import PointClassification
from mpnn.data.from_pyg import edges, one_graph, tensors
from mpnn.data.links import both_directions
from mpnn.data.locate import locate
from mpnn.data.read import read_verified
from mpnn.data.sources import SOURCES, Source

_VALIDATION_NODES = 500


@dataclass(frozen=True, eq=False)
class NodeClassification(PointClassification):
    """A graph for node classification.

    Args:
        x, y, train_mask, val_mask, test_mask: as for `PointClassification`; some nodes may be in no mask.
        edge_index: int64 `[2, E]`; `edge_index[0]` is src, `edge_index[1]` is dst; both directions of
            every link, no duplicates, no self-loops, ordered by dst, then src.
    """

    edge_index: Tensor

    @classmethod
    def from_pyg(cls, source: Any, split: int = 0) -> "NodeClassification":
        """Creates a dataset from PyTorch Geometric: a `Data`, or a dataset of one graph. Edges stay as they are there.

        Args:
            source: with `x`, `y`, `edge_index` (or `adj_t`) and the masks `train_mask`, `val_mask`, `test_mask`.
            split: the column of masks [N, splits].

        Raises:
            TypeError, ValueError: if `source` holds no graph or several, or lacks one of these tensors.
        """
        data = one_graph(source)
        x, y, train, val, test = tensors(data, "x", "y", "train_mask", "val_mask", "test_mask")
        edge_index = edges(data)
        train, val, test = ((mask if mask.dim() == 1 else mask[:, split]).bool() for mask in (train, val, test))
        if y.is_floating_point() or y.dim() > 2 or (y.dim() == 2 and y.shape[1] > 1):
            raise ValueError(f"y must hold one class for each node, int64 [N]; got {y.dtype} {list(y.shape)}")
        return cls(x.float(), y.view(-1).long(), train, val, test, edge_index)

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]


def cora() -> NodeClassification:
    """Loads Cora: 2,708 papers, 1,433 words (0 or 1 each), 7 topics, 5,278 links, split 140 / 500 / 1000.

    The file lists 10,858 neighbors: every link in both directions, and 151 links twice. Duplicates and self-loops
    (Cora has none) are dropped, which leaves 10,556 directed edges.

    Raises:
        DatasetNotFound, DamagedFile: see `mpnn.data.errors`.
    """
    return read_planetoid(locate("cora"), SOURCES["cora"])


def citeseer() -> NodeClassification:
    """Loads Citeseer: 3,327 papers, 3,703 words (0 or 1 each), 6 topics, 4,552 links, split 120 / 500 / 1000.

    15 papers have neither words nor a topic nor links: they have features of zeros and class -1, and are in no part of
    the split. Duplicates and 124 self-loops are dropped, which leaves 9,104 directed edges.

    Raises:
        DatasetNotFound, DamagedFile: see `mpnn.data.errors`.
    """
    return read_planetoid(locate("citeseer"), SOURCES["citeseer"])


def read_planetoid(folder: Path, source: Source) -> NodeClassification:
    """Reads the files `ind.<name>.*` of a dataset in `folder`.

    The training nodes come first, then 500 validation nodes (fewer if the test nodes begin before). The test nodes come
    last; in the files they are in the shuffled order of `ind.<name>.test.index`. Nodes among them that this file does
    not list have features of zeros and class -1, and are in no mask.

    Raises:
        DatasetNotFound, DamagedFile: if a file is missing or has another digest than `source` says. Nothing else is
            checked: the digests are those of files that fit together.
    """
    digests = {file.name.removeprefix(f"ind.{source.name}."): str(file.sha256) for file in source.files}

    def path(part: str) -> Path:
        return folder / f"ind.{source.name}.{part}"

    known_x, test_x, train_y, known_y, test_y, neighbors = (
        load_plain(path(part), digests[part]) for part in ("allx", "tx", "y", "ally", "ty", "graph")
    )
    index = read_verified(path("test.index"), digests["test.index"])
    test = np.array([int(line) for line in index.split()], dtype=np.int64)
    num_known, num_train = len(known_y), len(train_y)
    num_nodes = int(max(num_known, test.max() + 1))
    x = np.zeros((num_nodes, known_x.shape[1]), dtype=np.float32)
    y = np.full(num_nodes, -1)
    x[:num_known], x[test] = known_x.toarray(), test_x.toarray()
    y[:num_known], y[test] = known_y.argmax(axis=1), test_y.argmax(axis=1)
    node = torch.arange(num_nodes)
    return NodeClassification(
        x=torch.from_numpy(x),
        edge_index=both_directions([(i, j) for i, others in neighbors.items() for j in others]),
        y=torch.from_numpy(y),
        train_mask=node < num_train,
        val_mask=(node >= num_train) & (node < min(num_train + _VALIDATION_NODES, num_known)),
        test_mask=torch.zeros(num_nodes, dtype=torch.bool).index_fill(0, torch.from_numpy(test), True),
    )


def row_normalize(x: Tensor) -> Tensor:
    """Scales every row of `x` `[..., F]` to the sum 1, as GCN and GAT do; rows with the sum 0 are unchanged."""
    total = x.sum(dim=-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1)


def load_plain(path: Path, sha256: str) -> Any:
    """The array, sparse matrix, or dictionary of lists in a pickle of Python 2 with this digest."""
    return _Unpickler(BytesIO(read_verified(path, sha256)), encoding="latin1").load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which plain data do not need")
        return _csr_matrix() if name == "csr_matrix" else _ALLOWED[module, name]


def _csr_matrix() -> Any:
    from scipy.sparse import csr_matrix

    return csr_matrix


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],  # moved within numpy since
    ("scipy.sparse.csr", "csr_matrix"): None,  # imported when a file asks for it
    ("collections", "defaultdict"): lambda factory: {},
    ("__builtin__", "list"): list,
}
