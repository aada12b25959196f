"""Attention whose weights are plain dot products, in time linear in the nodes: sums over sources are taken first.

    out_i = sum_{j heard} <q_i, k_j> v_j = q_i S_i,   S_i = sum_{j heard} k_j^T v_j   [F, D]

(Katharopoulos et al. 2020, eq. 6 and 9 to 12.) S is one matrix where rows hear the same sources, and a running sum
where each row hears one more than the row before. Running sums advance chunk by chunk; within a chunk the scores are
written out, so that all work is matrix products, and there is never more than one S. NaN in a source can reach the rows
of its own chunk that do not hear it.
"""

from __future__ import annotations

from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn.aggregate import Sum
from mpnn.backends.estimate import Estimate, both_ways, on_gpu, priced
from mpnn.graph import Graph
from mpnn.scores import Dot, Request

NAME = "low_rank"

_LEAST_ROWS = 16  # of a block on average, to be worth its products
_ALL, _PAST, _FUTURE = range(3)


class Block(NamedTuple):
    """Rows [first, last) that hear sources [start, stop): `_ALL` of them, or, there being as many rows as sources, row
    by row those up to its own (`_PAST`) or from its own on (`_FUTURE`)."""

    first: int
    last: int
    start: int
    stop: int
    heard: int

    def transposed(self) -> Block:
        return Block(self.start, self.stop, self.first, self.last, (_ALL, _FUTURE, _PAST)[self.heard])


def supports(request: Request) -> str | None:
    graph, score = request.graph, request.score
    if not isinstance(score, Dot):
        return "it needs weights that are dot products"
    if request.normalize != "none" or score.softcap is not None:
        return "only where the dot products themselves are the weights can sums over sources be taken first"
    if score.edge_key is not None or request.edge_value is not None or request.bias:
        return "numbers on edges keep sums over sources from being taken first"
    if request.dropout or request.return_weights:
        return "it never has a single weight in hand, to drop or to return"
    if type(request.reduce) is not Sum:
        return "it sums messages, and cannot aggregate them otherwise"
    if graph.is_explicit:
        return "the graph is a list of edges, and running sums need the order of a structured one"
    if _blocks(graph) is None:
        return "rows must hear the same sources as the row before, or one more, as in complete() and causal()"
    return None


def counts(request: Request) -> dict[str, float]:
    """Products of the states and of the scores within chunks, numbers that are moved, and steps from chunk to chunk."""
    score, blocks = request.score, _blocks(request.graph)
    assert isinstance(score, Dot)
    assert blocks is not None
    heads, deep, wide = request.batch.numel() * request.heads, score.query.shape[-1], request.value.shape[-1]
    chunk = min(_chunk(heads), max(request.graph.num_dst, 1))
    nodes = sum(b.last - b.first + b.stop - b.start for b in blocks)
    running = sum(b.last - b.first for b in blocks if b.heard != _ALL)
    kind = "double " if request.wide == torch.float64 else ""
    found = {
        "call": 1.0,
        "step": nodes / chunk,
        "running step": running / chunk,
        f"{kind}product": float(heads * (nodes * deep * wide + running * chunk * (deep + wide))),
        f"{kind}number": float(heads * nodes * (deep + wide)),
        f"{kind}score": float(heads * running * chunk),
    }
    return both_ways(found, request.needs_grad)


def estimate(request: Request) -> Estimate:
    score = request.score
    assert isinstance(score, Dot)
    heads, deep, wide = request.batch.numel() * request.heads, score.query.shape[-1], request.value.shape[-1]
    chunk = _chunk(heads)
    size = heads * (deep * wide + 2 * chunk * (chunk + deep + wide)) * torch.finfo(request.wide).bits // 8
    found = counts(request)
    if request.value.device.type == "cuda":  # some six operations a step
        flops = 2 * sum(n for what, n in found.items() if "product" in what)
        moved = torch.finfo(request.wide).bits / 8 * sum(n for what, n in found.items() if "number" in what)
        launches = 6 * sum(n for what, n in found.items() if "step" in what)
        return Estimate(on_gpu(flops, moved, request.wide, launches), size)
    return priced(NAME, found, size)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    score, value, blocks = request.score, request.value, _blocks(request.graph)
    assert isinstance(score, Dot)
    assert blocks is not None
    groups = lcm(score.key.shape[-2], value.shape[-2])
    query, key, value = (_in_groups(x, groups) for x in (score.query, score.key, value))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (query, key, value)):
        # torch would take those of an operator without a rule for zeros
        raise NotImplementedError('low_rank has no forward-mode derivatives; name backend="edge_list"')
    out = linear_attention(query, key, value, score.scale, [number for block in blocks for number in block])
    shape = (*request.batch, request.graph.num_dst, request.heads, value.shape[-1])
    return out.view(shape).to(request.value.dtype), None


def _in_groups(x: Tensor, groups: int) -> Tensor:
    """[..., N, H, F] as [B, N, groups, heads of each, F]; fewer heads than groups are repeated."""
    if x.shape[-2] < groups:
        x = x.repeat_interleave(groups // x.shape[-2], -2)
    nodes, heads, width = x.shape[-3:]
    return x.reshape(x.shape[:-3].numel(), nodes, groups, heads // groups, width)


# ------------------------------------------------------------------------------------------------ the graph in blocks


def _blocks(graph: Graph) -> list[Block] | None:
    """The edges as blocks, or None where they are not made of a few."""
    return graph.memo("blocks of running sums", lambda: _found(graph))


def _found(graph: Graph) -> list[Block] | None:
    runs, length = graph.runs, graph.runs.degree()
    heard = np.flatnonzero(length)
    if len(runs.start) != len(heard):
        return None
    if not len(heard):
        return []
    # A row that hears nobody goes with the next one that does: it may be the first of a block.
    start = runs.start[np.searchsorted(heard, np.arange(len(length))).clip(max=len(heard) - 1)]
    ends = [0, *(np.flatnonzero(np.diff(start)) + 1).tolist(), len(length)]
    if (len(ends) - 2) * _LEAST_ROWS > len(length):
        return None
    blocks: list[Block] = []
    for first, last in pairwise(ends):
        found = _stairs(length[first:last], first, int(start[first]))
        if found is None:
            return None
        blocks += [block for block in found if block.last > block.first and block.stop > block.start]
    return blocks


def _stairs(length: np.ndarray, first: int, start: int) -> list[Block] | None:
    """Rows from `first` on that hear so many sources from `start` on: a landing, steps up from it, a landing."""
    rising = np.flatnonzero(np.diff(length))
    low, high, last = int(length[0]), int(length[-1]), first + len(length)
    if not len(rising):
        return [Block(first, last, start, start + low, _ALL)]
    foot, top = int(rising[0]) + 1, int(rising[-1]) + 1
    if not np.array_equal(length[foot - 1 : top + 1], np.arange(low, high + 1)):
        return None
    if low and foot == 1:  # a landing of one row is a step as well
        foot, low = foot - 1, low - 1
    middle, above = first + foot, first + foot + high - low
    return [
        Block(first, last, start, start + low, _ALL),
        Block(middle, above, start + low, start + high, _PAST),
        Block(above, last, start + low, start + high, _ALL),
    ]


# ------------------------------------------------------------------------------------------------ the operator


@torch.library.custom_op("mpnn::linear_attention", mutates_args=())
def linear_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[int]) -> Tensor:
    """`out_i = scale sum_j <query_i, key_j> value_j` over the sources j that row i hears in the blocks.

    Args:
        query: [B, N, G, R, F]: R heads share each of G states. key: [B, M, G, P, F]. value: [B, M, G, P, D]; P sources
            stand at each node. blocks: the numbers of each `Block` in turn.

    Returns:
        [B, N, G, R, D], float32 for 16-bit features.
    """
    batch, nodes, groups, heads = query.shape[:-1]
    deep, wide = value.shape[-1], torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(batch, nodes, groups, heads, deep, dtype=wide)
    step = _chunk(batch * groups)

    def add(first: int, last: int, part: Tensor) -> None:
        out[:, first:last] += part.view(batch, groups, last - first, heads, deep).transpose(1, 2)

    for block in _unflattened(blocks):
        state = query.new_zeros(batch * groups, query.shape[-1], deep, dtype=wide)
        if block.heard == _ALL:
            for start, stop in _steps(block.start, block.stop, step):
                state.baddbmm_(_cut(key, start, stop, wide).mT, _cut(value, start, stop, wide), alpha=scale)
            for first, last in _steps(block.first, block.last, step):
                add(first, last, _cut(query, first, last, wide) @ state)
            continue
        shift = block.start - block.first
        rows = _steps(block.first, block.last, step)
        for first, last in rows if block.heard == _PAST else reversed(rows):
            q = _cut(query, first, last, wide)
            k, v = (_cut(x, first + shift, last + shift, wide) for x in (key, value))
            scores = _masked(q @ k.mT, last - first, block.heard)
            add(first, last, torch.baddbmm(q @ state, scores, v, alpha=scale))
            state.baddbmm_(k.mT, v, alpha=scale)
    return out


@linear_attention.register_fake
def _(query, key, value, scale, blocks):  # type: ignore[no-untyped-def]
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=wide)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.scale, ctx.blocks = inputs
    ctx.save_for_backward(query, key, value)


def _backward(ctx: Any, d_out: Tensor) -> Any:
    """Each gradient is linear attention again: `sum d_out . out` treats its four factors alike."""
    query, key, value = ctx.saved_tensors
    turned = [number for block in _unflattened(ctx.blocks) for number in block.transposed()]
    wanted = ctx.needs_input_grad
    d_query = linear_attention(d_out, value, key, ctx.scale, ctx.blocks).to(query.dtype) if wanted[0] else None
    d_key = linear_attention(value, d_out, query, ctx.scale, turned).to(key.dtype) if wanted[1] else None
    d_value = linear_attention(key, query, d_out, ctx.scale, turned).to(value.dtype) if wanted[2] else None
    return d_query, d_key, d_value, None, None


linear_attention.register_autograd(_backward, setup_context=_setup)


def _unflattened(blocks: list[int]) -> list[Block]:
    size = len(Block._fields)
    return [Block(*blocks[i : i + size]) for i in range(0, len(blocks), size)]


def _steps(first: int, last: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, last)) for a in range(first, last, step)]


def _chunk(states: int) -> int:
    """Rows of a chunk: the fewer states advance together, the more rows, so that a step is worth its overhead."""
    return min(max(512 // max(states, 1), 64), 256)


def _cut(x: Tensor, first: int, last: int, wide: torch.dtype) -> Tensor:
    """Nodes of x [B, N, G, P, F] as [B * G, nodes * P, F]."""
    return x[:, first:last].to(wide).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _masked(scores: Tensor, nodes: int, heard: int) -> Tensor:
    """Scores [B * G, nodes * R, nodes * P] with zeros where the row does not hear the source."""
    hidden = torch.ones(nodes, nodes, dtype=torch.bool, device=scores.device)
    hidden = hidden.triu(1) if heard == _PAST else hidden.tril(-1)
    view = scores.unflatten(2, (nodes, scores.shape[2] // nodes)).unflatten(1, (nodes, scores.shape[1] // nodes))
    return view.masked_fill(hidden[:, None, :, None], 0.0).view_as(scores)
