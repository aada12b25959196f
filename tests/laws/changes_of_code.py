"""Changes of what runs: hooks, modules, methods, classes, functions of files, and numbers that are attributes."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from changes import (
    LOOSE,
    OF_GRADIENTS,
    WHERE_READ,
    WITHOUT_EFFECT,
    WITHOUT_GRADIENTS,
    Nothing,
    change,
    scaled,
    spots_of,
    weights_of,
)
from things import HAS_TRANSFORMERS
from torch import Tensor, nn
from torch.nn.modules import module as hooks

# Hooks.


def _scale_in_place(x: Any) -> None:
    if isinstance(x, Tensor) and x.is_floating_point() and not torch.is_grad_enabled():
        x.mul_(1.2)
    elif type(x) in (tuple, list):
        for part in x:
            _scale_in_place(part)


def _hooked(module: nn.Module, register: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Each of some modules with a hook, in turn; then none."""
    for spot in spots_of(module):
        handle = register(spot)
        yield
        handle.remove()


@change()
def outputs_are_replaced_by_hooks(module: nn.Module) -> Iterator[None]:
    yield from _hooked(module, lambda spot: spot.register_forward_hook(lambda m, i, o: scaled(o)))


@change(WITHOUT_GRADIENTS)
def outputs_are_written_by_hooks(module: nn.Module) -> Iterator[None]:
    yield from _hooked(module, lambda spot: spot.register_forward_hook(lambda m, i, o: _scale_in_place(o)))


@change()
def hooks_read_keywords_and_are_always_called(module: nn.Module) -> Iterator[None]:
    def scale(module: Any, args: Any, options: Any, out: Any) -> Any:
        return scaled(out)

    yield from _hooked(
        module, lambda spot: spot.register_forward_hook(scale, with_kwargs=True, prepend=True, always_call=True)
    )


@change(WHERE_READ)
def inputs_are_replaced_by_hooks(module: nn.Module) -> Iterator[None]:
    yield from _hooked(
        module,
        lambda spot: spot.register_forward_pre_hook(
            lambda m, args, options: (
                scaled(args),
                {k: v if k.endswith("mask") else scaled(v) for k, v in options.items()},
            ),
            with_kwargs=True,
        ),
    )


@change(OF_GRADIENTS)
def gradients_are_replaced_by_hooks_of_modules(module: nn.Module) -> Iterator[None]:
    yield from _hooked(module, lambda spot: spot.register_full_backward_hook(lambda m, i, o: scaled(i)))
    yield from _hooked(module, lambda spot: spot.register_full_backward_pre_hook(lambda m, o: scaled(o)))


@change(OF_GRADIENTS)
def gradients_are_replaced_by_hooks_of_weights(module: nn.Module) -> Iterator[None]:
    learned = [weight for weight in weights_of(module) if weight.requires_grad]
    if not learned:
        raise Nothing("it learns nothing")
    handles = [weight.register_hook(scaled) for weight in learned]
    yield
    for handle in handles:
        handle.remove()


def _globally_hooked(module: nn.Module, register: Callable[[Callable[..., Any]], Any], argument: int) -> Iterator[None]:
    """A hook of all modules that scales one of its arguments, for some modules in turn."""
    for spot in spots_of(module):
        handle = register(lambda *given, spot=spot: scaled(given[argument]) if given[0] is spot else None)
        try:
            yield
        finally:
            handle.remove()


@change()
def outputs_are_replaced_by_a_global_hook(module: nn.Module) -> Iterator[None]:
    yield from _globally_hooked(module, hooks.register_module_forward_hook, 2)


@change(WHERE_READ)
def inputs_are_replaced_by_a_global_hook(module: nn.Module) -> Iterator[None]:
    yield from _globally_hooked(module, hooks.register_module_forward_pre_hook, 1)


@change(OF_GRADIENTS)
def gradients_are_replaced_by_a_global_hook(module: nn.Module) -> Iterator[None]:
    yield from _globally_hooked(module, hooks.register_module_full_backward_hook, 1)
    yield from _globally_hooked(module, hooks.register_module_full_backward_pre_hook, 1)


# Modules and code.


class Scaled(nn.Module):
    """A module whose results are multiplied."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return scaled(self.inner(*args, **options))


@change(WHERE_READ)
def a_module_inside_is_replaced(module: nn.Module) -> Iterator[None]:
    for spot in spots_of(module):
        for parent, name in [(p, n) for p in module.modules() for n, child in p._modules.items() if child is spot]:
            try:
                setattr(parent, name, Scaled(spot))
            except TypeError:  # an operator takes no other attention
                continue
            yield
            setattr(parent, name, spot)


@change()
def a_module_gets_a_forward_of_its_own(module: nn.Module) -> Iterator[None]:
    for spot in spots_of(module):
        before = spot.forward
        spot.forward = lambda *args, before=before, **options: scaled(before(*args, **options))
        yield
        if isinstance(before, types.MethodType):
            del spot.forward
        else:
            spot.forward = before


@change()
def the_forward_of_a_class_is_patched(module: nn.Module) -> Iterator[None]:
    for kind in {type(spot): None for spot in spots_of(module)}:
        before = kind.forward

        def forward(self: Any, *args: Any, before: Any = before, **options: Any) -> Any:
            return scaled(before(self, *args, **options))

        with mock.patch.object(kind, "forward", forward):
            yield


@change()
def the_call_of_a_class_is_patched(module: nn.Module) -> Iterator[None]:
    for kind in {type(spot): None for spot in spots_of(module)}:
        before = kind.__call__

        def call(self: Any, *args: Any, before: Any = before, **options: Any) -> Any:
            return scaled(before(self, *args, **options))

        with mock.patch.object(kind, "__call__", call):
            yield


@change()
def a_module_gets_another_class(module: nn.Module) -> Iterator[None]:
    for spot in spots_of(module):
        before = type(spot)

        def forward(self: Any, *args: Any, before: Any = before, **options: Any) -> Any:
            return scaled(before.forward(self, *args, **options))

        spot.__class__ = type(f"Own{before.__name__}", (before,), {"forward": forward, "__module__": before.__module__})
        yield
        spot.__class__ = before


@change(WHERE_READ)
def each_number_of_a_module_in_turn_is_set(module: nn.Module) -> Iterator[None]:
    """Epsilons, scales, slopes, limits: all floats that are attributes."""
    found = {}
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name != "p" and (type(value) is float or _are_numbers(value)):
                found.setdefault((type(inner), name), []).append(inner)
    if not found:
        raise Nothing("its modules have no numbers")
    for (_, name), inner in found.items():
        for one in inner:
            value = getattr(one, name)
            setattr(one, name, 2 * value + 0.1 if type(value) is float else type(value)(2 * x for x in value))
        yield


def _are_numbers(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(type(x) is float for x in value)


@change(WHERE_READ)
def functions_of_the_file_are_patched(module: nn.Module) -> Iterator[None]:
    """Those that return tensors, one after the other, where other libraries patch them."""
    files = {sys.modules[kind.__module__] for inner in module.modules() for kind in type(inner).__mro__}
    of_others = [file for file in files if file.__name__.startswith(("transformers.models.", "torch_geometric.nn."))]
    if not of_others:
        raise Nothing("its code is ours or torch's")
    for file in sorted(of_others, key=lambda file: file.__name__):
        for name, function in list(vars(file).items()):
            if type(function) is types.FunctionType and not name.startswith("_") and name not in replaced_functions():

                def patched_function(*args: Any, function: Any = function, **options: Any) -> Any:
                    return scaled(function(*args, **options))

                with mock.patch.object(file, name, patched_function):
                    yield


def replaced_functions() -> set[str]:
    """The functions of transformers in whose place `mpnn.hf.use` puts its own."""
    if not HAS_TRANSFORMERS:
        return set()
    from mpnn.integrations.hf import recurrences

    return {"eager_attention_forward", "repeat_kv", *recurrences._KNOWN}


@change(LOOSE, WHERE_READ)
def dropout_is_set_and_it_trains(module: nn.Module) -> Iterator[None]:
    found = [inner for inner in module.modules() if isinstance(inner, nn.Dropout)]
    named = [inner for inner in module.modules() if type(vars(inner).get("dropout")) is float]
    if not found and not named:
        raise Nothing("it has no dropout")
    module.train()
    yield
    for inner in found:
        inner.p = 0.5
    for inner in named:
        inner.dropout = 0.5
    yield


@change(WITHOUT_EFFECT)
def it_trains_and_does_not(module: nn.Module) -> None:
    module.train()
    module.eval()
