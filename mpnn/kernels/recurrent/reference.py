"""Recurrences with gates, the delta rule and selective scans by operations that are differentiable any number of times:
the references of their kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

# nodes whose pairs are in memory; with gates a feature, pairs times features
_CHUNK = 64
_CHUNK_OF_FEATURES = 32
_NO_GATE = -800.0  # its exponential is 0 in float64; with -inf a difference would be NaN


def recurrence(
    scale: float,
    heads: int,
    ends: tuple[int, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out and the last state, chunk by chunk, by operations that are differentiable again."""
    wide = torch.promote_types(query.dtype, torch.float32)

    def heads_first(x: Tensor) -> Tensor:
        """x [B, N, H_kv, F] as [B, H, N, F]."""
        return x.to(wide).repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)

    query, key, value = map(heads_first, (query, key, value))
    gate = torch.zeros((), dtype=torch.float64, device=query.device).expand(*query.shape[:3], 1)
    if log_gate is not None:
        gate = log_gate if log_gate.dim() == 4 else log_gate[..., None]
        gate = gate.double().clamp(min=_NO_GATE).transpose(1, 2)
    rate = None if beta is None else beta.to(wide).transpose(1, 2)[..., None]
    zeros = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    S = zeros if state is None else state.to(wide)
    outs = []
    first = 0
    size = _CHUNK if gate.shape[-1] == 1 else _CHUNK_OF_FEATURES
    for end in ends:
        # Only the first document begins with the caller's state.
        S = S if first == 0 else zeros
        for start in range(first, end, size):
            stop = min(start + size, end)
            q, k, v, L = (x[:, :, start:stop] for x in (query, key, value, gate))
            L = L.cumsum(2)
            before = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).tril()[..., None]
            # The difference is masked before its exponential, which would overflow for pairs that are no edges.
            between = (L[:, :, :, None] - L[:, :, None]).masked_fill(~before, -torch.inf).exp().to(wide)
            from_start, to_end = L.exp().to(wide), (L[:, :, -1:] - L).exp().to(wide)
            if rate is not None:
                b = rate[:, :, start:stop]
                system = b * (k[:, :, :, None] * k[:, :, None] * between).sum(-1).tril(-1)
                system = system + torch.eye(stop - start, dtype=wide, device=q.device)
                v = torch.linalg.solve_triangular(system, b * (v - (k * from_start) @ S), upper=False)
            weights = (q[:, :, :, None] * k[:, :, None] * between).sum(-1)
            outs.append(scale * (weights @ v + (q * from_start) @ S))
            S = from_start[:, :, -1, :, None] * S + (k * to_end).mT @ v
        first = end
    return torch.cat(outs, 2).transpose(1, 2), S


def selective_scan(
    ends: Sequence[int], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The scan node by node, by operations that are differentiable again."""
    outs = []
    h = state
    begins = set(ends[:-1])
    for t in range(x.shape[1]):
        h = torch.zeros_like(state) if t in begins else h
        step = dt[:, t, None]
        h = (step * A).exp() * h + step * x[:, t, None] * B[:, t, :, None]
        outs.append((h * C[:, t, :, None]).sum(1))
    return torch.stack(outs, 1), h
