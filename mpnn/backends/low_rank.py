"""Linear attention: weights are inner products without a normaliser, so sums over sources are computed first, in time
linear in the nodes (`mpnn.kernels.linear_attention`). The sums are one matrix for rows with the same sources, and a
running sum if each row has one source more than the row before.
"""

from __future__ import annotations

from itertools import pairwise
from math import lcm

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn.aggregate import Sum
from mpnn.backends.cost_model import Estimate, both_ways, on_gpu, priced
from mpnn.graph import Graph
from mpnn.kernels.linear_attention import ALL, LOGITS, PAST, Block, linear_attention
from mpnn.request.request import Request
from mpnn.request.scores import Dot

NAME = "low_rank"

_LEAST_ROWS = 16  # per block on average; below this the backend is not worthwhile


def supports(request: Request) -> str | None:
    graph, score = request.graph, request.score
    if not isinstance(score, Dot):
        return "it needs dot-product scores"
    if request.normalize != "none" or score.softcap is not None:
        return "it needs dot products as weights, without a normaliser or softcap"
    if score.edge_key is not None or request.edge_value is not None or request.bias:
        return "it does not support biases, edge_key or edge_value"
    if request.dropout or request.return_weights:
        return "it never computes single weights, so it cannot drop or return them"
    if type(request.reduce) is not Sum:
        return "it sums messages, and cannot aggregate them otherwise"
    if graph.is_explicit:
        return "the graph is a list of edges, and running sums need a structured graph"
    if _blocks(graph) is None:
        return "each row must have the same sources as the row before, or one more, as in complete() and causal()"
    return None


def counts(request: Request) -> dict[str, float]:
    """Products of the states and of the logits within chunks, components moved, and blocks."""
    score, blocks = request.score, _blocks(request.graph)
    assert isinstance(score, Dot)
    assert blocks is not None
    heads, deep, wide = request.batch.numel() * request.heads, score.query.shape[-1], request.value.shape[-1]
    nodes = sum(b.last - b.first + b.stop - b.start for b in blocks)
    logits = sum((b.last - b.first) * min(LOGITS, b.last - b.first) for b in blocks if b.extent != ALL)
    kind = "double " if request.accumulate_dtype == torch.float64 else ""
    operations = {
        "call": 1.0,
        "block": float(heads * len(blocks)),
        f"{kind}product": float(heads * (nodes * deep * wide + logits * (deep + wide))),
        f"{kind}number": float(heads * nodes * (deep + wide)),
    }
    return both_ways(operations, request.needs_grad)


def estimate(request: Request) -> Estimate:
    score, operations = request.score, counts(request)
    assert isinstance(score, Dot)
    deep, wide, dtype = score.query.shape[-1], request.value.shape[-1], request.accumulate_dtype
    size = request.batch.numel() * request.heads * dtype.itemsize * (deep * wide + 2 * LOGITS * (LOGITS + deep + wide))
    if request.value.device.type == "cuda":
        flops = 2 * sum(n for what, n in operations.items() if "product" in what)
        moved = dtype.itemsize * sum(n for what, n in operations.items() if "number" in what)
        launches = 6 * request.graph.num_dst / LOGITS  # of a step between chunks
        return Estimate(on_gpu(flops, moved, dtype, launches), size)
    return priced(NAME, operations, size)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    score, value, blocks = request.score, request.value, _blocks(request.graph)
    assert isinstance(score, Dot)
    assert blocks is not None
    groups = lcm(score.key.shape[-2], value.shape[-2])
    query, key, value = (_in_groups(x, groups) for x in (score.query, score.key, value))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (query, key, value)):
        # torch treats the tangents of an operator without a rule as zeros
        raise NotImplementedError('low_rank has no forward-mode derivatives; name backend="edge_list"')
    out = linear_attention(query, key, value, score.scale, [number for block in blocks for number in block])
    shape = (*request.batch, request.graph.num_dst, request.heads, value.shape[-1])
    return out.view(shape).to(request.value.dtype), None


def _in_groups(x: Tensor, groups: int) -> Tensor:
    """Reshapes x [..., N, H, F] to [B, N, groups, H / groups, F]; repeats heads if there are fewer than groups."""
    if x.shape[-2] < groups:
        x = x.repeat_interleave(groups // x.shape[-2], -2)
    nodes, heads, width = x.shape[-3:]
    return x.reshape(x.shape[:-3].numel(), nodes, groups, heads // groups, width)


# ------------------------------------------------------------------------------------------------ the graph in blocks


def _blocks(graph: Graph) -> list[Block] | None:
    """The edges as blocks, or None if they do not form a few blocks."""
    return graph.cached("blocks of running sums", lambda: _find_blocks(graph))


def _find_blocks(graph: Graph) -> list[Block] | None:
    runs, length = graph.runs, graph.runs.degree()
    nonempty = np.flatnonzero(length)
    if len(runs.start) != len(nonempty):
        return None
    if not len(nonempty):
        return []
    # A row without in-neighbors joins the next row that has some: it may be the first row of a block.
    start = runs.start[np.searchsorted(nonempty, np.arange(len(length))).clip(max=len(nonempty) - 1)]
    ends = [0, *(np.flatnonzero(np.diff(start)) + 1).tolist(), len(length)]
    if (len(ends) - 2) * _LEAST_ROWS > len(length):
        return None
    blocks: list[Block] = []
    for first, last in pairwise(ends):
        parts = _stairs(length[first:last], first, int(start[first]))
        if parts is None:
            return None
        blocks += [block for block in parts if block.last > block.first and block.stop > block.start]
    return blocks


def _stairs(length: np.ndarray, first: int, start: int) -> list[Block] | None:
    """The blocks of rows from `first` on with in-degrees `length` and first source `start`, or None. The lengths must
    be constant, then increase by one per row, then be constant."""
    rising = np.flatnonzero(np.diff(length))
    low, high, last = int(length[0]), int(length[-1]), first + len(length)
    if not len(rising):
        return [Block(first, last, start, start + low, ALL)]
    foot, top = int(rising[0]) + 1, int(rising[-1]) + 1
    if not np.array_equal(length[foot - 1 : top + 1], np.arange(low, high + 1)):
        return None
    if low and foot == 1:  # one row of the first length is also a step
        foot, low = foot - 1, low - 1
    middle, above = first + foot, first + foot + high - low
    return [
        Block(first, last, start, start + low, ALL),
        Block(middle, above, start + low, start + high, PAST),
        Block(above, last, start + low, start + high, ALL),
    ]
