"""Vectors by edge type, for a backend that materializes logits for all pairs, without a tensor of pairs x width.

All queries are multiplied with a table of R vectors, [N_dst, R], and each pair selects its product by edge type. For
values, weights are summed by edge type and then multiplied with the table. If edge types are offsets, the selection is
a view: row i of the products begins one position further left than row i - 1.
"""

import torch
from torch import Tensor


def products(x: Tensor, table: Tensor, numbers: Tensor | None = None) -> Tensor:
    """`<x_i, table_r> + numbers_r`, [..., H, S, R] of x [..., H, S, D], table [R, 1 or H, D], numbers [R, 1 or H]."""
    by_head = x.movedim(-3, 0)
    vectors = table.expand(-1, len(by_head), -1).permute(1, 2, 0)
    if numbers is None:
        out = torch.bmm(by_head.flatten(1, -2), vectors)
    else:
        out = torch.baddbmm(numbers.expand(-1, len(by_head)).mT[:, None], by_head.flatten(1, -2), vectors)
    return out.view(*by_head.shape[:-1], len(table)).movedim(0, -3)


def select_by_type(x: Tensor, ids: Tensor) -> Tensor:
    """The number of each pair by edge type, [..., C, H, S, T] of x [..., C, H, S, R] and ids int64 [C, S, T]."""
    return x.gather(-1, ids[:, None].expand(*x.shape[:-1], ids.shape[-1]))


def select_by_offset(x: Tensor, clip: int, start: int, columns: int) -> Tensor:
    """The same, [..., S, T] of x [..., S, R], where the edge type is clamp(j - i, -clip, clip) + clip, R = 2 clip + 1.
    Rows have positions i = start, start + 1, ..., the `columns` j = 0, 1, .... There is at least one of each."""
    rows = x.shape[-2]
    # all offsets j - i, split by the table from -clip to clip: how many are below it, inside, and above
    least = 1 - start - rows
    largest = columns - 1 - start
    count = rows + columns - 1
    below, above = (min(max(0, beyond), count) for beyond in (-clip - least, largest - clip))
    numbers = x.narrow(-1, min(max(0, clip + least), 2 * clip + 1), count - below - above)
    if below or above:
        left, right = x[..., :1].expand(*x.shape[:-1], below), x[..., -1:].expand(*x.shape[:-1], above)
        numbers = torch.cat([left, numbers, right], -1)
    *strides, row_stride, stride = numbers.stride()
    first = numbers.storage_offset() + (rows - 1) * stride
    # Row i + 1 begins one offset to the left of row i, so that a stride reduced by one selects all pairs without a
    # copy.
    return numbers.as_strided((*numbers.shape[:-1], columns), (*strides, row_stride - stride, stride), first)


def sum_by_type(weights: Tensor, ids: Tensor, count: int) -> Tensor:
    """The sum of weights by edge type, [..., C, H, S, count] of [..., C, H, S, T] and ids int64 [C, S, T]."""
    sums = weights.new_zeros(*weights.shape[:-1], count)
    return sums.scatter_add(-1, ids[:, None].expand(weights.shape), weights)
