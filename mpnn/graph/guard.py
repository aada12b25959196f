"""The guard: whether a tensor is as another one was, in the same modes of torch.

It is the one by which torch decides whether a compiled program serves a call: C++ that takes .3 us. It compares the
class, the dtype, the device, `requires_grad`, sizes and strides, and all keys of the dispatcher, of the tensor and of
this thread. So layouts, pending negations, subclasses, transforms of `torch.func`, autocast, inference mode and tracing
are one comparison, also those that torch adds later. It does not see `no_grad`, nor what `is_special` sees: modes of
functions, fake tensors' mode, forward-mode derivatives and dynamo.

The class is private in torch, and it ends the process if it is constructed wrongly. So `guard` alone constructs it.
Where torch has none, a slower one in Python compares the same.
"""

from collections.abc import Callable, Sequence
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_unary

try:
    from torch._C._dynamo import guards as _of_torch

    TensorGuards: Any = _of_torch.TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None

Lengths = Sequence[int | None]
"""The sizes or strides that a tensor must have; None for a dimension that may have any."""


def guard(x: Tensor, sizes: Lengths | None = None, strides: Lengths | None = None) -> Callable[[Tensor], bool]:
    """Returns the function that says whether another tensor, in the modes that are on then, is as x is now.

    Args:
        sizes, strides: those that the other tensor must have; default: those of x.
    """
    sizes = list(x.shape) if sizes is None else list(sizes)
    strides = list(x.stride()) if strides is None else list(strides)
    if TensorGuards is None:
        return _in_python(x, sizes, strides)
    # Both keywords are needed: without them torch reads memory that is not there.
    check: Callable[[Tensor], bool] = TensorGuards(x, dynamic_dims_sizes=[sizes], dynamic_dims_strides=[strides]).check
    return check


def of_all(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Returns the function that says whether as many other tensors, its arguments, are each as one of these is now."""
    if TensorGuards is None or len(set(map(id, tensors))) < len(tensors):  # torch's refuses the same tensor twice
        checks = list(map(guard, tensors))
        return lambda *others: all(check(x) for check, x in zip(checks, others, strict=True))
    sizes = [list(x.shape) for x in tensors]
    strides = [list(x.stride()) for x in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def of_any_nodes(x: Tensor, strides: Lengths | None = None) -> Callable[[Tensor], bool]:
    """`guard` for tensors of any number of nodes or edges, their first dimension, and of any strides unless given."""
    return guard(x, (None, *x.shape[1:]), (None,) * x.dim() if strides is None else strides)


def is_special(x: Tensor) -> bool:
    """Whether a call is one of those that the guard does not see."""
    return bool(
        has_torch_function_unary(x)
        or x.is_nested  # torch's guard ends the process at a nested tensor that has no strides
        or forward_ad._current_level >= 0
        or torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack()
    )


def is_plain(x: Any) -> bool:
    """Whether x is a tensor of numbers in this process's memory, and no mode is on but those that decide what is
    recorded: a kernel may read it."""
    if type(x) is not Tensor or is_special(x):
        return False
    for fits in _plain_guards(x.dtype, x.dim()):  # noqa: SIM110  # a generator takes as long as the guards
        if fits(x):
            return True
    return False


@cache
def _plain_guards(dtype: torch.dtype, dim: int) -> list[Callable[[Tensor], bool]]:
    """The guards of plain tensors on a CPU: with a gradient or without, made inside or outside of inference mode."""
    guards: list[Callable[[Tensor], bool]] = []
    any_size = [None] * dim

    def build() -> None:
        for is_inference, requires_grad in ((False, False), (False, True), (True, False)):
            if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
                continue
            with torch.inference_mode(is_inference):
                x = torch.empty([1] * dim, dtype=dtype, requires_grad=requires_grad)
            for inside in (False, True):
                with torch.inference_mode(inside):
                    guards.append(guard(x, any_size, any_size))

    # Modes belong to threads: in a new one, none is on.
    thread = Thread(target=build)
    thread.start()
    thread.join()
    return guards


def _in_python(x: Tensor, sizes: Lengths, strides: Lengths) -> Callable[[Tensor], bool]:
    known = _facts(x)

    def check(other: Tensor) -> bool:
        return (
            isinstance(other, Tensor)
            and _facts(other) == known
            and _has_lengths(other.shape, sizes)
            and (other.layout is not torch.strided or _has_lengths(other.stride(), strides))
        )

    return check


def _facts(x: Tensor) -> tuple[Any, ...]:
    """All that a guard compares but for sizes and strides."""
    keys = torch._C._dispatch_keys(x) | torch._C._dispatch_tls_local_include_set()
    keys = keys - torch._C._dispatch_tls_local_exclude_set()
    return type(x), x.dtype, x.device, x.requires_grad, x.dim(), keys.raw_repr()


def _has_lengths(lengths: Sequence[int], wanted: Lengths) -> bool:
    return all(needed is None or length == needed for length, needed in zip(lengths, wanted, strict=True))
