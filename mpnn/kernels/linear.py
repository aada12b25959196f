"""A linear map by oneDNN, which torch contains: y = x W^T + b, a differentiable function of tensors.

torch computes `F.linear` in float32 by MKL, which leaves AVX-512 unused on processors of AMD. oneDNN uses it. It reads
W as it is, or in a packed layout, which is quicker for a few rows and takes as long to write as some fifty. The
products of a step read what they get:

    dx = dy W,   dW = dy^T x,   db = sum_rows dy

A call without gradients keeps the packed copy of a parameter. Neither `Tensor._version` nor a hook tells whether the
parameter is the same in the next call: fused optimizers and writes through `.data` (EMA, merges of LoRA) raise no
version. So each call compares a digest of its numbers, an eighth of the cost of packing (`cpu/digest.cpp`).
"""

from collections.abc import Callable
from ctypes import Structure, addressof, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mpnn.kernels.cpu import library

Chosen = Callable[[int, int, int, bool], bool]
"""Whether oneDNN computes a product, by its rows, depth and width, and whether its operands are transposed."""

MAX_BYTES = 1 << 30
"""The most memory that packed copies take. Weights beyond it are packed in each call without gradients."""


@cache
def why_missing() -> str | None:
    """The reason why oneDNN cannot be used here, or None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return f"torch {torch.__version__} has no packed products (torch.ops.mkldnn)"
    return None


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a b^T + bias`, [M, N], for a [M, K], b [N, K] and bias [N]: float32 on CPU, of any strides, M, K, N > 0."""
    rows, columns = b.stride()
    is_matrix = (columns == 1 and rows >= b.shape[1]) or (rows == 1 and columns >= len(b))
    return _by_onednn(a, b if is_matrix else b.contiguous(), bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Chosen, parameter: Tensor | None = None) -> Tensor:
    """`x W^T + b`, [M, N], with x [M, K], weight [N, K], bias [N] or None: float32 on CPU.

    Args:
        chosen: which products of the backward pass oneDNN computes. Second derivatives are torch's.
        parameter: the weight or its transpose, if the packed copy may be kept for it.
    """
    if needs_grad(x, weight, bias):
        _kept.pop(weight if parameter is None else parameter, None)  # its next step changes it
        out: Tensor = _Linear.apply(x, weight, bias, chosen)
        return out
    if parameter is None:
        return product(x, weight, bias)
    packed = _kept_copy(parameter, weight, len(x))
    return _by_onednn(x, packed, bias)


def needs_grad(*operands: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Chosen) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chosen = chosen
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (rows, depth), width = x.shape, len(weight)
        by_torch = torch.is_grad_enabled() or _is_batch(d_out)  # create_graph=True, is_grads_batched=True
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            quick = not by_torch and ctx.chosen(rows, width, depth, False)
            d_x = product(d_out, weight.t()) if quick else d_out @ weight
        if ctx.needs_input_grad[1]:
            quick = not by_torch and ctx.chosen(width, rows, depth, True)
            d_weight = product(d_out.t(), x.t()) if quick else d_out.t() @ x
        return d_x, d_weight, d_out.sum(0) if ctx.needs_input_grad[2] else None, None


def _is_batch(gradient: Tensor) -> bool:
    """Whether this stands for several gradients, which kernels cannot read."""
    return torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(gradient)


def _pack(weight: Tensor, rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight, rows)
    return packed


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a weight that is packed, or a matrix whose rows or columns are contiguous."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


# ------------------------------------------------------------------------------------------------ packed copies


class _Copy(NamedTuple):
    """A packed copy, and what the weight was: its shape and the digest of its numbers."""

    packed: Tensor
    shape: torch.Size
    digest: bytes
    bytes: int


_kept = WeakIdKeyDictionary()  # parameter -> _Copy


def can_keep(parameter: Tensor) -> bool:
    """Whether a packed copy of this weight may be kept: it outlives the call, and a digest of it can be computed."""
    return type(parameter) is nn.Parameter and parameter.is_contiguous() and library.why_missing() is None


def _kept_copy(parameter: Tensor, weight: Tensor, rows: int) -> Tensor:
    """The packed weight, kept for its parameter as long as this has the same numbers."""
    digest, copy = digest_of(parameter), _kept.get(parameter)
    if copy is not None and copy.digest == digest and copy.shape == weight.shape:
        packed: Tensor = copy.packed
        return packed
    packed, size = _pack(weight, rows), weight.numel() * weight.element_size()
    _kept.pop(parameter, None)
    if size + sum(other.bytes for other in _kept.values()) <= MAX_BYTES:
        _kept[parameter] = _Copy(packed, weight.shape, digest, size)
    return packed


class _Digest(Structure):
    """`struct Digest` of digest.cpp."""

    _fields_ = (("x", c_void_p), ("count", c_int64), ("out", c_void_p))


def digest_of(x: Tensor) -> bytes:
    """A digest of the numbers of a contiguous float32 tensor, which depends on the threads that torch uses."""
    parts = torch.get_num_threads()
    out = (c_int64 * (8 * parts))()
    library.run("digest", torch.float32, _Digest(x.data_ptr(), x.numel(), addressof(out)), parts=parts)
    return bytes(out)
