"""Rows in another order, whose gradient is a copy too: torch's own adds row by row to zeros."""

from torch import Tensor

from mpnn.kernels.derivatives import is_recorded
from mpnn.kernels.linear_map import linear_map


def permute(x: Tensor, order: Tensor, inverse: Tensor, dim: int) -> Tensor:
    """Returns `x.index_select(dim, order)` for an order [N] of all N rows along `dim`, and its inverse. It can be
    differentiated any number of times."""
    if not (is_recorded() and x.requires_grad):
        return x.index_select(dim, order)
    return linear_map(x, lambda x: x.index_select(dim, order), lambda d_out: permute(d_out, inverse, order, dim))
