"""Modes of torch that change every tensor made inside them, and how a value that outlives a call is built outside.

A graph and its cached values serve later calls, in any mode. A tensor made in `torch.inference_mode` cannot be used in
training, one made in a transform of `torch.func` (grad, jvp, vmap) is a wrapper that dies with the transform, one made
in a `FakeTensorMode` has no numbers, and one made under `torch.device("meta")` or a default device lies there.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorates a function that compiled programs do not trace, as `torch.compiler.disable` does. That one imports
    torch's compiler, which takes about as long as torch itself; this one waits until somebody compiles."""

    untraced: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if untraced:
            return untraced[0](*arguments, **options)
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        # A program that is traced breaks here. The result is kept, because to make it takes 50 us.
        untraced.append(torch.compiler.disable(function))
        return untraced[0](*arguments, **options)

    return cast(F, call)


def outside_modes(build: Callable[[], T]) -> T:
    """Returns `build()`, run outside `torch.inference_mode`, the transforms of `torch.func`, and modes of dispatch."""
    transforms = torch._C._are_functorch_transforms_active()
    dispatched = torch._C._len_torch_dispatch_stack()
    functions = torch._C._len_torch_function_stack()
    if not (transforms or dispatched or functions or torch.is_inference_mode_enabled()):
        return build()  # on a molecule, to leave modes that are not there takes as long as to sort its edges
    recording = torch.is_grad_enabled()  # plans depend on it, and leaving inference mode enables it
    with ExitStack() as modes:
        modes.enter_context(torch._C._DisableFuncTorch())
        modes.enter_context(torch._C.DisableTorchFunction())
        if dispatched:
            modes.enter_context(_disable_current_modes())
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.set_grad_enabled(recording))
        return build()


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is active: kernels cannot run, because they
    read the addresses of tensors."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _transforms() -> set[str]:
    """The names of the active transforms of torch.func, as in `TransformType`."""
    if not torch._C._are_functorch_transforms_active():
        return set()
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return {level.key().name for level in retrieve_all_functorch_interpreters()}


def is_forward_mode() -> bool:
    """Whether derivatives in forward mode are computed (jvp, dual numbers), and no transform differentiates in reverse
    mode at the same time (grad, vjp)."""
    return forward_ad._current_level >= 0 and _transforms() <= {"Jvp", "Vmap"}


def is_differentiated_by_transform() -> bool:
    """Whether one of the active transforms differentiates; vmap does not."""
    return forward_ad._current_level >= 0 or not _transforms() <= {"Vmap"}
