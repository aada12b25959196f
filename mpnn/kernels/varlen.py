"""Attention within groups of different sizes in one call, on CUDA: torch's flash kernel for packed sequences."""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_WIDTH = 256  # of a head, in the flash kernel


def runs_here(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel supports these features."""
    narrow = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] == value.shape[-1] <= MAX_WIDTH and query.shape[-1] % 8 == 0
    return narrow and fits and find_spec("torch.nn.attention.varlen") is not None


def attention(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, largest: int, scale: float) -> Tensor:
    """Out [..., N, H, D] of query [..., N, H, D], key and value [..., N, H_kv, D], with nodes sorted by group.

    sizes: int64 [groups], with sum N. largest: the largest size, passed as an int to avoid a synchronization.
    """
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = starts(sizes, query.shape[:-3].numel())
    flat = (x.flatten(0, -3) for x in (query, key, value))
    grouped = query.shape[-2] != key.shape[-2]
    out = varlen_attn(*flat, cu_seqlens, cu_seqlens, largest, largest, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out.view(query.shape)


def starts(sizes: Tensor, batch: int) -> Tensor:
    """The start of each group and the end of the last one (`cu_seqlens`), int32 [batch * groups + 1]; the groups are
    repeated for each item of the batch."""
    return F.pad(sizes.repeat(batch).cumsum(0), (1, 0)).to(torch.int32)
