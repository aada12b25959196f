"""Attention over the tiles of a structured graph on CUDA: FlexAttention (Dong et al. 2024), driven by runs.

FlexAttention usually evaluates a predicate on all pairs to build a block mask. Here a graph's runs determine which
tiles are empty, full or partial, in time and memory linear in the runs. Inside partial tiles all graphs use the same
predicate: whether the source is in one of the destination's runs, which are tensors that the compiled kernel reads.
Another topology or another length therefore runs the same compiled program. Only the largest number of runs per row,
rounded up to a power of two, is a constant of the program.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

SIDE = 128  # of a tile
MAX_RUNS = 16  # per row; the predicate compares them one by one

Listed = tuple[Tensor, Tensor]
"""Selected tiles per row of tiles: their number, int32 [1, 1, rows], and columns, int32 [1, 1, rows, columns]."""


def blocks(start: Tensor, stop: Tensor, partial: Listed, full: Listed, num_src: int) -> Any:
    """Torch's `BlockMask` of a graph with the runs start, stop, int32 [R, N_dst]; runs may be empty."""
    from torch.nn.attention.flex_attention import BlockMask

    def is_edge(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = (start[0, i] <= j) & (j < stop[0, i])
        for r in range(1, start.shape[0]):
            inside = inside | ((start[r, i] <= j) & (j < stop[r, i]))
        return inside

    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=SIDE, mask_mod=is_edge, seq_lengths=(start.shape[1], num_src)
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    softcap: float | None,
    scale: float,
    mask: Any,
    *,
    compiled: bool = True,
) -> Tensor:
    """Out [B, N_dst, H, DV] of query [B, N_dst, H, D], key and value [B, N_src, H_kv, D or DV]; differentiable.

    table [H, N_dst + N_src - 1] by i - j + N_src - 1 is added to the logits. `mask` is the result of `blocks`.
    `compiled=False` runs the same definition unfused, with all logits in memory, for tests.
    """
    run = _compiled() if compiled else _plain()
    out = run(
        *(x.transpose(1, 2) for x in (query, key, value)),
        score_mod=_score_mod(table, softcap, key.shape[1]),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def _score_mod(table: Tensor | None, softcap: float | None, num_src: int) -> Any:
    """FlexAttention's `score_mod`: softcap and table applied to a logit."""
    if table is None and softcap is None:
        return None
    if table is None:
        return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
    last = torch.full(
        (), num_src - 1, dtype=torch.int32, device=table.device
    )  # a tensor, so that it is not a constant of the program
    if softcap is None:
        return lambda score, b, h, i, j: score + table[h, i - j + last]
    return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap) + table[h, i - j + last]


@cache
def _compiled() -> Any:
    return torch.compile(_plain(), dynamic=True)


def _plain() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention
