"""Recurrences, one node after the other: the twins of `scan` and `selective_scan` in `mpnn/kernels/recurrent`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def starts_of(documents: Sequence[int] | None) -> set[int]:
    """The first node of each document but the first."""
    lengths = [n for n in documents or () if n]
    return {sum(lengths[:n]) for n in range(1, len(lengths))}


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float = 1.0,
    documents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The arguments and results of `mpnn.kernels.recurrent.scan.recurrence`."""
    numbers = [x for x in (query, key, value, log_gate, beta) if x is not None]
    heads = max([x.shape[2] for x in numbers] + ([] if state is None else [state.shape[1]]))
    query, key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key, value))
    batch, nodes, _, width = query.shape
    new = query.new_zeros(batch, heads, width, value.shape[-1])
    S, out = new if state is None else state, []
    for i in range(nodes):
        S = new if i in starts_of(documents) else S
        if log_gate is not None:
            gate = log_gate[:, i].exp()
            S = S * (gate[..., None, None] if gate.dim() == 2 else gate[..., None])
        u = value[:, i]
        if beta is not None:
            u = beta[:, i, :, None] * (u - torch.einsum("bhf,bhfd->bhd", key[:, i], S))
        S = S + key[:, i, :, :, None] * u[:, :, None]
        out.append(scale * torch.einsum("bhf,bhfd->bhd", query[:, i], S))
    return torch.stack(out, 1), S


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    *,
    documents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The arguments and results of `mpnn.kernels.recurrent.selective.selective_scan`."""
    new = x.new_zeros(len(x), *A.shape)
    h, out = new if state is None else state, []
    for t in range(x.shape[1]):
        h = new if t in starts_of(documents) else h
        h = (dt[:, t, :, None] * A).exp() * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        out.append((h * C[:, t, None]).sum(-1))
    return torch.stack(out, 1), h
