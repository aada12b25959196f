"""Attention weights as the viewer stores them: small enough for 10,000 tokens with 12 layers of 12 heads.

All weights of a head would be N x N numbers. A page keeps the strongest sources of each node, as many as fit into a
budget of bytes, and a thumbnail of the whole matrix for each head.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpnn import Graph
from mpnn.view.subject import Subject

_CELLS = 48  # of a thumbnail, on a side
_BUDGET = 32 << 20  # bytes of one graph; base64 makes them a third more
_SMALL_INDEX = 1 << 16  # nodes up to which 16 bits number them


class Recording:
    """The attention of one model over one graph, added layer by layer.

    Args:
        name: the heading of the graph.
        size: the number of nodes of the subject.
        layers: how many layers will be added.
        order: int64 [size], the nodes of the graphs that the page shows, in its order. None: all, in their order.
        budget: bytes for the weights.

    `is_causal` says whether no node attends to a later one; `heads`, how many each layer has.
    """

    def __init__(
        self, name: str, size: int, layers: int, order: NDArray[np.int64] | None = None, budget: int | None = None
    ) -> None:
        self.name = name
        self.size = size
        self.layers = layers
        self.heads: list[int] = []
        self.is_causal = True
        self._order = order
        self._budget = _BUDGET if budget is None else budget
        self._edges = 0
        self._top = 0
        self._thumbnails: list[NDArray[np.uint8]] = []
        self._sources: list[NDArray[Any]] = []
        self._weights: list[NDArray[np.uint8]] = []
        self._shares: list[float] = []

    def add(self, graph: Graph, weights: Tensor) -> None:
        """Adds the next layer: the weights of the edges of `graph`, [E, H] or [1, E, H]."""
        if graph.num_dst != graph.num_src or (self._order is None and graph.num_dst != self.size):
            raise ValueError(
                f"layer {len(self.heads)} attends from {graph.num_dst} to {graph.num_src} nodes, but the page shows "
                f"{self.size}; the viewer shows models whose layers are over the same nodes"
            )
        if weights.numel() != graph.num_edges * weights.shape[-1]:
            raise ValueError(
                f"layer {len(self.heads)} has weights {list(weights.shape)} for {graph.num_edges} edges; the viewer "
                "shows one text, image or graph, whose layers are over the same nodes"
            )
        of_edges = weights.detach().float().reshape(-1, weights.shape[-1]).cpu().numpy().clip(0.0, 1.0)
        src, dst = graph.edge_index.cpu().numpy()
        if self._order is not None:
            index = np.full(graph.num_dst, -1)
            index[self._order] = np.arange(self.size)
            src, dst = index[src], index[dst]
            shown = (src >= 0) & (dst >= 0)
            src = src[shown]
            dst = dst[shown]
            of_edges = of_edges[shown]
        if not self.heads:
            self._top = self._affordable(int(np.bincount(dst, minlength=1).max()), of_edges.shape[1])
        self.heads.append(of_edges.shape[1])
        self.is_causal &= bool((src <= dst).all())
        self._edges = max(self._edges, len(src))
        strongest = [_strongest(dst, src, w, self.size, self._top) for w in of_edges.T]
        self._sources.append(np.stack([sources for sources, _ in strongest]))
        self._weights.append(np.stack([_bytes(kept) for _, kept in strongest]))
        self._thumbnails.append(np.stack([_thumbnail(dst, src, w, self.size) for w in of_edges.T]))
        total = float(of_edges.sum())
        self._shares.append(sum(float(kept.sum()) for _, kept in strongest) / total if total else 1.0)

    def data(self) -> dict[str, Any]:
        """Returns the AttentionGraph of `viewer/src/data.ts`."""
        if len(self.heads) != self.layers:
            raise ValueError(f"{len(self.heads)} of {self.layers} layers gave attention weights; the viewer needs all")
        index = np.dtype("<u2" if self.size <= _SMALL_INDEX else "<u4")
        return {
            "name": self.name,
            "edges": self._edges,
            "top": self._top,
            "share": float(np.mean(self._shares)),
            "thumbnails": _base64(self._thumbnails, np.dtype(np.uint8)),
            "sources": _base64(self._sources, index),
            "weights": _base64(self._weights, np.dtype(np.uint8)),
        }

    def _affordable(self, most: int, heads: int) -> int:
        """How many sources of each node fit into the budget if all layers have this many heads, at most `most`."""
        each = self.layers * heads * max(self.size, 1) * (3 if self.size <= _SMALL_INDEX else 5)
        return max(1, min(most, self._budget // each))


def attention(subject: Subject, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Returns the AttentionData of `viewer/src/data.ts`: recordings over the same subject."""
    heads = recordings[0].heads
    for other in recordings[1:]:
        if other.heads != heads:
            raise ValueError(f"the layers have {heads} heads over one graph and {other.heads} over another")
    return {
        "subject": subject.data(),
        "start": subject.start,
        "heads": heads,
        "cells": cells(subject.size),
        "graphs": [recording.data() for recording in recordings],
    }


def cells(size: int) -> int:
    """The cells on a side of a thumbnail."""
    return max(1, min(size, _CELLS))


def _strongest(
    dst: NDArray[np.int64], src: NDArray[np.int64], weight: NDArray[np.float32], size: int, top: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The sources of the `top` largest weights of each row and these weights, [size, top]; 0 where there are none."""
    order = np.argsort(dst - 0.5 * weight.astype(np.float64), kind="stable")  # by row, then by descending weight
    row = dst[order]
    rank = np.arange(len(row)) - np.searchsorted(row, np.arange(size))[row]
    inside = rank < top
    sources, kept = np.zeros((size, top), np.int64), np.zeros((size, top), np.float32)
    sources[row[inside], rank[inside]] = src[order][inside]
    kept[row[inside], rank[inside]] = weight[order][inside]
    return sources, kept


def _thumbnail(
    dst: NDArray[np.int64], src: NDArray[np.int64], weight: NDArray[np.float32], size: int
) -> NDArray[np.uint8]:
    """The mean weight of each cell as a share of the head's largest, as bytes [cells, cells]."""
    side = cells(size)
    cell = dst * side // size * side + src * side // size
    total = np.bincount(cell, weight, minlength=side * side)
    nodes = np.bincount(np.arange(size) * side // size, minlength=side)
    mean = total.reshape(side, side) / np.outer(nodes, nodes)
    return _bytes(mean / max(mean.max(initial=0.0), 1e-30))


def _bytes(share: NDArray[Any]) -> NDArray[np.uint8]:
    """255 times the square root, which keeps small weights apart: 0.01 becomes 26."""
    return np.round(255 * np.sqrt(share)).astype(np.uint8)


def _base64(layers: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> str:
    return b64encode(np.concatenate(layers).astype(dtype).tobytes()).decode("ascii")
