"""Modes of torch that change every tensor made inside them, and how a value that outlives a call is built outside.

A graph and its cached values serve later calls, in any mode. A tensor made in `torch.inference_mode` cannot be used in
training, and a tensor made in a transform of `torch.func` (grad, jvp, vmap) is a wrapper that dies with the transform.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_modes(build: Callable[[], T]) -> T:
    """Returns `build()`, run outside `torch.inference_mode` and the transforms of `torch.func`."""
    transforms = torch._C._are_functorch_transforms_active()
    if not transforms and not torch.is_inference_mode_enabled():
        return build()  # on a molecule, to leave modes that are not there takes as long as to sort its edges
    with torch._C._DisableFuncTorch():
        if not torch.is_inference_mode_enabled():
            return build()
        recording = torch.is_grad_enabled()  # plans depend on it, and leaving inference mode enables it
        with torch.inference_mode(False), torch.set_grad_enabled(recording):
            return build()
