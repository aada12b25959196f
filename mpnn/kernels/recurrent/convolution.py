"""A causal convolution of each channel with a few weights, as a differentiable function of tensors: as many shifted
products, which read and write memory less often than a general convolution."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.kernels.derivatives import Kernel, launch


def short_convolution(x: Tensor, weight: Tensor, documents: Sequence[int] | None = None) -> Tensor:
    """`y_i = sum_{o < K} weight_o x_(i - o)` over the nodes of a document.

    Args:
        x: [..., N, C]. weight: [K, C]; weight[0] is that of the node itself.
        documents: lengths of documents, which sum to N; None for one.

    Returns:
        [..., N, C] in the dtype of `x`.
    """
    inside = None
    if documents is not None and len(documents) > 1:  # the number of each node in its document
        inside = torch.cat([torch.arange(n, device=x.device) for n in documents])
    y: Tensor = launch(_KERNEL, inside, partial(_by_torch, inside), x, weight.to(x.dtype))
    return y


def _forward(inside: Tensor | None, needs: Sequence[bool], x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[()]]:
    y = x * weight[0]
    for o, mask in _shifts(x, weight, inside):
        # The product is added in place: one pass over x and y for each weight, and no new tensor.
        _rows(y, o, None).addcmul_(_rows(x, 0, -o) if mask is None else _rows(x, 0, -o) * mask, weight[o])
    return y, ()


def _gradients(
    inside: Tensor | None, needs: Sequence[bool], tensors: Any, saved: Any, dy: Tensor
) -> list[Tensor | None]:
    x, weight = tensors
    dx = dy * weight[0]
    dw = torch.empty_like(weight)
    leading = list(range(x.dim() - 1))
    dw.zero_()[0] = (dy * x).sum(leading)
    for o, mask in _shifts(x, weight, inside):
        late = _rows(dy, o, None) if mask is None else _rows(dy, o, None) * mask
        _rows(dx, 0, -o).addcmul_(late, weight[o])
        dw[o] = (late * _rows(x, 0, -o)).sum(leading)
    return [dx, dw]


_KERNEL = Kernel(_forward, _gradients)


def _by_torch(inside: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution by operations that are differentiable again."""
    y = x * weight[0]
    for o, mask in _shifts(x, weight, inside):
        # Nothing is written in place: these operations are recorded, to be differentiated again.
        before = _rows(x, 0, -o) if mask is None else _rows(x, 0, -o) * mask
        y = y + F.pad(before * weight[o], (0, 0, o, 0))
    return y


def _shifts(x: Tensor, weight: Tensor, inside: Tensor | None) -> list[tuple[int, Tensor | None]]:
    """The offsets that some node has, and the rows [N - o, 1] whose node at this offset is of the same document."""
    offsets = range(1, min(len(weight), x.shape[-2]))
    return [(o, None if inside is None else (inside[o:, None] >= o).to(x.dtype)) for o in offsets]


def _rows(x: Tensor, first: int, last: int | None) -> Tensor:
    return x[..., first:last, :]
