"""Attention within groups of different sizes in one call, on CUDA: torch's flash kernel for packed sequences.

`torch.nn.attention.varlen` calls the same operator through Python, which takes as long as the kernel over a hundred
texts, and in torch 2.11 it does not let heads share keys, as the kernel does.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.kernels.derivatives import refuse_second_derivatives

MAX_WIDTH = 256  # of a head, in the flash kernel


def runs_here(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel supports these features."""
    narrow = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    return narrow and query.shape[-1] == value.shape[-1] <= MAX_WIDTH and query.shape[-1] % 8 == 0


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dst_starts: Tensor,
    src_starts: Tensor,
    most_dst: int,
    most_src: int,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Out [N_dst, H, D] of query [N_dst, H, D], key and value [N_src, H_kv, D], within groups.

    dst_starts, src_starts: int32 [groups + 1], as `starts`. most_dst, most_src: the sizes of the largest group.
    `causal`: the last node of a group attends to all of its sources, and each one before to one less.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, dst_starts, src_starts, most_dst, most_src, 0.0, causal, False, scale=scale
    )[0]
    return refuse_second_derivatives(out)


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Out [B, N_dst, H, D] of query [B, N_dst, H, D], key and value [B, N_src, H_kv, D] over all pairs, without the
    choices that torch's scaled dot product attention makes in each call."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, query.shape[1], key.shape[1], 0.0, False, False, scale=scale
    )[0]
    return refuse_second_derivatives(out)


def starts(sizes: Tensor, batch: int) -> Tensor:
    """The start of each group and the end of the last one (`cu_seqlens`), int32 [batch * groups + 1]; the groups are
    repeated for each item of the batch."""
    return F.pad(sizes.repeat(batch).cumsum(0), (1, 0)).to(torch.int32)
