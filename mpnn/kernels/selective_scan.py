"""The selective scan of Mamba-1: a recurrence with a gate for each channel and state, as a differentiable function of
tensors; on CPU. `mpnn/kernels/cpu/selective_scan.cpp` computes it.
"""

from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.kernels.cpu import library
from mpnn.kernels.memory import empty, zeros
from mpnn.kernels.once_differentiable import once_differentiable
from mpnn.kernels.scan import check_device, check_shape, ends_of

_CHANNELS, _STATES = 8, 16  # of a block of the kernel: others are padded
_PARTS = 4  # least number of work items of a backward pass, for any number of threads


class _Parameters(Structure):
    """`struct SelectiveScan` of selective_scan.cpp, which describes the fields."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "nodes", "channels", "states")),
        *((name, c_void_p) for name in ("x", "dt", "A", "B", "C", "state", "y", "last", "starts")),
        ("documents", c_int64),
        *((name, c_void_p) for name in ("d_y", "d_last", "d_x", "d_dt", "d_A", "d_B", "d_C", "d_state")),
    )


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
    """Mamba's recurrence (Gu and Dao 2023, arXiv:2312.00752, algorithm 2):

        h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t          y_t = <h_t, C_t>          for each channel

    Args:
        x, dt: [batch, N, channels]; dt after softplus.
        A: [channels, S], negative. B, C: [batch, N, S].
        state: [batch, channels, S], h before the first node; None for zeros.
        documents: lengths of documents, which sum to N. Each begins with a state of zeros, but the first with `state`.

    Returns:
        y [batch, N, channels], without `D x` and the factor silu(z), and the last h, [batch, channels, S]; both
        float32 for 16-bit features.

    Raises:
        ValueError: if shapes do not fit together.
        RuntimeError: if there are no compiled kernels for these tensors.
    """
    batch, nodes, channels = x.shape
    states = A.shape[-1]
    check_shape("dt", dt, batch, nodes, channels)
    check_shape("A", A, channels, states)
    check_shape("B", B, batch, nodes, states)
    check_shape("C", C, batch, nodes, states)
    check_shape("state", state, batch, channels, states)
    ends = np.array([0, *ends_of(documents, nodes)])
    check_device(x, "selective scans")
    wide = torch.promote_types(x.dtype, torch.float32)
    state = x.new_zeros(batch, channels, states, dtype=wide) if state is None else state.to(wide)
    if not x.numel() or not states:
        return x.new_zeros(batch, nodes, channels, dtype=wide), state
    x, dt, A, B, C = (tensor.to(wide) for tensor in (x, dt, A, B, C))
    more_channels, more_states = -channels % _CHANNELS, -states % _STATES
    x, dt = _padded(x, more_channels), _padded(dt, more_channels)
    B, C = _padded(B, more_states), _padded(C, more_states)
    A, state = (_padded(y, more_states, more_channels).mT for y in (A, state))
    y, last = _SelectiveScan.apply(x, dt, A, B, C, state, ends)
    return y[..., :channels], last.mT[:, :channels, :states]


def _padded(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


class _SelectiveScan(torch.autograd.Function):
    """x, dt [batch, N, channels], A [S, channels], B, C [batch, N, S], state [batch, S, channels], in whole blocks."""

    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        *tensors, ends = inputs
        tensors = [tensor.contiguous().resolve_neg() for tensor in tensors]
        ctx.save_for_backward(*tensors)
        ctx.ends = ends
        ctx.set_materialize_grads(False)
        y, last = empty(tensors[0], *tensors[0].shape), empty(tensors[0], *tensors[-1].shape)
        p = _parameters(tensors, ends)
        p.y, p.last = y.data_ptr(), last.data_ptr()
        library.run("selective_scan", y.dtype, p, p.batch, p.channels // _CHANNELS)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor | None, d_last: Tensor | None) -> Any:  # type: ignore[no-untyped-def]
        tensors = x, _, A, B, _, state = ctx.saved_tensors
        p = _parameters(tensors, ctx.ends)
        d_y = torch.zeros_like(x) if d_y is None else d_y.contiguous().resolve_neg()
        d_last = None if d_last is None else d_last.contiguous().resolve_neg()
        parts = min(p.channels // _CHANNELS, -(-_PARTS // p.batch))
        d_x, d_dt, d_A = (empty(x, *shape) for shape in (x.shape, x.shape, (p.batch, *A.shape)))
        (d_B, d_C), d_state = (zeros(x, parts, *B.shape) for _ in range(2)), empty(x, *state.shape)
        p.d_y, p.d_last = d_y.data_ptr(), None if d_last is None else d_last.data_ptr()
        p.d_x, p.d_dt, p.d_A, p.d_B, p.d_C, p.d_state = (g.data_ptr() for g in (d_x, d_dt, d_A, d_B, d_C, d_state))
        library.run("selective_scan_backward", x.dtype, p, p.batch, parts)
        return d_x, d_dt, d_A.sum(0), d_B.sum(0), d_C.sum(0), d_state, None


def _parameters(tensors: Sequence[Tensor], ends: Any) -> _Parameters:
    """What both passes read. It holds addresses only: the caller keeps the tensors."""
    x, _, A, *_ = tensors
    p = _Parameters(*x.shape, len(A), *(tensor.data_ptr() for tensor in tensors))
    p.starts, p.documents = ends.ctypes.data, len(ends) - 1
    return p
