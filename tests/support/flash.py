"""A loop over groups in place of torch's flash kernel for packed sequences, which runs on a GPU only."""

import torch
from torch import Tensor


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
    """As `kernels/dense/varlen.py:packed`. Checks what the kernel does not: that groups are all nodes, and the most."""
    num_dst, num_src = dst_starts.diff(), src_starts.diff()
    assert (dst_starts.dtype, src_starts.dtype) == (torch.int32, torch.int32)
    assert (int(dst_starts[-1]), int(src_starts[-1])) == (len(query), len(key))
    assert (int(num_dst.max()), int(num_src.max())) == (most_dst, most_src)
    shared = query.shape[1] // key.shape[1]
    parts = []
    splits = (x.split(n.tolist()) for x, n in ((query, num_dst), (key, num_src), (value, num_src)))
    for q, k, v in zip(*splits, strict=True):
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        logits = scale * torch.einsum("ihd,jhd->hij", q, k)
        if causal:
            last = torch.arange(len(q))[:, None] + len(k) - len(q)
            logits = logits.masked_fill(torch.arange(len(k)) > last, -torch.inf)
        parts.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), v))
    return torch.cat(parts)
