"""The changes by their names, which kinds there are, and what they find in a module.

A change is a function of a module. A generator changes it step by step: after each `yield` the module is called, or
what was yielded in its place, and once more behind the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Change = Callable[[Any], Any]


class Nothing(Exception):
    """A thing has nothing that a change could change."""


CHANGES: dict[str, Change] = {}
WITHOUT_EFFECT: set[Change] = set()
"""Changes that must not change a result."""
LOOSE: set[Change] = set()
"""Changes after which a peer may draw other random numbers, or round in other places."""
BEFORE_A_CALL: set[Change] = set()
"""Changes that come before the first call."""
OF_GRADIENTS: set[Change] = set()
"""Changes that gradients alone show."""
WITHOUT_GRADIENTS: set[Change] = set()
"""Changes that autograd refuses."""
WHERE_READ: set[Change] = set()
"""Changes of what is found in a thing, which may not read it."""
COARSE: set[Change] = set()
"""Changes after which numbers are rounded to 16 bits."""


def change(*kinds: set[Change]) -> Callable[[Change], Change]:
    """Enters a change under its name, and in these sets."""

    def enter(function: Change) -> Change:
        CHANGES[function.__name__.replace("_", " ")] = function
        for kind in kinds:
            kind.add(function)
        return function

    return enter


def other(x: Tensor) -> Tensor:
    """Other numbers of the same kind."""
    return 1.2 * x.detach() + 0.05


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    found = [weight for weight in module.parameters() if weight.is_floating_point() and weight.numel()]
    if not found:
        raise Nothing("it has no weights")
    return found


def owners_of(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Each weight with the module that has it, and its name there; tied ones each time."""
    found = [(owner, name) for owner in module.modules() for name in owner._parameters]
    held = [(owner, name, owner._parameters[name]) for owner, name in found]
    if not held:
        raise Nothing("it has no weights")
    return [(owner, name, x) for owner, name, x in held if x is not None and x.is_floating_point()]


def spots_of(module: nn.Module, most: int = 4) -> list[Any]:
    """The module and some inside it, of different classes."""
    by_class = {type(inner): inner for inner in reversed(list(module.modules())) if has_code(inner)}
    inner = list(by_class.values())[::-1]
    return [inner[k * len(inner) // most] for k in range(most)] if len(inner) > most else inner


def has_code(module: nn.Module) -> bool:
    return "_forward_unimplemented" not in type(module).forward.__qualname__


def mapped(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """A result with a function of each of its tensors."""
    if isinstance(x, Tensor):
        return function(x)
    if type(x) in (tuple, list):
        return type(x)(mapped(function, part) for part in x)
    return x


def scaled(x: Any) -> Any:
    """The floating point tensors of a result, multiplied."""
    return mapped(lambda x: x * 1.2 if x.is_floating_point() else x, x)
