"""Linear attention: weights are inner products without a normalizer, so sums over sources do not depend on the
destination. A differentiable function of tensors.

    out_i = scale sum_{j in N(i)} <q_i, k_j> v_j = scale q_i S_i,   S_i = sum_{j in N(i)} k_j^T v_j   [F, D]

(Katharopoulos et al. 2020, eq. 6 and 9 to 12.) On CPU `mpnn/kernels/cpu/linear_attention.cpp` computes it. On other
devices, and where no library was compiled, torch operations do (`_scan`). Both advance in chunks of nodes. Within a
chunk the logits are materialized, so that all work is matrix products; only one S is in memory. NaN in a source can
reach rows of its chunk that do not attend to it.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import fields
from mpnn.kernels.memory import empty

ALL, PAST, FUTURE = range(3)
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of linear_attention.cpp
LOGITS = 36  # per row of a running sum: the average within its chunk
_MIN_COLUMNS = 32  # of an item, if one per state is too few for the threads


class Block(NamedTuple):
    """Rows [first, last) that attend to sources [start, stop). `extent` is `ALL` for all of them. With as many rows as
    sources it can be `PAST`, sources up to the row's own, or `FUTURE`, sources from the row's own on."""

    first: int
    last: int
    start: int
    stop: int
    extent: int

    def transposed(self) -> Block:
        return Block(self.start, self.stop, self.first, self.last, (ALL, FUTURE, PAST)[self.extent])


@torch.library.custom_op("mpnn::linear_attention", mutates_args=())
def linear_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[int]) -> Tensor:
    """`out_i = scale sum_j <query_i, key_j> value_j` over the in-neighbors j of i in the blocks.

    Args:
        query: [B, N, G, R, F]: R heads share each of G states. key: [B, M, G, P, F]. value: [B, M, G, P, D]; P
            sources per node. blocks: the fields of all `Block`s, concatenated.

    Returns:
        [B, N, G, R, D], float32 for 16-bit features.
    """
    scan = _compiled_scan if query.device.type == "cpu" and library.why_missing() is None else _scan
    return scan(query, key, value, scale, _unflattened(blocks))


@linear_attention.register_fake
def _(query, key, value, scale, blocks):  # type: ignore[no-untyped-def]
    return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=_wide(query))


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


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Features(Structure):
    _fields_ = (("data", c_void_p), *fields(c_int64, "type batch node group head"))


class _Parameters(Structure):
    """`struct LinearAttention` of linear_attention.cpp, which describes the fields."""

    _fields_ = (
        *fields(c_int64, "groups heads sources num_dst width value_width"),
        ("scale", c_double),
        *fields(_Features, "query key value"),
        *fields(c_void_p, "out blocks"),
        ("num_blocks", c_int64),
    )


def _compiled_scan(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[Block]) -> Tensor:
    batch, nodes, groups, heads, width = query.shape
    out = empty(query.new_empty(0, dtype=_wide(query)), batch, nodes, groups, heads, value.shape[-1])
    if not out.numel():
        return out
    ordered, rest = _in_order(blocks, nodes)
    for first, last in rest:
        out[:, first:last] = 0
    if not blocks or not key.numel():
        return out.zero_()
    query, key, value = (x.resolve_neg() if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    columns = value.shape[-1]
    parts = min(-(-torch.get_num_threads() // (batch * groups)), -(-columns // _MIN_COLUMNS))
    p = _Parameters(
        *(groups, heads, key.shape[3], nodes, width, columns, scale),
        *(_Features(x.data_ptr(), _TYPES.index(x.dtype), *x.stride()[:4]) for x in (query, key, value)),
        *(out.data_ptr(), ordered.ctypes.data, len(ordered)),
    )
    library.run("linear_attention", out.dtype, p, batch * groups, parts)
    return out


def _in_order(blocks: list[Block], nodes: int) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """The fields of each block, and whether it adds to rows that an earlier block wrote [blocks, 6]; and the rows to
    be zeros before: those that no block writes."""
    written, touched, ordered = np.zeros(nodes + 2, bool), np.zeros(nodes, bool), []
    for block in blocks:
        rows = slice(block.first, block.last)
        adds = bool(touched[rows].any())
        touched[rows] = True
        if not adds:
            written[block.first + 1 : block.last + 1] = True
        ordered.append((*block, int(adds)))
    written[[0, -1]] = True
    ends = np.flatnonzero(np.diff(written))
    return np.array(ordered, np.int64).reshape(-1, 6), list(zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True))


def _scan(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[Block]) -> Tensor:
    batch, nodes, groups, heads = query.shape[:-1]
    deep, wide = value.shape[-1], _wide(query)
    out = query.new_zeros(batch, nodes, groups, heads, deep, dtype=wide)
    step = _chunk(batch * groups)

    def add(first: int, last: int, part: Tensor) -> None:
        out[:, first:last] += part.view(batch, groups, last - first, heads, deep).transpose(1, 2)

    for block in blocks:
        state = query.new_zeros(batch * groups, query.shape[-1], deep, dtype=wide)
        if block.extent == ALL:
            for start, stop in _steps(block.start, block.stop, step):
                state.baddbmm_(_cut(key, start, stop, wide).mT, _cut(value, start, stop, wide), alpha=scale)
            for first, last in _steps(block.first, block.last, step):
                add(first, last, _cut(query, first, last, wide) @ state)
            continue
        shift = block.start - block.first
        rows = _steps(block.first, block.last, step)
        for first, last in rows if block.extent == PAST else reversed(rows):
            q = _cut(query, first, last, wide)
            k, v = (_cut(x, first + shift, last + shift, wide) for x in (key, value))
            logits = _mask(q @ k.mT, last - first, block.extent)
            add(first, last, torch.baddbmm(q @ state, logits, v, alpha=scale))
            state.baddbmm_(k.mT, v, alpha=scale)
    return out


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
    hidden = hidden.triu(1) if extent == PAST else hidden.tril(-1)
    view = logits.unflatten(2, (nodes, logits.shape[2] // nodes)).unflatten(1, (nodes, logits.shape[1] // nodes))
    return view.masked_fill(hidden[:, None, :, None], 0.0).view_as(logits)
