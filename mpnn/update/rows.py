"""Functions that map each row of a tensor by itself. Large tensors go through all steps a block at a time, so that
nothing between the steps is kept for the backward pass (`kernels/rows/edge_sum.py`). There it is computed again, so a
training step that has the memory keeps it instead."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mpnn.kernels.rows import edge_sum
from mpnn.update.maps import Linear, linear

_OF_ROWS = (nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.ELU, nn.Identity)


_CALL = nn.Module.__call__
_FORWARD: dict[type, Any] = {
    kind: kind.forward for kind in (Linear, nn.Linear, nn.Sequential, nn.LayerNorm, nn.Dropout)
}
"""The code of classes in whose place others compute, as it was imported."""

KEPT = 1 << 28
"""Bytes between the steps of a function that a training step keeps rather than computing them again: 256 MiB."""


def mapped(f: Any, x: Tensor) -> Tensor:
    """`f(x)`, x [..., R, D] -> [..., R, F]. In blocks of rows, if f is known to map each by itself, x is large, and no
    gradients are wanted or f keeps more than `KEPT` bytes for them."""
    known = row_function(f) if x.numel() > edge_sum.BLOCK else None
    if known is None or not edge_sum.serves(x, *known[1]):
        return f(x)
    if torch.is_grad_enabled() and _bytes_kept(x, known[1]) <= KEPT:
        return f(x)
    out: Tensor = edge_sum.row_map(known[0], x.reshape(-1, x.shape[-1]), *known[1])
    return out.view(*x.shape[:-1], out.shape[-1])


def _bytes_kept(x: Tensor, parameters: tuple[Tensor, ...]) -> int:
    """About what the steps of a function keep: two tensors for each of its maps, one before an activation."""
    rows = x.numel() // max(1, x.shape[-1])
    return rows * x.element_size() * sum(2 * len(p) for p in parameters if p.dim() == 2)


def row_function(f: Any) -> tuple[edge_sum.RowFunction, tuple[Tensor, ...]] | None:
    """A module or function as a function of rows and of parameters, and the parameters; None if it is not known to map
    each row by itself, in the same way each time. A class is known, too, if it has a method `row_function`."""
    if f is None or f is torch.relu:
        return f or (lambda z: z), ()
    if not isinstance(f, nn.Module) or is_hooked(f):
        return None
    if type(f) is nn.Sequential:
        parts = [part for part in map(row_function, f) if part is not None]

        def chain(z: Tensor, *parameters: Tensor) -> Tensor:
            for function, own in parts:
                z = function(z, *parameters[: len(own)])
                parameters = parameters[len(own) :]
            return z

        return (chain, tuple(p for _, own in parts for p in own)) if len(parts) == len(f) else None
    if isinstance(f, nn.Linear) and is_plain(f):
        return linear, (f.weight,) if f.bias is None else (f.weight, f.bias)
    if type(f) is nn.LayerNorm and len(f.normalized_shape) == 1 and f.bias is not None:
        shape = f.normalized_shape
        eps = f.eps
        return (lambda z, weight, bias: F.layer_norm(z, shape, weight, bias, eps)), (f.weight, f.bias)
    if "row_function" in vars(type(f)):  # not inherited: a subclass may compute another function
        return f.row_function()  # type: ignore[operator]
    return (f.forward, ()) if type(f) in _OF_ROWS and not getattr(f, "inplace", False) else None  # z is read again


def is_plain(linear: nn.Module) -> bool:
    """Whether this computes `W x + b` of plain tensors and nothing else: it is not quantized, adapted (LoRA) or
    hooked."""
    is_map = type(linear) in (Linear, nn.Linear) and type(linear.weight) in (Tensor, nn.Parameter)
    return is_map and not is_hooked(linear)


def is_hooked(f: nn.Module) -> bool:
    """Whether a call does more than `forward` of the class as it was imported: it has hooks, all modules have (torch's
    global hooks), it has a `forward` of its own (accelerate), if this is not said to compute the same
    (`integrations/maps.py`), or its class was patched."""
    kind = type(f)
    hooks = f._forward_hooks, f._forward_pre_hooks, f._backward_hooks, f._backward_pre_hooks
    own = vars(f)
    hooked = any(hooks) or bool(_has_any_global_hook())
    patched = kind.__call__ is not _CALL or kind.forward is not _FORWARD.get(kind, kind.forward)
    return hooked or patched or ("forward" in own and not getattr(own["forward"], "computes_the_same", False))
