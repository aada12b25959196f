"""`flash_attn.bert_padding`: from padded rows to one row of all tokens, and back."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` of the first dimension."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows `values` at `indices` of a tensor of `first_axis_dim` rows, others 0."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """The tokens that are not padding, in one row.

    Args:
        hidden_states: [B, N, ...]. attention_mask: [B, N], 1 for a token. unused_mask: [B, N], 1 for a place that is
            kept although no token is there.

    Returns:
        The tokens [T, ...], their indices among B * N, cu_seqlens int32 [B + 1], the longest length, and the number of
        tokens of each row without unused places, int32 [B].
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = hidden_states.flatten(0, 1).index_select(0, indices)
    return tokens, indices, cu_seqlens, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: [batch, seqlen, ...], zeros where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
