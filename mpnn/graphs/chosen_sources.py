"""Graphs of edges that are chosen by content: blocks of sources, or single sources, for each item and head.

The choice is data, so these graphs are built again for each call, as rows of runs: their edges are never written out.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.graph.runs import Runs
from mpnn.graph.stacked import StackedGraph


@torch.no_grad()
def blocks(chosen: Tensor, size: int, num_src: int, *, num_dst: int | None = None) -> Graph:
    """Each destination receives from the blocks of `size` consecutive sources that are chosen for it, or for its block
    of destinations (MoBA, Lu et al. 2025, arXiv:2502.13189; NSA, Yuan et al. 2025, arXiv:2502.11089).

    ::

        blocks(torch.tensor([[True, False], [True, True]]), size=2, num_src=4)   ##..
                                                                                 ##..
                                                                                 ####
                                                                                 ####

    Args:
        chosen: bool [..., R, ceil(num_src / size)]. R is the number of destinations, or of their blocks. Leading
            dimensions: none; (items,) for a choice of each item of a batch; or (items, heads) for one of each item and
            head, with 1 for items that share it. The number of heads divides that of the attention: groups of heads
            share a choice.
        num_src: number of sources. The last block may be shorter.
        num_dst: number of destinations. Default: `num_src` if R is the number of blocks of sources, else R.

    Returns:
        A graph of `num_dst` x `num_src`; with leading dimensions a `StackedGraph`. Compose it with topologies:
        `blocks(...) & causal()`.

    Raises:
        TypeError: if `chosen` is not a tensor of bools.
        ValueError: if its shape does not fit.
    """
    at_least("size", size, 1)
    at_least("num_src", num_src, 0)
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool:
        raise TypeError(f"chosen must be a tensor of bools; got {getattr(chosen, 'dtype', type(chosen).__name__)}")
    _check_dimensions("chosen", chosen)
    rows, across = chosen.shape[-2:]
    if across != -(-num_src // size):
        raise ValueError(f"{num_src} sources form {-(-num_src // size)} blocks of {size}; got {across} columns")
    if num_dst is None:
        num_dst = num_src if rows == across else rows
    at_least("num_dst", num_dst, 0)
    if rows not in (num_dst, -(-num_dst // size)):
        raise ValueError(
            f"chosen must have a row for each of {num_dst} destinations, or for each block of {size}; got {rows} rows"
        )
    flat = Runs.from_dense(chosen.flatten(0, -2).cpu().numpy())
    runs = Runs(flat.num_dst, num_src, flat.ptr, flat.start * size, np.minimum(flat.stop * size, num_src))
    if rows != num_dst:
        block = np.arange(num_dst) // size
        runs = runs.take((np.arange(flat.num_dst // max(rows, 1))[:, None] * rows + block).reshape(-1))
    return _stacked(runs, chosen, f"blocks of {size}")


@torch.no_grad()
def chosen(indices: Tensor, num_src: int) -> Graph:
    """Each destination receives from the sources that are listed for it (DeepSeek's sparse attention, DSA; top-k
    attention). Repeated sources count once.

    ::

        chosen(torch.tensor([[0, -1], [0, 1], [2, 0]]), num_src=3)   #..
                                                                     ##.
                                                                     #.#

    Args:
        indices: integers [..., num_dst, k], from 0 to num_src - 1, or -1 for none. Leading dimensions as in `blocks`.

    Returns:
        A graph of `num_dst` x `num_src`; with leading dimensions a `StackedGraph`.

    Raises:
        TypeError: if `indices` is not a tensor of integers.
        ValueError: if its shape does not fit.
        IndexError: if an index is not among the sources.
    """
    at_least("num_src", num_src, 0)
    if not isinstance(indices, Tensor) or indices.dtype not in _INTEGERS:
        raise TypeError(
            f"indices must be a tensor of integers; got {getattr(indices, 'dtype', type(indices).__name__)}"
        )
    _check_dimensions("indices", indices)
    outside = (indices < -1) | (indices >= num_src)
    if outside.any():
        raise IndexError(
            f"indices{outside.nonzero()[0].tolist()} is {int(indices[outside][0])}; expected 0 to {num_src - 1}, or -1 "
            "for none"
        )
    listed: NDArray[Any] = indices.flatten(0, -2).cpu().numpy()
    narrow = np.sort(listed.astype(np.int32 if num_src < 2**31 else np.int64), axis=1)
    narrow[narrow < 0] = -2  # so that source 0 does not follow it
    before = np.full_like(narrow, -2)
    before[:, 1:] = narrow[:, :-1]
    begins = narrow > before + 1
    ends = np.ones_like(begins)
    ends[:, :-1] = narrow[:, 1:] > narrow[:, :-1] + 1
    ends &= narrow >= 0
    ptr = np.append(0, np.cumsum(begins.sum(1)))
    start = narrow[begins].astype(np.int64)
    stop = narrow[ends].astype(np.int64) + 1
    return _stacked(Runs(len(listed), num_src, ptr, start, stop), indices, f"{indices.shape[-1]} chosen")


_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def _check_dimensions(name: str, x: Tensor) -> None:
    if not 2 <= x.dim() <= 4 or 0 in x.shape[:-2]:
        raise ValueError(
            f"{name} must have two dimensions, after (items,) or (items, heads) for graphs that differ; got "
            f"{list(x.shape)}"
        )


def _stacked(runs: Runs, choice: Tensor, name: str) -> Graph:
    graph = Graph.from_runs(runs).to(choice.device)
    graph.name = name
    if choice.dim() == 2:
        return graph
    # The type of a tensor does not say how many dimensions it has.
    return cast(Graph, StackedGraph(graph, tuple(choice.shape[:-2])))
