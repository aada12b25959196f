"""Attention layers of transformers that torch's kernel computes, because the graph of their mask would be a new one in
each call: a new token attends to a slice of its keys, or to those that are not padding. To make a graph takes longer
than the kernel over a hundred tokens. The same holds for short texts whose pairs are given or have a bias, and where a
device has the numbers of a mask.

Features are query [B, H, queries, D], key [B, H_kv, keys, D] and value [B, H_kv, keys, D_v].
"""

import torch
from torch import Tensor

from mpnn.backends import dense
from mpnn.integrations.hf.masks import Pairs
from mpnn.integrations.hf.offset_bias import OffsetBias
from mpnn.integrations.hf.packing import Packing
from mpnn.kernels.dense import varlen

_FEW = 128  # keys up to which the reshaping takes as long as it saves, on a CPU
_SHORT = 1 << 15
"""Pairs of a batch up to which their mask or bias is written out: a graph takes longer to prepare than this saves."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, scale: float | None, by_offset: OffsetBias | None
) -> Tensor | None:
    """Out [B, queries, H, D_v]; None where a graph is faster."""
    if query.shape[2] > 1 and not _takes_several(query, key, pairs, by_offset):
        return None
    key, value = pairs.cut(key, value)
    scale = _scale(query, scale)
    if query.shape[2] == 1:
        out = _of_one_query(query, key, value, scale, _row(query, key, pairs, by_offset))
    else:
        mask = pairs.allowed if by_offset is None else by_offset.pairs(pairs.is_causal, query)
        out = dense.sdpa(query, key, value, scale, mask, pairs.is_causal and by_offset is None)
    return (out if pairs.empty is None else out.masked_fill(pairs.empty, 0.0)).transpose(1, 2)


def is_fastest(query: Tensor) -> bool:
    """Whether no kernel is faster than torch's: for features of 16 bits on a GPU."""
    return query.is_cuda and query.dtype.itemsize == 2


def _takes_several(query: Tensor, key: Tensor, pairs: Pairs, by_offset: OffsetBias | None) -> bool:
    """Whether several queries are computed here: with a mask that is written out, or a bias that is."""
    if by_offset is None:
        return pairs.allowed is not None or is_fastest(query)
    queries = query.shape[2]
    keys = key.shape[2]
    is_whole = pairs.allowed is None and pairs.empty is None and pairs.start == 0 and pairs.stop in (None, keys)
    fits = is_whole and (by_offset.queries, by_offset.keys) == (queries, keys)
    return fits and not torch.is_grad_enabled() and query.shape[0] * queries * keys <= _SHORT


def pairs_of(mask: Tensor, query: Tensor, keys: int) -> Pairs | None:
    """A mask of few pairs, bool [B, 1, queries, keys or more], as the kernel takes it; None where a graph is faster,
    where a token attends to nothing, and for other masks."""
    is_of_pairs = mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1
    if not is_of_pairs or not query.is_cpu or query.shape[0] * query.shape[2] * keys > _SHORT:
        return None
    mask = mask[..., :keys]
    return Pairs(allowed=mask) if bool(mask.any(-1).all()) else None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    texts: Packing,
    longest: int | None = None,
) -> Tensor | None:
    """Out [1, T, H, D_v] within packed texts of one row; None where torch's kernel does not take this. With the length
    of the longest one, no length is read."""
    scale = _scale(query, scale)
    if scale <= 0 or not varlen.runs_here(query, value):
        return None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    ends = texts.cu_seqlens(query.device).to(torch.int32)
    longest = texts.longest if longest is None else int(longest)
    return varlen.packed(q, k, v, ends, ends, longest, longest, scale, is_causal)[None]


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


def _row(query: Tensor, key: Tensor, pairs: Pairs, by_offset: OffsetBias | None) -> Tensor | None:
    """Returns the bias of the logits of one query, [B or 1, H or 1, 1, keys]; None for zeros."""
    if by_offset is None:
        return None if pairs.allowed is None else pairs.added(query.dtype)
    row = by_offset.row(pairs.start, key.shape[2], query)
    return row if pairs.allowed is None else row + pairs.added(query.dtype)


def _of_one_query(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Out [B, H, 1, D_v]."""
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    if mask is None and scale > 0 and varlen.runs_here(query, value):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return varlen.whole(q, k, v, scale).transpose(1, 2)
    if groups == heads or (mask is None and key.shape[2] <= _FEW):
        return dense.sdpa(query, key, value, scale, mask, False)
    # The heads that share keys are rows of one product.
    rows = query.reshape(batch, groups, heads // groups, width)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])
    out = dense.sdpa(rows, key, value, scale, mask, False)
    return out.reshape(batch, heads, 1, value.shape[3])
