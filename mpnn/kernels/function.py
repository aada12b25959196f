"""Autograd functions that `torch.func` transforms: forward-mode derivatives (jvp) and vmap.

    jvp      a subclass computes the tangents of its outputs by another function, which is differentiable in turn
    vmap     a call for each entry of the batch, because kernels read the addresses of plain tensors

Second tangents, and gradients of tangents, are those of an equal function of differentiable operations:
`tangents_again`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def apply_of(kind: type[torch.autograd.Function], tensors: Iterable[Tensor]) -> Callable[..., Any]:
    """Returns `kind.apply` for tensors like these, as a guard says. Unless a transform of torch.func wraps one of
    them, or has wrapped it, no call looks for wrappers, which takes as long as a step's look-up."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if torch._C._are_functorch_transforms_active() or any(map(is_wrapped, tensors)):
        return kind.apply
    apply: Callable[..., Any] = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    return apply


class Function(torch.autograd.Function):
    """An autograd function with `forward(*inputs)`, `setup_context(ctx, inputs, output)`, `backward`, and
    `tangents(ctx, saved, *tangents)` -> those of the outputs, where `saved` is what `setup_context` saved for it.

    Arguments have no defaults. Tensors that depend on features are arguments, or items of tuples that are: transforms
    do not find them in other objects.
    """

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return custom_function_call(cls, *inputs)
        # Torch's own `apply` binds arguments to a signature first, which takes 70 us.
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(inputs))  # type: ignore[misc]

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        # Torch disables forward mode here for all levels, and a jvp of a jvp would lose the outer tangents. So it is
        # enabled, and what was saved gets no tangent of this level.
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [None if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            return cls.tangents(ctx, saved, *tangents)  # type: ignore[attr-defined]

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *inputs: Any) -> Any:
        leaves, form = tree_flatten(inputs)
        dims = tree_leaves(in_dims)
        results = []
        for entry in range(info.batch_size):
            chosen = [x if dim is None else x.select(dim, entry) for x, dim in zip(leaves, dims, strict=True)]
            results.append(cls.apply(*tree_unflatten(chosen, form)))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = [None if of_all[0] is None else torch.stack(of_all) for of_all in zip(*results, strict=True)]
        return tuple(stacked), tuple(None if x is None else 0 for x in stacked)


def tangents_again(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The tangents of a function's outputs, which can be differentiated any number of times.

    Args:
        function: of the tensors, made of differentiable operations; returns a tuple of outputs, None for absent ones.
        tangents: those of the tensors, None for one that is 0.
    """
    moving = [k for k, tangent in enumerate(tangents) if tangent is not None]
    present: list[bool] = []

    def of_moving(*moved: Tensor) -> tuple[Tensor, ...]:
        values = list(tensors)
        for k, x in zip(moving, moved, strict=True):
            values[k] = x
        outputs = function(*values)
        present[:] = [x is not None for x in outputs]
        return tuple(x for x in outputs if x is not None)

    outputs, gradients, *_ = torch.func.vjp(of_moving, *(tensors[k] for k in moving))
    # The gradients are linear in those of the outputs, and the tangents are their transpose.
    _, transposed, *_ = torch.func.vjp(gradients, tuple(map(torch.zeros_like, outputs)))
    (found,) = transposed(tuple(tangents[k] for k in moving))
    of_outputs = iter(found)
    return [next(of_outputs) if is_present else None for is_present in present]
