"""Attention weights as the viewer stores them: small enough for 10,000 tokens with 12 layers of 12 heads.

All weights of a head would be N x N numbers. A page keeps the strongest sources of each token, as many as fit into a
budget of bytes, and a thumbnail of the whole matrix for each head.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph import Graph

_CELLS = 48  # of a thumbnail, on a side
_BUDGET = 32 << 20  # bytes of one graph; base64 makes them a third more
_SMALL_INDEX = 1 << 16  # tokens up to which 16 bits number them


class Recording:
    """The attention of one model over one graph, added layer by layer.

    Args:
        name: the heading of the graph.
        tokens: how many there are.
        layers: how many layers will be added.

    `is_causal` says whether no token attends to a later one; `heads`, how many a layer has.
    """

    def __init__(self, name: str, tokens: int, layers: int) -> None:
        self.name, self.tokens, self.layers = name, tokens, layers
        self.heads, self.is_causal = 0, True
        self._edges, self._top = 0, 0
        self._thumbnails: list[NDArray[np.uint8]] = []
        self._sources: list[NDArray[Any]] = []
        self._weights: list[NDArray[np.uint8]] = []
        self._shares: list[float] = []

    def add(self, graph: Graph, weights: Tensor) -> None:
        """Adds the next layer: the weights of the edges of `graph`, [E, H] or [1, E, H].

        Raises:
            ValueError: if the graph is not one over the tokens, or the layer has another number of heads.
        """
        if (graph.num_dst, graph.num_src) != (self.tokens, self.tokens):
            raise ValueError(
                f"layer {len(self._weights)} attends from {graph.num_dst} to {graph.num_src} nodes, but there are "
                f"{self.tokens} tokens; the viewer shows models over one sequence"
            )
        of_edges = weights.detach().float().reshape(-1, weights.shape[-1]).cpu().numpy()
        if not self._weights:
            self.heads = of_edges.shape[1]
            self._top = self._affordable(max(graph.structure.degree_range()[1], 1))
        if of_edges.shape[1] != self.heads:
            raise ValueError(f"layers have {self.heads} and {of_edges.shape[1]} heads; the viewer shows equal numbers")
        src, dst = graph.edge_index.cpu().numpy()
        self.is_causal &= bool((src <= dst).all())
        self._edges = max(self._edges, graph.num_edges)
        heads = [np.clip(of_edges[:, head], 0.0, 1.0) for head in range(self.heads)]
        strongest = [_strongest(dst, src, w, self.tokens, self._top) for w in heads]
        self._sources.append(np.stack([sources for sources, _ in strongest]))
        self._weights.append(np.stack([_bytes(kept) for _, kept in strongest]))
        self._thumbnails.append(np.stack([_thumbnail(dst, src, w, self.tokens) for w in heads]))
        total = sum(float(w.sum()) for w in heads)
        self._shares.append(sum(float(kept.sum()) for _, kept in strongest) / total if total else 1.0)

    def data(self) -> dict[str, Any]:
        """What `viewer/src/data.ts` calls AttentionGraph.

        Raises:
            ValueError: if not all layers were added.
        """
        if len(self._weights) != self.layers:
            raise ValueError(
                f"{len(self._weights)} of {self.layers} layers gave attention weights; the viewer needs all"
            )
        index = np.dtype("<u2" if self.tokens <= _SMALL_INDEX else "<u4")
        return {
            "name": self.name,
            "edges": self._edges,
            "top": self._top,
            "share": float(np.mean(self._shares)),
            "thumbnails": _base64(self._thumbnails, np.dtype(np.uint8)),
            "sources": _base64(self._sources, index),
            "weights": _base64(self._weights, np.dtype(np.uint8)),
        }

    def _affordable(self, most: int) -> int:
        """How many sources of each token fit into the budget, at most `most`."""
        each = self.layers * self.heads * max(self.tokens, 1) * (3 if self.tokens <= _SMALL_INDEX else 5)
        return min(most, max(1, _BUDGET // each))


def attention(tokens: Sequence[str], recordings: Sequence[Recording]) -> dict[str, Any]:
    """What `viewer/src/data.ts` calls AttentionData: recordings over the same tokens.

    Raises:
        ValueError: if a recording lacks layers.
    """
    first = recordings[0]
    return {
        "tokens": list(tokens),
        "layers": first.layers,
        "heads": first.heads,
        "cells": cells(len(tokens)),
        "graphs": [recording.data() for recording in recordings],
    }


def cells(tokens: int) -> int:
    """The cells on a side of a thumbnail."""
    return max(1, min(tokens, _CELLS))


def _strongest(
    dst: NDArray[np.int64], src: NDArray[np.int64], weight: NDArray[np.float32], tokens: int, top: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The sources of the `top` largest weights of each row and these weights, [tokens, top]; 0 where there are none."""
    order = np.argsort(dst - 0.5 * weight.astype(np.float64), kind="stable")  # by row, then by descending weight
    row = dst[order]
    rank = np.arange(len(row)) - np.searchsorted(row, np.arange(tokens))[row]
    inside = rank < top
    sources, kept = np.zeros((tokens, top), np.int64), np.zeros((tokens, top), np.float32)
    sources[row[inside], rank[inside]] = src[order][inside]
    kept[row[inside], rank[inside]] = weight[order][inside]
    return sources, kept


def _thumbnail(
    dst: NDArray[np.int64], src: NDArray[np.int64], weight: NDArray[np.float32], tokens: int
) -> NDArray[np.uint8]:
    """The mean weight of each cell as a share of the head's largest, as bytes [cells, cells]."""
    side = cells(tokens)
    cell = dst * side // tokens * side + src * side // tokens
    total = np.bincount(cell, weight, minlength=side * side)
    size = np.bincount(np.arange(tokens) * side // tokens, minlength=side)
    mean = total.reshape(side, side) / np.outer(size, size)
    return _bytes(mean / max(mean.max(initial=0.0), 1e-30))


def _bytes(share: NDArray[Any]) -> NDArray[np.uint8]:
    """255 times the square root, which keeps small weights apart: 0.01 becomes 26."""
    return np.round(255 * np.sqrt(share)).astype(np.uint8)


def _base64(layers: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> str:
    return b64encode(np.stack(layers).astype(dtype).tobytes()).decode("ascii")
