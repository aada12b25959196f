"""Tiles of split destinations, for graphs in which rows side by side have other runs of sources (MoBA, NSA).

Each run of each row becomes a destination of its own, a piece. Pieces are sorted by their runs, so that those of a tile
have the same sources. A second round merges the pieces of a row: a softmax of their log-sum-exps.

    out_i = sum_p exp(lse_p - lse_i) out_p        lse_i = log sum_p exp(lse_p)        over the pieces p of row i
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.runs import Runs
from mpnn.kernels.rows import attention as row_attention
from mpnn.kernels.rows.attention import Spec, Tensors
from mpnn.kernels.rows.rows import Rows
from mpnn.kernels.rows.spec import CONSTANT, NORMALIZERS

_MIN_PIECES = 1 << 11  # below, a second round costs more than full tiles save
_MIN_LENGTH = 8  # sources of a run on average: shorter ones do not fill tiles, however sorted


@dataclass(frozen=True, eq=False)
class Pieces:
    """`graph` has the pieces as destinations, `row` [P] is the row of each. `by_row`: the pieces of each row, and
    `by_piece` the row of each piece, as kernels read them."""

    graph: Graph
    row: Tensor
    by_row: Rows
    by_piece: Rows


def pieces(graph: Graph) -> Pieces | None:
    """The pieces of the rows of a graph; None if splitting cannot help: few runs a row, or short ones."""
    if graph.is_explicit:
        return None
    runs = graph.runs
    if _few(runs) or runs.num_edges < _MIN_LENGTH * runs.num_runs:
        return None
    order = np.lexsort((runs.stop, runs.start))
    row = runs.row[order]
    count = runs.num_runs
    ptr = np.arange(count + 1)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    split = Graph.from_runs(Runs(count, runs.num_src, ptr, runs.start[order], runs.stop[order]))
    piece = torch.from_numpy(rank)
    by_row = Rows(torch.from_numpy(runs.ptr), piece.int(), piece)
    by_piece = Rows(torch.from_numpy(ptr), torch.from_numpy(row).int(), None, torch.from_numpy(order))
    return Pieces(split, torch.from_numpy(row), by_row, by_piece)


def merge(pieces: Pieces, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Out [B, N_dst, H, D] and lse [B, H, N_dst] of rows, from those of their pieces; +inf for a row without edges."""
    heads = out.shape[-2]
    softmax = NORMALIZERS["softmax"]
    spec = Spec(pieces.by_row, lambda: pieces.by_piece, {}, heads, CONSTANT, softmax, scale=0.0, return_lse=True)
    merged, _, total = row_attention.attend(spec, Tensors(out, bias=lse.mT.contiguous()))
    assert total is not None
    return merged, total.mT


def _few(runs: Runs) -> bool:
    return runs.num_runs < max(_MIN_PIECES, runs.num_dst + 1)
