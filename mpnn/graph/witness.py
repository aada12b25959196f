"""The record of what a fast way has read, to be read again before it runs.

A fast way repeats what a call decided earlier. It is right only while everything that the decision was made from is the
same. So all of that is read through one reader, a `Witness`, which records where it read each object. `holds()` reads
the same places again and compares. What is read is what is watched: there is no list of names, hooks or options.

    witness = Witness()
    witness.module(layer)         what it and its submodules hold and compute: attributes, parameters, hooks, code
    witness.state(options)        attributes of an object, at any depth
    witness.code(function)        the functions, globals and class attributes that its code names
    witness.tensor(angles)        a tensor whose numbers were used
    if witness.holds():
        ...

What cannot be compared is refused when it is read: `Unwatchable` is raised, and there is no fast way.
"""

import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from operator import eq, getitem
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Unwatchable(TypeError):
    """Raised for an object whose changes cannot be seen."""


class Constant:
    """The base of what never changes after it was made, such as a graph, and of what follows from other attributes,
    such as plans. A witness compares it by identity alone."""


class Read(NamedTuple):
    """One place that was read: the attribute or the entry `name` of `owner`, and the object that was there. A name of
    None: the numbers of a tensor."""

    owner: Any
    name: Any
    value: Any


_TABLES = (dict, OrderedDict)
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, range, np.generic, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Size, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.ModuleType, types.MappingProxyType, weakref.ReferenceType, property, staticmethod, classmethod, Constant),
)
_MOST = 4096  # places that a witness reads
_version = Tensor._version.__get__  # type: ignore[attr-defined]


class Witness(Constant):
    """A record of objects that were read, each with its place."""

    def __init__(self) -> None:
        self._containers: list[Any] = []  # dictionaries, lists and sets, which are compared as wholes
        self._copies: list[Any] = []
        self._owners: list[Any] = []  # of attributes
        self._names: list[str] = []
        self._values: list[Any] = []
        self._namespaces: list[dict[str, Any]] = []  # dictionaries of which one entry is compared
        self._keys: list[str] = []
        self._entries: list[Any] = []
        self._tensors: list[Tensor] = []
        self._contents: list[int] = []
        self._seen: dict[tuple[int, ...], Any] = {}  # with the objects, so that their numbers stay their own

    def holds(self) -> bool:
        """Whether reading everything again gives the same objects. Equal numbers and texts are the same."""
        try:
            return (
                all(map(eq, self._containers, self._copies))
                and all(map(eq, map(getattr, self._owners, self._names), self._values))
                and all(map(eq, map(getitem, self._namespaces, self._keys), self._entries))
                and self._contents == self._read_contents()
            )
        except (AttributeError, KeyError, RuntimeError, ValueError):  # it is gone, or is another tensor or array
            return False

    def reads(self) -> Iterator[Read]:
        """Returns all places that were read."""
        for container, copy in zip(self._containers, self._copies, strict=True):
            for name, value in copy.items() if isinstance(copy, dict) else enumerate(copy):
                yield Read(container, name, value)
        yield from map(Read, self._owners, self._names, self._values)
        yield from map(Read, self._namespaces, self._keys, self._entries)
        for x in self._tensors:
            yield Read(x, None, x)

    # ------------------------------------------------------------------------------------------------ what is read

    def module(self, module: nn.Module) -> None:
        """Reads the state of a module and of its submodules, and the code of their classes that a call runs.

        Raises:
            Unwatchable: for an attribute whose changes cannot be seen.
        """
        self.state(module)
        for kind in {type(part) for part in module.modules()}:
            self.attribute(kind, "__call__")
            self.method(kind, "forward")
        self.code(nn.Module.__call__, nn.Module)

    def method(self, kind: type, name: str) -> None:
        """Reads the method that instances of a class have, and its code."""
        self.code(self.attribute(kind, name), kind)

    def state(self, owner: Any) -> None:
        """Reads the class and the attributes of an object, and in the same way the objects that these hold: for a
        module, its parameters, buffers, hooks and submodules too. Of a tensor it reads which one it is.

        Raises:
            Unwatchable: for an attribute whose changes cannot be seen.
        """
        if not self._is_new(owner):
            return
        self.attribute(owner, "__class__")
        slots = [name for kind in type(owner).__mro__ for name in _slots(kind) if hasattr(owner, name)]
        for name in slots:
            self._value(self.attribute(owner, name))
        if hasattr(owner, "__dict__"):
            self._container(vars(owner))
        elif not slots:
            raise Unwatchable(f"changes of a {type(owner).__module__}.{type(owner).__qualname__} are not seen")

    def attributes(self, owner: Any) -> None:
        """Reads the attributes of an object, as `state` does, and keeps no reference to the object itself.

        Raises:
            Unwatchable: for an attribute whose changes cannot be seen.
        """
        self._container(vars(owner))

    def attribute(self, owner: Any, name: str) -> Any:
        """Reads an attribute, and returns it."""
        value = getattr(owner, name)
        self._owners.append(owner)
        self._names.append(name)
        self._values.append(value)
        self._check_size()
        return value

    def tensor(self, x: Tensor) -> Tensor:
        """Reads the numbers of a tensor, and returns it.

        Raises:
            Unwatchable: it is a subclass, or was made in inference mode, where changes have no version.
        """
        if type(x) not in (Tensor, nn.Parameter) or x.is_inference():
            raise Unwatchable(f"changes of a {type(x).__name__} by a subclass or in inference mode are not seen")
        if self._is_new(x):
            self._tensors.append(x)
            self._contents = self._read_contents()
        return x

    def code(self, function: Any, *owners: Any) -> None:
        """Reads a function and what its code names: globals, attributes of modules among them, variables of closures,
        defaults, and attributes of `owners`, the classes whose method it may be. It reads functions of the same file
        among these in the same way, and the attributes of objects of the same package, unless that is torch.
        """
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or not self._is_new(function, *owners):
            return
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.attribute(function, name)
        for cell in function.__closure__ or ():
            self._follow(function, self.attribute(cell, "cell_contents"), owners)
        names = frozenset(_names_in(function.__code__))
        for namespace, name in _places(function.__globals__, names):
            value = self._entry(namespace, name)
            self._follow(function, value, owners)
            if not isinstance(value, _CONSTANTS) and _package(type(value)) == _package(function):
                self._attributes_of(type(value), names, function)
        for owner in owners:
            self._attributes_of(owner, names, function)

    # ------------------------------------------------------------------------------------------------ how

    def _attributes_of(self, owner: Any, names: Iterable[str], function: types.FunctionType) -> None:
        """Reads the attributes of a class that a function names."""
        for name in names:
            if hasattr(owner, name):
                self._follow(function, self.attribute(owner, name), (owner,))

    def _follow(self, function: types.FunctionType, value: Any, owners: Iterable[Any]) -> None:
        """Reads what a function refers to, if it belongs to it."""
        value = getattr(value, "fget", value)  # of a property
        if type(value) in _TABLES:
            self._container(value)
        elif _package(function) == "torch":
            return
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            if value.__module__ == function.__module__:
                self.code(value, *owners)
        elif not isinstance(value, _CONSTANTS) and _package(type(value)) == _package(function):
            self._value(value)

    def _entry(self, namespace: dict[str, Any], name: str) -> Any:
        self._namespaces.append(namespace)
        self._keys.append(name)
        self._entries.append(namespace[name])
        self._check_size()
        return namespace[name]

    def _container(self, container: Any) -> None:
        """Reads a dictionary, a list or a set, and what it holds."""
        if self._is_new(container):
            self._containers.append(container)
            self._copies.append(container.copy())
            self._check_size()
            for value in container.values() if isinstance(container, _TABLES) else container:
                self._value(value)

    def _value(self, value: Any) -> None:
        """Reads an object that lies in another one."""
        if isinstance(value, (*_CONSTANTS, Tensor)):
            return
        if type(value) in (*_TABLES, list, set):
            self._container(value)
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self._value(item)
        elif type(value) is partial:
            self._value((value.func, value.args, tuple(value.keywords.values())))
        else:
            self.state(value)

    def _is_new(self, *objects: Any) -> bool:
        key = tuple(map(id, objects))
        if key in self._seen:
            return False
        self._seen[key] = objects
        return True

    def _check_size(self) -> None:
        if len(self._containers) + len(self._owners) + len(self._namespaces) > _MOST:
            raise Unwatchable(f"it reads more than {_MOST} objects")

    def _read_contents(self) -> list[int]:
        """The address and the version of each tensor."""
        return [*map(Tensor.data_ptr, self._tensors), *map(_version, self._tensors)]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a code, functions inside included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _places(namespace: dict[str, Any], names: frozenset[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a code may find its names: in its globals, and in the modules among them."""
    for name in names & namespace.keys():
        yield namespace, name
        if isinstance(module := namespace[name], types.ModuleType):
            yield from ((vars(module), inner) for inner in names & vars(module).keys())


def _package(owner: Any) -> str:
    return str(getattr(owner, "__module__", None)).partition(".")[0]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))
