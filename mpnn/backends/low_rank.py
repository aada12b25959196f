"""Linear attention: weights are inner products without a normaliser, so sums over sources are computed first, in time
linear in the nodes.

    out_i = sum_{j in N(i)} <q_i, k_j> v_j = q_i S_i,   S_i = sum_{j in N(i)} k_j^T v_j   [F, D]

(Katharopoulos et al. 2020, eq. 6 and 9 to 12.) S is one matrix for rows with the same sources, and a running sum if
each row has one source more than the row before. Running sums advance in chunks. Within a chunk the logits are
materialised, so that all work is matrix products; only one S is in memory. NaN in a source can reach rows of its chunk
that do not attend to it.
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
from mpnn.backends.cost_model import Estimate, both_ways, on_gpu, priced
from mpnn.graph import Graph
from mpnn.request.request import Request
from mpnn.request.scores import Dot

NAME = "low_rank"

_LEAST_ROWS = 16  # per block on average; below this the backend is not worthwhile
_ALL, _PAST, _FUTURE = range(3)


class Block(NamedTuple):
    """Rows [first, last) that attend to sources [start, stop). `extent` is `_ALL` for all of them. With as many rows as
    sources it can be `_PAST`, sources up to the row's own, or `_FUTURE`, sources from the row's own on."""

    first: int
    last: int
    start: int
    stop: int
    extent: int

    def transposed(self) -> Block:
        return Block(self.start, self.stop, self.first, self.last, (_ALL, _FUTURE, _PAST)[self.extent])


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
    """Products of the states and of the logits within chunks, components moved, and steps between chunks."""
    score, blocks = request.score, _blocks(request.graph)
    assert isinstance(score, Dot)
    assert blocks is not None
    heads, deep, wide = request.batch.numel() * request.heads, score.query.shape[-1], request.value.shape[-1]
    chunk = min(_chunk(heads), max(request.graph.num_dst, 1))
    nodes = sum(b.last - b.first + b.stop - b.start for b in blocks)
    running = sum(b.last - b.first for b in blocks if b.extent != _ALL)
    kind = "double " if request.accumulate_dtype == torch.float64 else ""
    operations = {
        "call": 1.0,
        "step": nodes / chunk,
        "running step": running / chunk,
        f"{kind}product": float(heads * (nodes * deep * wide + running * chunk * (deep + wide))),
        f"{kind}number": float(heads * nodes * (deep + wide)),
        f"{kind}score": float(heads * running * chunk),
    }
    return both_ways(operations, request.needs_grad)


def estimate(request: Request) -> Estimate:
    score = request.score
    assert isinstance(score, Dot)
    heads, deep, wide = request.batch.numel() * request.heads, score.query.shape[-1], request.value.shape[-1]
    chunk = _chunk(heads)
    size = heads * (deep * wide + 2 * chunk * (chunk + deep + wide)) * torch.finfo(request.accumulate_dtype).bits // 8
    operations = counts(request)
    if request.value.device.type == "cuda":  # about six operations per step
        flops = 2 * sum(n for what, n in operations.items() if "product" in what)
        moved = (
            torch.finfo(request.accumulate_dtype).bits
            / 8
            * sum(n for what, n in operations.items() if "number" in what)
        )
        launches = 6 * sum(n for what, n in operations.items() if "step" in what)
        return Estimate(on_gpu(flops, moved, request.accumulate_dtype, launches), size)
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
        return [Block(first, last, start, start + low, _ALL)]
    foot, top = int(rising[0]) + 1, int(rising[-1]) + 1
    if not np.array_equal(length[foot - 1 : top + 1], np.arange(low, high + 1)):
        return None
    if low and foot == 1:  # one row of the first length is also a step
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
    """`out_i = scale sum_j <query_i, key_j> value_j` over the in-neighbors j of i in the blocks.

    Args:
        query: [B, N, G, R, F]: R heads share each of G states. key: [B, M, G, P, F]. value: [B, M, G, P, D]; P
            sources per node. blocks: the fields of all `Block`s, concatenated.

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
        if block.extent == _ALL:
            for start, stop in _steps(block.start, block.stop, step):
                state.baddbmm_(_cut(key, start, stop, wide).mT, _cut(value, start, stop, wide), alpha=scale)
            for first, last in _steps(block.first, block.last, step):
                add(first, last, _cut(query, first, last, wide) @ state)
            continue
        shift = block.start - block.first
        rows = _steps(block.first, block.last, step)
        for first, last in rows if block.extent == _PAST else reversed(rows):
            q = _cut(query, first, last, wide)
            k, v = (_cut(x, first + shift, last + shift, wide) for x in (key, value))
            logits = _mask(q @ k.mT, last - first, block.extent)
            add(first, last, torch.baddbmm(q @ state, logits, v, alpha=scale))
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
    """Each gradient is linear attention again: `sum d_out . out` is symmetric in its four factors."""
    query, key, value = ctx.saved_tensors
    transposed = [number for block in _unflattened(ctx.blocks) for number in block.transposed()]
    needed = ctx.needs_input_grad
    d_query = linear_attention(d_out, value, key, ctx.scale, ctx.blocks).to(query.dtype) if needed[0] else None
    d_key = linear_attention(value, d_out, query, ctx.scale, transposed).to(key.dtype) if needed[1] else None
    d_value = linear_attention(key, query, d_out, ctx.scale, transposed).to(value.dtype) if needed[2] else None
    return d_query, d_key, d_value, None, None


linear_attention.register_autograd(_backward, setup_context=_setup)


def _unflattened(blocks: list[int]) -> list[Block]:
    size = len(Block._fields)
    return [Block(*blocks[i : i + size]) for i in range(0, len(blocks), size)]


def _steps(first: int, last: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, last)) for a in range(first, last, step)]


def _chunk(states: int) -> int:
    """Rows per chunk: more if fewer states advance together, to outweigh the overhead of a step."""
    return min(max(512 // max(states, 1), 64), 256)


def _cut(x: Tensor, first: int, last: int, wide: torch.dtype) -> Tensor:
    """Nodes first to last of x [B, N, G, P, F] as [B * G, nodes * P, F]."""
    return x[:, first:last].to(wide).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _mask(logits: Tensor, nodes: int, extent: int) -> Tensor:
    """Logits [B * G, nodes * R, nodes * P], with zeros where the pair is not an edge."""
    hidden = torch.ones(nodes, nodes, dtype=torch.bool, device=logits.device)
    hidden = hidden.triu(1) if extent == _PAST else hidden.tril(-1)
    view = logits.unflatten(2, (nodes, logits.shape[2] // nodes)).unflatten(1, (nodes, logits.shape[1] // nodes))
    return view.masked_fill(hidden[:, None, :, None], 0.0).view_as(logits)
