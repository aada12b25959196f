"""Vectors by class, for a backend that holds a number for each pair: tables meet queries and weights before pairs do.

A table of R vectors is multiplied with all queries at once, [N_dst, R], and a pair picks its number by its class; on
the way to values, weights are summed by class and then multiplied with the table. No vector is written out for a pair.
Where classes are offsets the picking is a view: row i of the products begins one place further left than row i - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def products(x: Tensor, table: Tensor, numbers: Tensor | None = None) -> Tensor:
    """`<x_i, table_r> + numbers_r`, [..., H, S, R] of x [..., H, S, D], table [R, 1 or H, D], numbers [R, 1 or H]."""
    by_head = x.movedim(-3, 0)
    vectors = table.expand(-1, len(by_head), -1).permute(1, 2, 0)
    if numbers is None:
        found = torch.bmm(by_head.flatten(1, -2), vectors)
    else:
        found = torch.baddbmm(numbers.expand(-1, len(by_head)).mT[:, None], by_head.flatten(1, -2), vectors)
    return found.view(*by_head.shape[:-1], len(table)).movedim(0, -3)


def mixed(x: Tensor, table: Tensor) -> Tensor:
    """`sum_r x_ir table_r`, [..., H, S, D] of x [..., H, S, R] and table [R, 1 or H, D]."""
    return x @ table.transpose(0, 1)


def picked(x: Tensor, ids: Tensor) -> Tensor:
    """The number of each pair by its class, [..., C, H, S, T] of x [..., C, H, S, R] and ids int64 [C, S, T]."""
    return x.gather(-1, ids[:, None].expand(*x.shape[:-1], ids.shape[-1]))


def picked_by_offset(x: Tensor, clip: int, start: int, columns: int) -> Tensor:
    """The same, [..., S, T] of x [..., S, R], where the class is clamp(j - i, -clip, clip) + clip, R = 2 clip + 1; the
    rows stand at i = start, start + 1, ... and the `columns` at j = 0, 1, .... There is at least one of each."""
    rows = x.shape[-2]
    below, inside, above = _clipped(clip, start, rows, columns)
    numbers = x.narrow(-1, *inside)
    if below or above:
        left, right = x[..., :1].expand(*x.shape[:-1], below), x[..., -1:].expand(*x.shape[:-1], above)
        numbers = torch.cat([left, numbers, right], -1)
    *steps, step, along = numbers.stride()
    first = numbers.storage_offset() + (rows - 1) * along
    return numbers.as_strided((*numbers.shape[:-1], columns), (*steps, step - along, along), first)


def summed(weights: Tensor, ids: Tensor, count: int) -> Tensor:
    """The sum of weights by class, [..., C, H, S, count] of [..., C, H, S, T] and ids int64 [C, S, T]."""
    sums = weights.new_zeros(*weights.shape[:-1], count)
    return sums.scatter_add(-1, ids[:, None].expand(weights.shape), weights)


def _clipped(clip: int, start: int, rows: int, columns: int) -> tuple[int, tuple[int, int], int]:
    """Of all offsets j - i from least to largest: how many lie below a table from -clip to clip, where in it the others
    begin and how many they are, and how many lie above."""
    least, largest, count = 1 - start - rows, columns - 1 - start, rows + columns - 1
    below, above = (min(max(0, beyond), count) for beyond in (-clip - least, largest - clip))
    return below, (min(max(0, clip + least), 2 * clip + 1), count - below - above), above
