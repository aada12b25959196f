"""Changes of who is called, and where: copies, other weights for one call, threads, default dtypes, autocast."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import torch
from changes import BEFORE_A_CALL, COARSE, LOOSE, WHERE_READ, Nothing, change, has_code, other, weights_of
from changes_of_weights import weights_are_copied_over, weights_are_written_through_numpy
from torch import nn


class Functional(nn.Module):
    """A module called with other weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module
        self.__dict__["tensors"] = {
            name: other(x).requires_grad_(x.requires_grad) for name, x in module.named_parameters()
        }
        vars(self).update({f"weight {name}": x for name, x in self.tensors.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def forward(self, *args: Any, **options: Any) -> Any:
        return torch.func.functional_call(self.module, self.tensors, args, options, tie_weights=False)


@change(WHERE_READ)
def it_is_called_with_other_weights(module: nn.Module) -> Iterator[Any]:
    weights_of(module)
    if not has_code(module):
        raise Nothing("it is called by a name of its own")
    yield Functional(module)


def _shallow(module: nn.Module) -> Any:
    """A copy that shares all but its modules and weights."""
    twin = copy.copy(module)
    twin._parameters = {name: None if x is None else nn.Parameter(other(x)) for name, x in module._parameters.items()}
    twin._modules = {name: None if child is None else _shallow(child) for name, child in module._modules.items()}
    return twin


@change()
def a_shallow_copy_gets_other_weights(module: nn.Module) -> Iterator[Any]:
    weights_of(module)
    yield _shallow(module)


@change()
def a_copy_gets_other_weights(module: nn.Module) -> Iterator[Any]:
    twin = copy.deepcopy(module)
    weights_are_copied_over(twin)
    yield twin


@change()
def a_pickled_copy_gets_other_weights(module: nn.Module) -> Iterator[Any]:
    twin = pickle.loads(pickle.dumps(module))
    weights_are_copied_over(twin)
    yield twin


class Threaded(nn.Module):
    """A module that another thread calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__["_modules"].get("module")
        return found if name == "module" else getattr(found, name)

    def forward(self, *args: Any, **options: Any) -> Any:
        results: list[Any] = []
        mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.set_grad_enabled
        is_on = True if mode is torch.inference_mode else torch.is_grad_enabled()

        def run() -> None:
            try:
                with mode(is_on):
                    results.append(self.module(*args, **options))
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]


@change()
def another_thread_calls_it(module: nn.Module) -> Iterator[Any]:
    if not has_code(module):
        raise Nothing("it is called by a name of its own")
    weights_are_copied_over(module)
    yield Threaded(module)
    thread = threading.Thread(target=weights_are_written_through_numpy, args=(module,))
    thread.start()
    thread.join()


@change(BEFORE_A_CALL)
def the_default_dtype_has_16_bits(module: nn.Module) -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
        weights_are_copied_over(module)
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@change(COARSE, LOOSE, WHERE_READ)
def autocast_is_on(module: nn.Module) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield
