"""The selective scan of Mamba-1: a recurrence with a gate for each channel and state, as a differentiable function of
tensors. `mpnn/kernels/cpu/selective_scan.cpp` computes it on CPU, `cuda/selective_scan.py` next to this file on CUDA.
"""

from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address
from mpnn.kernels.derivatives import Kernel, launch
from mpnn.kernels.memory import empty, zeros
from mpnn.kernels.recurrent import reference
from mpnn.kernels.recurrent.scan import (
    by_triton,
    check_device,
    check_shape,
    check_tensor,
    ends_of,
    is_differentiated,
    refuse_tangents,
)

# of a block of the kernel: others are padded
_CHANNELS = 8
_STATES = 16
_PARTS = 4  # least number of work items of a backward pass, for any number of threads


class _Parameters(Structure):
    """`struct SelectiveScan` of selective_scan.cpp, which describes the fields."""

    _fields_ = (
        *library.fields(c_int64, "batch nodes channels states"),
        *library.fields(c_void_p, "x dt"),
        *library.fields(c_int64, "x_batch x_node dt_batch dt_node"),
        *library.fields(c_void_p, "A B C state y last starts"),
        *library.fields(c_int64, "documents softplus"),
        *library.fields(c_void_p, "bias D z"),
        *library.fields(c_int64, "z_batch z_node"),
        *library.fields(c_void_p, "d_y d_last d_x d_dt d_A d_B d_C d_state"),
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
    softplus: bool = False,
    bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence (Gu and Dao 2023, arXiv:2312.00752, algorithm 2):

        h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t      y_t = (<h_t, C_t> + D x_t) silu(z_t)      for each channel

    Without gradients, one pass over the nodes computes all of it.

    Args:
        x, dt: [batch, N, channels].
        A: [channels, S], negative. B, C: [batch, N, S].
        state: [batch, channels, S], h before the first node; None for zeros.
        documents: lengths of documents, which sum to N. Each begins with a state of zeros, but the first with `state`.
        softplus: whether the step is softplus(dt + bias) instead of dt + bias. bias, D: [channels], or None for zeros.
        z: [batch, N, channels], or None for no factor.

    Returns:
        y [batch, N, channels] and the last h, [batch, channels, S]; both float32 for 16-bit features.

    Raises:
        ValueError: if shapes do not fit together.
        RuntimeError: if there are no compiled kernels for these tensors.
    """
    for name, tensor, dimensions in (("x", x, 3), ("A", A, 2)):
        check_tensor(name, tensor)
        if tensor.dim() != dimensions:
            raise ValueError(f"{name} must have {dimensions} dimensions; got {list(tensor.shape)}")
    batch, nodes, channels = x.shape
    states = A.shape[-1]
    check_shape("dt", dt, batch, nodes, channels)
    check_shape("A", A, channels, states)
    check_shape("B", B, batch, nodes, states)
    check_shape("C", C, batch, nodes, states)
    check_shape("state", state, batch, channels, states, optional=True)
    ends = ends_of(documents, nodes)
    # Shapes are checked before devices, so that wrong calls read the same everywhere.
    on_gpu = by_triton(x)
    if not on_gpu:
        check_device(x, "selective scans")
    check_shape("bias", bias, channels, optional=True)
    check_shape("D", D, channels, optional=True)
    check_shape("z", z, batch, nodes, channels, optional=True)
    wide = torch.promote_types(x.dtype, torch.float32)
    state = x.new_zeros(batch, channels, states, dtype=wide) if state is None else state.to(wide)
    if not x.numel() or not states:
        return x.new_zeros(batch, nodes, channels, dtype=wide), state
    dt, A = dt.to(wide), A.to(wide)
    bias, D, z = (None if tensor is None else tensor.to(wide) for tensor in (bias, D, z))
    if on_gpu:
        from mpnn.kernels.recurrent.cuda.selective_scan import scan  # imports Triton

        inputs = x, _step(dt, bias, softplus), A.mT, B, C, state.mT
        refuse_tangents(inputs)
        y, last = scan(*inputs, list(ends))
        return _factored(y, x, D, z), last.mT
    x, B, C = (tensor.to(wide) for tensor in (x, B, C))
    starts = np.array([0, *ends], np.int64)
    more_channels = -channels % _CHANNELS
    more_states = -states % _STATES
    # The fused pass reads x, dt and z where they lie and has no gradient. Everything else goes through autograd, with
    # padded channels.
    if is_differentiated() or more_channels:
        step = _step(dt, bias, softplus)
        scanned = _padded(x, more_channels), _padded(step, more_channels)
        rest = _padded(B, more_states), _padded(C, more_states)
        A, state = (_padded(y, more_states, more_channels).mT for y in (A, state))
        again = partial(reference.selective_scan, list(ends))
        y, last = launch(_KERNEL, starts, again, *scanned, A, *rest, state)
        return _factored(y[..., :channels], x, D, z), last.mT[:, :channels, :states]
    B, C, A, state = (_padded(y, more_states) for y in (B, C, A, state))
    x, dt = (y if y.stride(-1) == 1 else y.contiguous() for y in (x, dt))
    z = z if z is None or z.stride(-1) == 1 else z.contiguous()
    y, last = _scan((x, dt, A.mT, B, C, state.mT), starts, softplus, bias, D, z)
    return y, last.mT[:, :, :states]


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if softplus else dt


def _factored(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = y if D is None else torch.addcmul(y, x.to(y.dtype), D)
    return y if z is None else y * F.silu(z)


def _padded(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def _forward(starts: Any, needs: Sequence[bool], *tensors: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    """Of x, dt [batch, N, channels], A [S, channels], B, C [batch, N, S], state [batch, S, channels], in whole
    blocks."""
    return _scan([tensor.contiguous().resolve_neg() for tensor in tensors], starts), ()


def _gradients(
    starts: Any, needs: Sequence[bool], tensors: Sequence[Any], saved: Any, d_y: Tensor | None, d_last: Tensor | None
) -> list[Tensor | None]:
    tensors = x, _, A, B, _, state = [tensor.contiguous().resolve_neg() for tensor in tensors]
    p = _parameters(tensors, starts)
    d_y = torch.zeros_like(x) if d_y is None else d_y.contiguous().resolve_neg()
    d_last = None if d_last is None else d_last.contiguous().resolve_neg()
    # The parts depend on shapes and not on threads: d_B and d_C are sums over parts, whose bits they decide.
    parts = min(p.channels // _CHANNELS, -(-_PARTS // p.batch))
    d_x, d_dt, d_A = (empty(x, *shape) for shape in (x.shape, x.shape, (p.batch, *A.shape)))
    (d_B, d_C), d_state = (zeros(x, parts, *B.shape) for _ in range(2)), empty(x, *state.shape)
    p.d_y, p.d_last = address(d_y), address(d_last)
    p.d_x, p.d_dt, p.d_A, p.d_B, p.d_C, p.d_state = map(address, (d_x, d_dt, d_A, d_B, d_C, d_state))
    library.run("selective_scan_backward", x.dtype, p, p.batch, parts)
    return [d_x, d_dt, d_A.sum(0), d_B.sum(0), d_C.sum(0), d_state]


_KERNEL = Kernel(_forward, _gradients)


def _scan(
    tensors: Sequence[Tensor],
    starts: Any,
    softplus: bool = False,
    bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the last state [batch, S, channels]."""
    tensors = [*tensors[:2], *(tensor.contiguous() for tensor in tensors[2:])]
    x, *_, state = tensors = [tensor.resolve_neg() for tensor in tensors]
    bias, D = (None if tensor is None else tensor.contiguous().resolve_neg() for tensor in (bias, D))
    z = None if z is None else z.resolve_neg()
    y, last = empty(x, *x.shape), empty(x, *state.shape)
    p = _parameters(tensors, starts)
    p.y = address(y)
    p.last = address(last)
    p.softplus = softplus
    p.bias, p.D, p.z = map(address, (bias, D, z))
    p.z_batch, p.z_node = (0, 0) if z is None else z.stride()[:2]
    library.run("selective_scan", y.dtype, p, p.batch, min(p.channels // _CHANNELS, 4 * torch.get_num_threads()))
    return y, last


def _parameters(tensors: Sequence[Tensor], starts: Any) -> _Parameters:
    """Returns the parameters of both passes. They hold addresses only: the caller keeps the tensors."""
    x, dt, A, B, C, state = tensors
    p = _Parameters(*x.shape, len(A), address(x), address(dt), *x.stride()[:2], *dt.stride()[:2])
    p.A, p.B, p.C, p.state = map(address, (A, B, C, state))
    p.starts = starts.ctypes.data
    p.documents = len(starts) - 1
    return p
