"""Functions that map each row of a tensor by itself. Large tensors go through all steps a block at a time, so that
nothing between the steps is kept for the backward pass (`mpnn/kernels/edge_sum.py`)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpnn.kernels import edge_sum
from mpnn.maps import Linear, linear

Steps = list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]
"""Functions `(rows, *parameters) -> rows`, and the parameters of each."""

_OF_ROWS = (nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.ELU, nn.Identity)


def mapped(f: Any, x: Tensor) -> Tensor:
    """`f(x)`, x [..., R, D] -> [..., R, F]. In blocks of rows, if f is known to map each by itself and x is large."""
    if x.numel() <= edge_sum.BLOCK or (known := steps(f)) is None:
        return f(x)
    functions, parameters = counted(known)
    if not edge_sum.serves(x, *parameters):
        return f(x)
    out: Tensor = edge_sum.RowMap.apply(functions, x.reshape(-1, x.shape[-1]), *parameters)
    return out.view(*x.shape[:-1], out.shape[-1])


def steps(f: Any) -> Steps | None:
    """A function of rows as functions of rows and of parameters; None if it is not known to map each row by itself, in
    the same way each time. A module of another type is known if its class has a method `steps` that returns these."""
    if f is None or f is torch.relu:
        return [] if f is None else [(f, ())]
    if not isinstance(f, nn.Module) or f._forward_hooks or f._forward_pre_hooks:
        return None
    if type(f) is nn.Sequential:
        parts = [steps(part) for part in f]
        return None if None in parts else [step for part in parts for step in part or ()]
    if isinstance(f, nn.Linear) and is_plain(f):
        return [(linear, (f.weight,) if f.bias is None else (f.weight, f.bias))]
    if type(f) is nn.LayerNorm and len(f.normalized_shape) == 1 and f.bias is not None:
        shape, eps = f.normalized_shape, f.eps
        return [(lambda z, weight, bias: F.layer_norm(z, shape, weight, bias, eps), (f.weight, f.bias))]
    if "steps" in vars(type(f)):
        return f.steps()  # type: ignore[operator]
    return [(f.forward, ())] if type(f) in _OF_ROWS else None


def counted(steps: Steps) -> tuple[list[edge_sum.Step], list[Tensor]]:
    """The functions, each with its number of parameters, and the parameters of all, as kernels take them."""
    return [(step, len(own)) for step, own in steps], [p for _, own in steps for p in own]


def joined(steps: Steps) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The steps as one."""
    functions, parameters = counted(steps)
    return lambda x, *of: edge_sum.after(functions, x, of), tuple(parameters)


def is_plain(linear: nn.Module) -> bool:
    """Whether this computes `W x + b` and nothing else: it is not quantized, adapted (LoRA) or hooked."""
    return type(linear) in (Linear, nn.Linear) and not (linear._forward_hooks or linear._forward_pre_hooks)
