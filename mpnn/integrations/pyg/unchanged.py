"""Whether a convolution in place is still the one that its replacement computes.

A replacement stands for the code of a class of PyTorch Geometric. So this code, the convolution's attributes and its
aggregation decide whether a call runs here. The decision is made once, with a `Witness` of what it was made from, and
later calls ask the witness alone. What a class computes is the functions that it had when this library was imported,
and the functions of PyTorch Geometric that these call, such as `gcn_norm` and `scatter`.
"""

import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from mpnn.graph.witness import Unwatchable, Witness, names_in


class _Decision(NamedTuple):
    """Whether a convolution of this class with these attributes runs here, as long as the witness holds."""

    kind: type
    state: dict[str, Any]
    witness: Witness
    is_same: bool


_MOST = 2  # decisions of a convolution: a loop may train and evaluate in turn
_DECISIONS: WeakKeyDictionary[nn.Module, tuple[_Decision, ...]] = WeakKeyDictionary()
_CODE: dict[type, dict[str, Any]] = {}
_CALLED: dict[type, list[tuple[dict[str, Any], str, Any]]] = {}
"""The functions that the code of a class calls: the globals in which each is found, its name, and what it was."""
_AS_IMPORTED: dict[Any, tuple[Any, ...]] = {}
"""The code and the defaults of these functions."""
_HOOKS_OF_ALL = frozenset(vars(nn.Module()))


def decided(conv: Any) -> bool:
    """Whether calls of a convolution in place compute what its replacement does."""
    known = _DECISIONS.get(conv, ())
    for kind, state, witness, is_same in known:
        if kind is conv.__class__ and state is conv.__dict__ and witness.holds():
            return is_same
    try:
        witness = _witness(conv)
    except Unwatchable:
        return False
    # A decision that a change in another thread overlaps is of neither state: the witness would not hold then.
    decision = _Decision(type(conv), vars(conv), witness, type(conv).decide(conv))
    _DECISIONS[conv] = (decision, *known[: _MOST - 1])
    return decision.is_same


def _witness(conv: Any) -> Witness:
    """Reads what a decision is made from: the attributes of the convolution, its aggregation, the code of both."""
    witness = Witness()
    witness.outline(conv)
    witness.state(conv.aggr_module)
    witness.code(_has_any_global_hook)
    for part in (conv, *conv.aggr_module.modules()):
        kind = _remembered(part)
        for name, value in _CODE.get(kind, {}).items():
            witness.attribute(kind, name)
            witness.function(_function(value))
        for namespace, name, value in _CALLED.get(kind, ()):
            witness.entry(namespace, name)
            witness.function(value)
    return witness


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Returns a class and all classes derived from it, those that no package exports among them."""
    yield kind
    for derived in kind.__subclasses__():
        yield from subclasses(derived)


def remember(kinds: Iterable[type]) -> None:
    """Keeps the functions of classes of PyTorch Geometric that a call runs, as what they compute."""
    for kind in kinds:
        code: dict[str, Any] = {}
        names = ["forward", "__call__"]
        while names:
            name = names.pop()
            value = getattr(kind, name, None)
            if name not in code and _module(value).startswith("torch_geometric"):
                code[name] = value
                names += names_in(_function(value).__code__)
        _CODE[kind] = code
        _CALLED[kind] = _called(map(_function, code.values()))
        for value in (*map(_function, code.values()), *(value for _, _, value in _CALLED[kind])):
            _AS_IMPORTED[value] = _code_of(value)


def _called(functions: Iterable[types.FunctionType]) -> list[tuple[dict[str, Any], str, Any]]:
    """The functions of PyTorch Geometric that functions name, and those that these name."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    todo = [*functions]
    while todo:
        function = todo.pop()
        namespace = function.__globals__
        for name in names_in(function.__code__):
            value = namespace.get(name)
            place = id(namespace), name
            if not isinstance(value, types.FunctionType) or place in found:
                continue
            if _module(value).startswith("torch_geometric"):
                found[place] = (namespace, name, value)
                todo.append(value)
    return [*found.values()]


def change_of(part: nn.Module) -> str | None:
    """Which functions of a convolution or an aggregation, or called by them, are not those as they were imported, or
    None."""
    kind = _remembered(part)
    code = _CODE.get(kind, {})
    if own := [name for name in code if name in vars(part)]:
        return f"{', '.join(own)} set on the instance"
    generated = f"{kind.__module__}_{kind.__name__}_"
    for name, value in code.items():
        now = getattr(kind, name, None)
        if now is not value and not _module(now).startswith(generated):
            return f"{name} of {kind.__name__} changed"
        if _AS_IMPORTED[_function(value)] != _code_of(_function(value)):
            return f"the code of {name} of {kind.__name__} changed"
    for namespace, name, value in _CALLED.get(kind, ()):
        if namespace.get(name) is not value or _AS_IMPORTED[value] != _code_of(value):
            return f"{name} of {namespace['__name__']} changed"
    return None


def has_hooks(part: nn.Module) -> bool:
    """Whether a module of PyTorch Geometric has hooks that its replacement does not call. Those that all modules have
    are called with a convolution, but not with an aggregation."""
    is_called = _HOOKS_OF_ALL if hasattr(part, "propagate") else ()
    return any(value for name, value in vars(part).items() if name.endswith("hooks") and name not in is_called)


def _remembered(part: nn.Module) -> type:
    """The class of PyTorch Geometric whose code a module or its replacement has."""
    return next((kind for kind in type(part).__mro__ if kind in _CODE), type(part))


def _function(value: Any) -> Any:
    return getattr(value, "fget", value)


def _code_of(function: Any) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _module(value: Any) -> str:
    """The module in which a function or a property was written. A wrapper may claim another one as its `__module__`."""
    function = _function(value)
    return str(function.__globals__["__name__"]) if isinstance(function, types.FunctionType) else ""
