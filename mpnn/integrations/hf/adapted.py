"""Classes for layers of transformers' models with another forward pass.

A layer keeps its weights, its name and its `save_pretrained`: only its class becomes a subclass of the one that it has.
Pickles and copies know the subclass by the class of transformers.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import update_wrapper
from itertools import count
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from torch import nn


class _Origin(NamedTuple):
    """The class of transformers, and the function that makes a subclass of it; None for the class itself."""

    kind: Any
    build: Callable[[Any], Any] | None


_ORIGINS: dict[type, _Origin] = {}
"""By the subclass."""


def subclass(kind: Any, forward: Callable[..., Any], build: Callable[[Any], Any]) -> Any:
    """A subclass of `kind` with another forward pass. `build(kind)` makes it where a copy is unpickled."""
    methods = {"forward": forward, "__reduce_ex__": _reduce, "__module__": kind.__module__}
    ours = type(kind.__name__, (kind,), methods)
    _ORIGINS[ours] = _Origin(kind, build)
    return ours


def origin(layer: nn.Module) -> _Origin:
    """Where the class of a layer is from."""
    return _ORIGINS.get(type(layer), _Origin(type(layer), None))


def restore(layers: Iterable[nn.Module]) -> None:
    """Gives layers their class of transformers back."""
    for layer in layers:
        layer.__class__ = origin(layer).kind


def _reduce(self: Any, protocol: Any) -> Any:
    _, _, *state = cast(Any, nn.Module.__reduce_ex__(self, protocol))
    return _empty, tuple(origin(self)), *state


def _empty(kind: Any, build: Callable[[Any], Any]) -> Any:
    ours = build(kind)
    return ours.__new__(ours)


# ------------------------------------------------------------------------------- forward passes with other functions


def rebound(function: Any, functions: dict[str, Any]) -> Any:
    """A forward pass with other functions under some of the global names that it calls. Its decorators stay."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names = _names_in_a_module(function.__module__, functions)
        return update_wrapper(_copy(function, names, function.__closure__), function)
    cells = function.__closure__ or ()
    if not any(cell.cell_contents is inner for cell in cells):
        raise ValueError(f"{function.__qualname__} has a decorator that is not known here")
    ours = rebound(inner, functions)
    closure = tuple(CellType(ours) if cell.cell_contents is inner else cell for cell in cells)
    outer = update_wrapper(_copy(function, function.__globals__, closure), function)
    outer.__wrapped__ = ours
    return outer


def _copy(function: Any, names: dict[str, Any], closure: Any) -> Any:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_NUMBERS = count()


def _names_in_a_module(module: str, functions: dict[str, Any]) -> dict[str, Any]:
    """The global names of a module with other functions under some of them. torch.compile looks global names up in
    `sys.modules`, so they are those of a module there."""
    name = f"mpnn_{module.replace('.', '_')}_{next(_NUMBERS)}"
    ours = ModuleType(name)
    names = vars(ours)
    names.update(vars(sys.modules[module]), **functions)
    names["__name__"] = name  # else the copy would take the place of the module itself
    sys.modules[name] = ours
    return names


def called(forward: Any, known: Any) -> list[str]:
    """The names among `known` of functions that a forward pass of transformers calls, inside its decorators."""
    forward = inspect.unwrap(forward)
    if not isinstance(forward, FunctionType) or not forward.__module__.startswith("transformers."):
        return []
    return [name for name in forward.__code__.co_names if name in known and name in forward.__globals__]
