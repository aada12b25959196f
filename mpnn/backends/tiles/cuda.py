"""Tiles on CUDA, by FlexAttention; see `mpnn.kernels.flex`."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mpnn.backends.cost_model import Counts, Estimate, on_gpu
from mpnn.backends.tiles import cpu
from mpnn.backends.tiles.cpu import count_tiles, table
from mpnn.graph import Graph
from mpnn.graph.blocks import BlockMask
from mpnn.graph.runs import Runs
from mpnn.kernels import flex
from mpnn.needs import on_edges
from mpnn.round import Result, Round
from mpnn.scores import Dot

_MIN_WIDTH = 16  # of a head, the least operand of a tensor core


SERVES = (cpu.SERVES | {"cuda"}) - on_edges("bias") - {
    "cpu", "float64", "sinks", "return_lse", "dropout", "head_ids", "node_ids", "bias by nodes", "softmax_dst",
    "keep_accumulate_dtype",
} | {"bias by Offset"}  # fmt: skip
REASONS = cpu.REASONS | {
    "float64": "FlexAttention has no float64",
    "dropout": "FlexAttention has no dropout of weights",
    "bias by nodes": "on CUDA it does not add biases of nodes",
    "softmax_dst": "on CUDA it does not normalize over the destinations of a source",
    **dict.fromkeys(on_edges("bias"), "on CUDA it supports only biases by offset j - i"),
}


def refusal(round: Round) -> str | None:
    if not round.graph.num_edges:
        return "the graph has no edges"
    if (most := round.graph.structure.most_runs) > flex.MAX_RUNS:
        return f"some row has {most} runs, and on CUDA it compares at most {flex.MAX_RUNS}"
    return None


def counts(round: Round) -> Counts:
    """Pairs in tiles times heads, and products on them."""
    score = round.score
    assert isinstance(score, Dot)
    graph = round.graph
    _, area = graph.cached("flex counts", lambda: count_tiles(graph.structure, flex.SIDE, flex.SIDE))
    pairs = float(area * round.batch.numel() * round.heads)
    return {"pair": pairs, "product": pairs * (score.query.shape[-1] + round.value.shape[-1])}


def estimate(round: Round) -> Estimate:
    products = counts(round)["product"]
    numbers = sum(x.numel() for x in round.tensors) + round.batch.numel() * round.graph.num_dst * round.heads
    passes = 3.5 if round.needs_grad else 1.0  # the backward pass takes five products where the forward takes two
    size = numbers * round.value.element_size()
    return Estimate(on_gpu(2 * products * passes, 2 * size * passes, round.value.dtype, 2 * passes), float(size))


def run(round: Round) -> Result:
    graph, score = round.graph, round.score
    assert isinstance(score, Dot)
    query, key, value = (_pad(x) for x in (score.query, score.key, round.value))
    if key.shape[2] != value.shape[2]:
        key, value = (x.repeat_interleave(round.heads // x.shape[2], 2) for x in (key, value))
    mask = graph.cached("flex blocks", lambda: blocks(graph))
    out = flex.attention(query, key, value, table(round), score.softcap, score.scale, mask)
    return Result(out[..., : round.value.shape[-1]].view(*round.batch, *out.shape[1:-1], -1))


def blocks(graph: Graph) -> Any:
    """The graph as FlexAttention's `BlockMask`, on the graph's device, in O(runs)."""
    runs = graph.runs
    tiles = graph.cached("flex tiles", lambda: BlockMask.of(runs, flex.SIDE, flex.SIDE))
    numbers = (*_pad_runs(runs), *_tile_list(tiles, ~tiles.full), *_tile_list(tiles, tiles.full))
    start, stop, *lists = (torch.from_numpy(x).to(graph.device, non_blocking=True) for x in numbers)
    return flex.blocks(start, stop, (lists[0], lists[1]), (lists[2], lists[3]), runs.num_src)


def _pad_runs(runs: Runs) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Starts and stops of each row's runs, [R, N_dst]. Empty runs pad R to a power of two."""
    count = np.diff(runs.ptr)
    rank = np.arange(len(runs.start)) - np.repeat(runs.ptr[:-1], count)
    room = 1 << (max(runs.most_runs, 1) - 1).bit_length()
    start, stop = np.zeros((room, runs.num_dst), np.int32), np.zeros((room, runs.num_dst), np.int32)
    start[rank, runs.row], stop[rank, runs.row] = runs.start, runs.stop
    return start, stop


def _tile_list(tiles: BlockMask, which: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The selected tiles of each row of tiles: their number, [1, 1, rows], and columns, [1, 1, rows, columns]."""
    rows = len(tiles.ptr) - 1
    row = np.repeat(np.arange(rows), np.diff(tiles.ptr))[which]
    count = np.bincount(row, minlength=rows)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    where = np.zeros((1, 1, rows, tiles.across), np.int32)
    where[0, 0, row, rank] = tiles.column[which]
    return count.astype(np.int32)[None, None], where


def _pad(x: Tensor) -> Tensor:
    """x [..., N, H, D] as [B, N, H, D], with D padded to a power of two."""
    x = x.flatten(0, -4) if x.dim() > 3 else x.unsqueeze(0)
    width = max(_MIN_WIDTH, 1 << (x.shape[-1] - 1).bit_length())
    return F.pad(x, (0, width - x.shape[-1])) if width != x.shape[-1] else x
