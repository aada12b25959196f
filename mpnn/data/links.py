"""Converts undirected links to directed edges."""

from collections.abc import Iterable

import torch
from torch import Tensor


def both_directions(links: Iterable[tuple[int, int]]) -> Tensor:
    """Two edges for each link: int64 `[2, E]`, row 0 is src, row 1 dst, ordered by dst, then src.

    Duplicates and self-loops are dropped.
    """
    proper = {(i, j) for i, j in links if i != j}
    dst_src = sorted(proper | {(j, i) for i, j in proper})
    return torch.tensor(dst_src, dtype=torch.int64).reshape(-1, 2).T.flip(0)
