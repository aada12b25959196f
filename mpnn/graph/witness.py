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

A layer of a transformer is a thousand entries of dictionaries, and to compare them would take as long as what the fast
way saves. But a dictionary of Python has a version, which moves with each change of it. torch's guards read it, and so
does a witness: it compares the entries of those dictionaries alone whose version moved.
"""

import gc
import sys
import types
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

try:
    from torch._C._dynamo.guards import dict_version
except ImportError:
    dict_version = None  # type: ignore[assignment]


class Unwatchable(TypeError):
    """Raised for an object whose changes cannot be seen."""


class Constant:
    """The base of what never changes after it was made, such as a graph, and of what follows from other attributes,
    such as plans. A witness compares it by identity alone."""


LENGTH = "len()"
"""The name of a read of how many entries a dictionary, a list or a set has."""


class Read(NamedTuple):
    """One place that was read: the attribute or the entry `name` of `owner`, and the object that was there. A name of
    None: the numbers of a tensor. A name of `LENGTH`: the number of entries."""

    owner: Any
    name: Any
    value: Any


_TABLES = (dict, OrderedDict)
_CONTAINERS = (*_TABLES, list, set)
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, range, np.generic, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Size, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.ModuleType, types.MappingProxyType, weakref.ReferenceType, property, staticmethod, classmethod, Constant),
)
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class that Python's `class` statement made
_OWN = __name__.partition(".")[0]
_MOST = 4096  # objects that a witness reads
_version = Tensor._version.__get__  # type: ignore[attr-defined]
_code_of = attrgetter("__code__")
_defaults_of = attrgetter("__defaults__")


class _Probe:
    """An object whose attributes `_moves_with_changes` changes."""

    number = 0

    def store(self, number: int) -> None:
        self.number = number


def _moves_with_changes(version: Callable[[Any], int] | None) -> bool:
    """Whether this gives the version of a dictionary, also of one whose entries are stored as attributes of an object.
    It does not in Python 3.13.0, which stores attributes without a word to those that watch the dictionary."""
    if version is None:
        return False
    table: dict[str, int] = {"a": 1}
    versions = [version(table), version(table)]
    table["a"] = 2
    versions.append(version(table))
    del table["a"]
    versions.append(version(table))
    if len(set(versions)) < 3 or versions[0] != versions[1]:
        return False
    probe = _Probe()
    probe.store(-1)
    attributes = vars(probe)
    # Python specializes a statement that ran often enough.
    for number in range(100):
        before = version(attributes)
        probe.store(number)
        if version(attributes) == before:
            return False
    before = version(attributes)
    del probe.number
    return version(attributes) != before


_next = count().__next__


def _new_version(table: Any) -> int:
    """Stands for the version where there is none: entries are compared each time."""
    return _next()


_version_of = dict_version if _moves_with_changes(dict_version) else _new_version


class _Table:
    """Entries of a dictionary, all or some of them. `owner`: the dictionary, or the class whose attributes it holds."""

    def __init__(self, entries: dict[str, Any], owner: Any) -> None:
        self.entries = entries
        self.owner = owner
        self.known: dict[Any, Any] = {}
        self.is_whole = False

    def keep_all(self) -> None:
        self.is_whole = True
        self.known = self.entries.copy()

    def holds(self) -> bool:
        """Whether the same objects are there."""
        entries = self.entries
        if self.is_whole and len(entries) != len(self.known):
            return False
        return all(name in entries and _is_same(entries[name], value) for name, value in self.known.items())


class Witness(Constant):
    """A record of objects that were read, each with its place."""

    def __init__(self) -> None:
        self.unread: list[Tensor] = []
        """Tensors that were met, of which the numbers were not read: a witness sees which one is there."""
        self.of_calls: list[tuple[dict[str, Any], str]] = []
        """Entries of dictionaries that each call reads itself, such as parameters. A witness does not compare them."""
        self._tables: list[_Table] = []
        self._dicts: list[dict[str, Any]] = []  # those of the tables
        self._versions = array("Q")
        self._empty: list[Any] = []  # dictionaries, lists and sets
        self._lists: list[Any] = []  # lists and sets
        self._lengths: list[int] = []
        self._items: list[Any] = []  # of all of them
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._functions: list[Any] = []
        self._codes: list[Any] = []
        self._defaults: list[Any] = []
        self._owners: list[Any] = []  # of attributes
        self._names: list[str] = []
        self._values: list[Any] = []
        self._known: list[Any] | None = None  # kinds, codes, defaults and values; None: not put together
        self._others: list[Read] = []  # attributes that hold neither numbers nor texts nor code
        self._tensors: list[Tensor] = []
        self._contents: list[int] = []
        self._seen: dict[tuple[int, ...], Any] = {}  # with the objects, so that their numbers stay their own
        self._by_id: dict[int, _Table] = {}

    def holds(self) -> bool:
        """Whether reading everything again gives the same objects. Equal numbers and texts are the same."""
        # Between two kernels nothing of this is in a cache of the processor. So there are few loops, all of them in C,
        # and those of `any` and `all` come first: they are so short that they wait for many objects at once.
        try:
            return (
                not any(self._empty)
                and all(self._dicts)
                and all(self._functions)
                and (array("Q", map(_version_of, self._dicts)) == self._versions or self._has_same_entries())
                and [
                    *map(type, self._objects),
                    *map(_code_of, self._functions),
                    *map(_defaults_of, self._functions),
                    *map(getattr, self._owners, self._names),
                ]
                == (self._known or self._put_together())
                and (not (self._others or self._lists or self._tensors) or self._has_same_others())
            )
        except (AttributeError, RuntimeError, ValueError):  # it is gone, or is another tensor or array
            return False

    def _put_together(self) -> list[Any]:
        self._known = [*self._kinds, *self._codes, *self._defaults, *self._values]
        return self._known

    def _has_same_entries(self) -> bool:
        """Compares the dictionaries whose version moved."""
        # Versions are read before entries: a change by another thread in between moves them again.
        versions = array("Q", map(_version_of, self._dicts))
        moved = [table for table, old, new in zip(self._tables, self._versions, versions, strict=True) if old != new]
        if not all(table.holds() for table in moved):
            return False
        self._versions = versions
        return True

    def _has_same_others(self) -> bool:
        """Compares what few witnesses have read."""
        return (
            all(getattr(read.owner, read.name) is read.value for read in self._others)
            and [*map(len, self._lists)] == self._lengths
            and _are_same([*chain.from_iterable(self._lists)], self._items)
            and self._contents == self._read_contents()
        )

    def reads(self) -> Iterator[Read]:
        """Returns all places that are compared."""
        items = iter(self._items)
        for table in self._tables:
            for name, value in table.known.items():
                yield Read(table.owner, name, value)
            if table.is_whole:
                yield Read(table.owner, LENGTH, len(table.known))
        for container, length in zip(self._lists, self._lengths, strict=True):
            yield from map(Read, [container] * length, range(length), items)
            yield Read(container, LENGTH, length)
        yield from (Read(container, LENGTH, 0) for container in self._empty)
        yield from (Read(owner, "__class__", kind) for owner, kind in zip(self._objects, self._kinds, strict=True))
        yield from map(Read, self._owners, self._names, self._values)
        yield from self._others
        yield from map(Read, self._functions, repeat("__code__"), self._codes)
        yield from map(Read, self._functions, repeat("__defaults__"), self._defaults)
        for x in self._tensors:
            yield Read(x, None, x)

    # ------------------------------------------------------------------------------------------------ what is read

    def skip(self, *objects: Any) -> None:
        """Leaves objects unread that each call reads itself, such as a dictionary of parameters."""
        for owner in objects:
            self._is_new(owner)

    def module(self, module: nn.Module) -> None:
        """Reads the state of a module and of its submodules, and the code of their classes that a call runs.

        Raises:
            Unwatchable: for an attribute whose changes cannot be seen.
        """
        for part in module.modules():
            if not _has_hooks(part):
                self.skip(*(vars(part)[name] for name in _UNREAD & vars(part).keys()))
        self.state(module)
        for kind in {type(part) for part in module.modules()}:
            self.method(kind, "forward")
        self.code(nn.Module.__call__, nn.Module)

    def method(self, kind: type, name: str) -> None:
        """Reads a class, the method that its instances have, and its code."""
        self._class(kind)
        self.code(getattr(kind, name), kind)

    def state(self, owner: Any) -> None:
        """Reads the class and the attributes of an object, and in the same way the objects that these hold: for a
        module, its parameters, buffers, hooks and submodules too. Of a dictionary, a list or a set it reads what they
        hold; of a tensor, which one it is.

        Raises:
            Unwatchable: for an attribute whose changes cannot be seen.
        """
        if type(owner) in _CONTAINERS:
            self._container(owner)
            return
        if not self._is_new(owner):
            return
        self._objects.append(owner)
        self._kinds.append(type(owner))
        self._known = None
        self._class(type(owner))
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

    def outline(self, owner: Any) -> None:
        """Reads the attributes of an object, and the dictionaries, lists and sets among them, but nothing inside other
        objects. It keeps no reference to the object itself."""
        for container in (vars(owner), *vars(owner).values()):
            if type(container) in _CONTAINERS and self._is_new(container):
                self._keep(container)

    def attribute(self, owner: Any, name: str) -> Any:
        """Reads an attribute, and returns it."""
        value = getattr(owner, name)
        if isinstance(value, _CONSTANTS):
            self._owners.append(owner)
            self._names.append(name)
            self._values.append(value)
            self._known = None
        else:
            self._others.append(Read(owner, name, value))
        self._check_size()
        return value

    def entry(self, table: dict[str, Any], name: str) -> Any:
        """Reads one entry of a dictionary, and returns it."""
        known = self._table(table).known
        if name not in known:
            known[name] = table[name]
            self._check_size()
        return table[name]

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
        among these in the same way, those of other files in a package that is not this one, and the attributes of
        objects of the same package, unless that is torch.
        """
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or not self._is_new(function, *owners):
            return
        self.function(function)
        if function.__code__.co_kwonlyargcount:
            self._value(self.attribute(function, "__kwdefaults__"))
        for cell in function.__closure__ or ():
            self._follow(function, self.attribute(cell, "cell_contents"), owners)
        names = frozenset(names_in(function.__code__))
        for namespace, name in _places(function.__globals__, names):
            value = self.entry(namespace, name)
            self._follow(function, value, owners)
            if not isinstance(value, _CONSTANTS) and _package(type(value)) == _package(function):
                self._attributes_of(type(value), names, function)
        for owner in owners:
            self._attributes_of(owner, names, function)

    def function(self, function: types.FunctionType) -> None:
        """Reads the code and the defaults of a function, and nothing that they name."""
        self._functions.append(function)
        self._codes.append(_code_of(function))
        self._defaults.append(_defaults_of(function))
        self._known = None

    # ------------------------------------------------------------------------------------------------ how

    def _attributes_of(self, owner: Any, names: Iterable[str], function: types.FunctionType) -> None:
        """Reads a class, and follows those of its attributes that a function names."""
        self._class(owner)
        for name in names:
            if hasattr(owner, name):
                self._follow(function, getattr(owner, name), (owner,))

    def _follow(self, function: types.FunctionType, value: Any, owners: Iterable[Any]) -> None:
        """Reads what a function refers to, if it belongs to it."""
        value = getattr(value, "fget", value)  # of a property
        if type(value) in _CONTAINERS:
            self._container(value)
        elif _package(function) == "torch":
            return
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            is_foreign = _package(function) != _OWN
            if value.__module__ == function.__module__ or (is_foreign and _package(value) == _package(function)):
                self.code(value, *owners)
        elif not isinstance(value, _CONSTANTS) and _package(type(value)) == _package(function):
            self._value(value)

    def _class(self, kind: type) -> None:
        """Reads all attributes of a class and of its bases, but for those of Python itself."""
        for base in kind.__mro__:
            if _package(base) not in sys.stdlib_module_names and base.__flags__ & _HEAP_TYPE and self._is_new(base):
                # The attributes of a class are a view of a dictionary, and the view has no version.
                (entries,) = gc.get_referents(vars(base))
                self._table(entries, base).keep_all()

    def _table(self, entries: dict[str, Any], owner: Any = None) -> _Table:
        table = self._by_id.get(id(entries))
        if table is None:
            table = self._by_id[id(entries)] = _Table(entries, entries if owner is None else owner)
            self._tables.append(table)
            self._dicts.append(entries)
            self._versions.append(_version_of(entries))
        return table

    def _container(self, container: Any) -> None:
        """Reads a dictionary, a list or a set, and what it holds."""
        if not self._is_new(container):
            return
        self._keep(container)
        for value in [*container.values()] if isinstance(container, _TABLES) else [*container]:
            self._value(value)

    def _keep(self, container: Any) -> None:
        self._check_size()
        if not container:
            self._empty.append(container)
        elif isinstance(container, _TABLES):
            self._table(container).keep_all()
        else:
            self._lists.append(container)
            self._lengths.append(len(container))
            self._items.extend(container)

    def _value(self, value: Any) -> None:
        """Reads an object that lies in another one."""
        if isinstance(value, Tensor):
            self.unread.append(value)
        elif isinstance(value, (types.FunctionType, types.MethodType)):  # a method of an instance
            self.code(value)
        elif isinstance(value, _CONSTANTS):
            return
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
        if len(self._seen) > _MOST:
            raise Unwatchable(f"it reads more than {_MOST} objects")

    def _read_contents(self) -> list[int]:
        """The address and the version of each tensor."""
        return [*map(Tensor.data_ptr, self._tensors), *map(_version, self._tensors)]


def _are_same(values: list[Any], known: list[Any]) -> bool:
    return all(map(is_, values, known)) or all(map(_is_same, values, known))


def _is_same(value: Any, known: Any) -> bool:
    """Whether this is the same object, or an equal number, text or method."""
    return value is known or (type(value) is type(known) and isinstance(known, _CONSTANTS) and bool(value == known))


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a code, functions inside included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _places(namespace: dict[str, Any], names: frozenset[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a code may find its names: in its globals, and in the modules among them."""
    for name in names & namespace.keys():
        yield namespace, name
        if isinstance(module := namespace[name], types.ModuleType):
            yield from ((vars(module), inner) for inner in names & vars(module).keys())


_READ_BY_CALLS = {*nn.Module._call_impl.__code__.co_names, *nn.Module.__getattr__.__code__.co_consts}
_UNREAD = vars(nn.Module()).keys() - _READ_BY_CALLS
"""Attributes of modules that a call without hooks does not read, such as the hooks of `state_dict`."""


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module runs hooks."""
    return any(getattr(module, name) for name in _READ_BY_CALLS if "hooks" in str(name) and hasattr(module, name))


def _package(owner: Any) -> str:
    return str(getattr(owner, "__module__", None)).partition(".")[0]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))
