"""One token of Mamba-2, whose state changes in place, as decoding needs it; on CPU. `mpnn/kernels/cpu/state_update.cpp`
computes it.
"""

from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address
from mpnn.kernels.recurrent.scan import check_device, check_shape, check_tensor


class _Parameters(Structure):
    """`struct StateUpdate` of state_update.cpp, which describes the fields."""

    _fields_ = (
        *library.fields(c_int64, "batch heads groups values keys"),
        *library.fields(c_void_p, "state x z dt A bias D B C out"),
        *library.fields(c_int64, "softplus"),
    )


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    softplus: bool = False,
    bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> Tensor:
    """Adds a token to the states of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), in place:

        S_h <- exp(dt_h A_h) S_h + (dt_h x_h) B^T          out_h = (S_h C + D_h x_h) silu(z_h)

    Args:
        state: [batch, H, values, keys], float32 and contiguous; overwritten.
        x: [batch, H, values]. dt: [batch, H]. A: [H]. B, C: [batch, groups, keys], where groups divide H.
        softplus: whether the step is softplus(dt + bias) instead of dt + bias. bias, D: [H], or None for zeros.
        z: [batch, H, values], or None for no factor.

    Returns:
        out [batch, H, values], float32. Nothing has a gradient.

    Raises:
        ValueError: if shapes do not fit together, or the state is not float32 or not contiguous.
        RuntimeError: if there are no compiled kernels for these tensors.
    """
    for name, given, dimensions in (("state", state, 4), ("B", B, 3)):
        check_tensor(name, given)
        if given.dim() != dimensions:
            raise ValueError(f"{name} must have {dimensions} dimensions; got {list(given.shape)}")
    batch, heads, values, keys = state.shape
    groups = B.shape[1]
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"state must be float32 and contiguous; got {state.dtype} with strides {state.stride()}")
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups of B and C do not divide {heads} heads")
    for name, tensor, *shape in (
        ("x", x, batch, heads, values),
        ("z", z, batch, heads, values),
        ("dt", dt, batch, heads),
        ("A", A, heads),
        ("bias", bias, heads),
        ("D", D, heads),
        ("B", B, batch, groups, keys),
        ("C", C, batch, groups, keys),
    ):
        check_shape(name, tensor, *shape, optional=name in ("z", "bias", "D"))
    check_device(state, "a token of Mamba-2")
    # All but the state are a token's numbers, so that copies of them cost nothing compared with the pass over the
    # state.
    tensors = [t if t is None else t.float().contiguous().resolve_neg() for t in (x, z, dt, A, bias, D, B, C)]
    out = state.new_empty(batch, heads, values)
    p = _Parameters(batch, heads, groups, values, keys, address(state), *map(address, tensors))
    p.out = address(out)
    p.softplus = softplus
    library.run("state_update", torch.float32, p, batch, heads)
    return out
