"""The arguments of `mpnn.kernels.row_attention`: a sparse graph, the score, and the tensors of nodes and edges.

They are in a module of their own, because backends import these types only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LANES = 8
CONSTANT, DOT, ADDITIVE, ACTIVATED = 0, 1, 2, 3  # kinds of scores, as in mpnn.kernels.cpu
NORMALIZERS = {"softmax": 0, "sigmoid": 1, "none": 2}
_NOTHING = np.zeros(0, np.int64)
_NO_KEYS = np.zeros(0, np.uint32)
_PARTS = 32
_LEAST = 1 << 17  # components of edges per part

Array = NDArray[Any]


class Order:
    """Edges sorted by row: `ptr` [rows + 1] and `col` [E], int64. `edge` [E] is the index of each edge in the order of
    destinations, or None if this is that order."""

    def __init__(self, ptr: Array, col: Array, edge: Array | None = None) -> None:
        self.ptr, self.col, self.edge = ptr, col, _NOTHING if edge is None else edge
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._unwritten: dict[int, Array] = {}

    def parts(self, width: int) -> list[tuple[int, int, int]]:
        """Splits the edges into parts of equal size: (first edge, last edge, row of the first edge). A part is large
        enough for a thread if an edge has `width` components. Parts do not depend on the number of threads, so sums
        do not either."""
        count = max(1, min(_PARTS, len(self.col) * width // _LEAST))
        if count not in self._parts:
            cuts = np.linspace(0, len(self.col), count + 1).astype(np.int64)
            row = np.searchsorted(self.ptr, cuts[:-1], side="right") - 1
            self._parts[count] = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), row.tolist(), strict=True))
        return self._parts[count]

    def unwritten(self, width: int) -> Array:
        """The rows that no single part writes in full: rows without edges, and rows shared by several parts."""
        parts = self.parts(width)
        if len(parts) not in self._unwritten:
            shared = [row for _, _, row in parts[1:]]
            self._unwritten[len(parts)] = np.union1d(np.flatnonzero(np.diff(self.ptr) == 0), shared).astype(np.int64)
        return self._unwritten[len(parts)]


class Ids(NamedTuple):
    """The row of a per-edge tensor that each edge reads, in the order of destinations; empty if edge k reads row k.

    `order` returns the edges sorted by these ids if several edges read one row, as in a table; else None.
    """

    ids: Array = _NOTHING
    order: Callable[[], Order] | None = None


class Given(NamedTuple):
    """The tensors of a call, contiguous and of one dtype; absent ones are None.

    value [..., N_src, H_kv, DV]. A `DOT` score: dst [..., N_dst, H, D] are queries, src [..., N_src, H_kv, D] keys.
    `ADDITIVE`: dst [..., N_dst, H], src [..., N_src, H]. `ACTIVATED`: dst and src [..., N, H, D], vector [H, D]. D and
    DV are multiples of 8. Per edge or per edge type: edge [..., E, H or 1, width] is added to keys or before the
    activation, edge_value [..., E, H or 1, width] to values, before [..., E, H or 1] before the activation, bias and
    table [..., E, H or 1] to the logits.
    """

    value: Tensor
    dst: Tensor | None = None
    src: Tensor | None = None
    vector: Tensor | None = None
    edge: Tensor | None = None
    edge_value: Tensor | None = None
    before: Tensor | None = None
    bias: Tensor | None = None
    table: Tensor | None = None


class Spec(NamedTuple):
    """All other arguments. `rows`: the edges by destination. `columns`: returns the edges by source. `ids`: the rows of
    per-edge tensors that edges read, for edge, edge_value, before, bias and table of `Given`. `kind` to `tanh`: the
    score. `keys`: of dropout, [batch * H] uint32, empty without dropout."""

    rows: Order
    columns: Callable[[], Order]
    ids: tuple[Ids, Ids, Ids, Ids, Ids]
    heads: int
    kind: int
    normalize: int
    scale: float = 1.0
    cap: float = 0.0
    slope: float = 1.0
    tanh: bool = False
    keys: Array = _NO_KEYS
    dropout: float = 0.0
    return_weights: bool = False
