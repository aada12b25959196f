"""What a fast way has read, and a change of each of its reads.

Fast ways record what they were made from: a `Witness` the objects that decide what is computed, block masks and graphs
of PyTorch Geometric the tensors whose numbers they read, steps the fields of a round. `reads_of` runs a thing and
returns these records, each with the place of its owner: an object of the process, such as a class, a file or a
function, or a path from the module to an object inside it. `check` changes one read of a module that was called and of
one that was not, in the same way, and compares what both compute. No read is named here.
"""

from __future__ import annotations

import inspect
import math
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from changes import mapped, other, scaled
from changes_of_code import Scaled
from results import must_equal, outcome
from things import HAS_PYG, Thing
from torch import Tensor, nn

from mpnn import engine
from mpnn.engine import steps
from mpnn.flex import programs
from mpnn.graph.edge_tables import EmbeddingTable
from mpnn.graph.witness import LENGTH, Constant, Read, Witness
from mpnn.round import Round

_ATTRIBUTES = object()
Path = tuple[Any, ...]
"""Names of entries, and `_ATTRIBUTES` for the attributes of an object."""


class Place(NamedTuple):
    """Where something was read. `path`: of the owner; None for an owner that all modules share. `watched_by`: the
    number of the witness that compares it; None for what each call reads. `way`: how a tensor changes."""

    path: Path | None
    read: Read
    watched_by: int | None
    way: str

    def __str__(self) -> str:
        inside = "".join("." if step is _ATTRIBUTES else f"[{step!r}]" for step in self.path or ())
        owner = self.read.owner
        shared = owner.get("__name__", "a dictionary") if isinstance(owner, dict) else owner
        return f"{shared if self.path is None else 'module' + inside}, {self.read.name}, {self.way}"

    def owner_in(self, module: nn.Module) -> Any:
        """The owner of this place in another module."""
        if self.path is None:
            return self.read.owner
        found: Any = module
        for step in self.path:
            found = vars(found) if step is _ATTRIBUTES else found[step]
        return found


class Recorded(NamedTuple):
    """The witnesses that were made, tensors whose numbers were read, and rounds whose steps were learned."""

    witnesses: list[Witness]
    tensors: list[Tensor]
    rounds: list[tuple[Round, str]]

    def meet(self, round: Round, backend: str) -> None:
        """Adds a round that a step runs, one of each form."""
        if not any(backend == other and steps.Form(known, False).fits(round) for known, other in self.rounds):
            self.rounds.append((round, backend))


@contextmanager
def recorded() -> Iterator[Recorded]:
    """What fast ways read meanwhile."""
    found = Recorded([], [], [])

    def note(function: Any, add: Callable[..., Any]) -> Any:
        def noted(*args: Any) -> Any:
            add(*args)
            return function(*args)

        return noted

    readers = [
        (Witness, "__init__", found.witnesses.append),
        (programs, "_form", lambda program: found.tensors.extend(program.captured)),
        (steps, "teach", lambda round, backend, *others: found.meet(round, backend)),
    ]
    if HAS_PYG:
        from mpnn.integrations.pyg import graph_cache

        readers.append((graph_cache, "_kept", lambda form, tensors, build: found.tensors.extend(tensors)))
    find = steps.find

    def met(round: Round, backend: str) -> Any:
        step = find(round, backend)
        if step is not None:  # another test may have taught it
            found.meet(round, backend)
        return step

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(steps, "find", met))
        for owner, name, add in readers:
            stack.enter_context(mock.patch.object(owner, name, note(getattr(owner, name), add)))
        yield found


def used(thing: Thing, mode: Any) -> tuple[nn.Module, Recorded]:
    """A module that was called twice, and what its fast ways have read."""
    with recorded() as found:
        module = thing.make()
        for _ in range(2):
            assert isinstance(result := outcome(thing, module, mode), dict), f"it does not compute: {result!r}"
    return module, found._replace(witnesses=[witness for witness in found.witnesses if witness.holds()])


def reads_of(thing: Thing, mode: Any) -> list[Place]:
    """What the fast ways of a thing have read, and how it may change. What several have read is listed once."""
    module, found = used(thing, mode)
    reads: list[tuple[Read, int | None]] = []
    for k, witness in enumerate(found.witnesses):
        reads += [(read, k) for read in witness.reads()]
        reads += [(Read(table, name, table.get(name)), None) for table, name in witness.of_calls]
    paths = dict(_paths(module))
    # Tensors that a module does not hold are made in each call.
    reads += [(Read(x, None, x), None) for x in found.tensors if id(x) in paths]
    places: dict[Hashable, Place] = {}
    for read, watched_by in reads:
        for way in _ways(read):
            place = Place(paths.get(id(read.owner)), read, watched_by if way == "another" else None, way)
            places.setdefault((id(read.owner), read.name, way), place)
    return [*places.values()]


def _ways(read: Read) -> tuple[str, ...]:
    """How what was read may change. Numbers of a tensor are read where it lies."""
    if read.name is None:
        return ("written",)
    return tuple(_OF_TENSORS) if isinstance(read.value, Tensor) else ("another",)


def _paths(module: nn.Module) -> Iterator[tuple[int, Path]]:
    """The path of each object in a module."""
    todo: list[tuple[Any, Path]] = [(module, ())]
    seen = {}
    while todo:
        owner, path = todo.pop(0)
        if id(owner) in seen or isinstance(owner, _SHARED):
            continue
        seen[id(owner)] = owner
        yield id(owner), path
        if isinstance(owner, dict):
            todo += [(x, (*path, name)) for name, x in owner.items()]
        elif isinstance(owner, (list, tuple)):
            todo += [(x, (*path, k)) for k, x in enumerate(owner)]
        elif hasattr(owner, "__dict__"):
            todo.append((vars(owner), (*path, _ATTRIBUTES)))


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_SHARED = (Constant, type, types.ModuleType, *_FUNCTIONS)


# -------------------------------------------------------------------------------------------------------- changes


def check(thing: Thing, mode: Any, place: Place) -> bool:
    """Changes a read of a module that was called, and of one that was not. Whether this changed what is computed.

    Raises:
        AssertionError: the results differ, or the witness does not see the change.
        Unchangeable: the place takes no other object.
    """
    module, known = used(thing, mode)
    # A copy may have read numbers when it was made, as a block mask does, and its peer has not.
    copy = thing.peer() if place.read.name is None and thing.peer is not None else thing.make()
    before = outcome(thing, module, mode)
    with ExitStack() as stack:
        owners = {id(owner): owner for owner in (place.owner_in(module), place.owner_in(copy))}
        for owner in owners.values():
            stack.enter_context(_changed(owner, place.read.name, place.way))
        if place.watched_by is not None:
            assert not known.witnesses[place.watched_by].holds(), f"{place}: the witness does not see it"
        found = outcome(thing, module, mode)
        expected = outcome(thing, copy, mode)
    return _compared(found, expected, before, str(place), thing)


def _compared(found: Any, expected: Any, before: Any, name: str, thing: Thing) -> bool:
    """Whether a change had an effect. Raises AssertionError unless it had the one that is expected."""
    if not isinstance(expected, dict):
        assert not isinstance(found, dict), f"{name}: an unused copy raises {expected!r}"
        return True
    must_equal(found, expected, name, thing, torch.float32, lambda: ())
    return not _is_same(before, expected)


def check_field(thing: Thing, round: Round, backend: str, path: str) -> bool:
    """`check` for a field of a round, or of its score, whose step was learned."""
    before = _computed(round, backend)
    *inside, name = path.split(".")
    changed = replace(round, **{path: _other(getattr(round, path))}) if not inside else None
    if changed is None:
        assert round.score is not None
        score = replace(round.score, **{name: _other(getattr(round.score, name))})  # type: ignore[type-var]
        changed = replace(round, score=score)
    found = _computed(changed, backend)
    memo = changed.graph._memo
    learned = memo.pop("steps")
    with mock.patch.object(steps, "_OF_LISTS", {}):
        expected = _computed(changed, backend)
    memo["steps"] = learned
    return _compared(found, expected, before, f"{type(round.score).__name__}, {path}", thing)


def _computed(round: Round, backend: str) -> Any:
    torch.random.default_generator.manual_seed(0)
    try:
        out, other_result = engine.run(round, backend)
    except Exception as error:
        return error
    results = {"out": out, "other result": out if other_result is None else other_result}
    return {name: x.detach() for name, x in results.items()} | {"needs gradients": out.requires_grad}


def _is_same(x: Any, y: Any) -> bool:
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x if isinstance(x[k], Tensor))


class Unchangeable(Exception):
    """A place takes no other object, such as the dictionary of a class."""


def _written(x: Tensor) -> Callable[[], Any]:
    """Writes other numbers where those of a tensor lie, which torch does not count. Returns what undoes it."""
    before = x.detach().clone()
    x.detach().numpy()[...] = _other(before).numpy()
    return partial(x.data.copy_, before)


_OF_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "another": lambda x: _other(x),
    "written": lambda x: x,
    "double": lambda x: x.detach().double(),
    "with other strides": lambda x: torch.stack([_other(x.detach())] * 2, -1)[..., 0],
    "that learns": lambda x: _other(x.detach()).requires_grad_(x.is_floating_point() and not x.requires_grad),
}
"""Ways in which a tensor may change: others in its place, and numbers that are written where it lies."""


@contextmanager
def _changed(owner: Any, name: Any, way: str) -> Iterator[None]:
    """Another object at a place, and the one that was there afterwards."""
    if name == LENGTH:
        undo = _longer(owner)
    elif way == "written":
        undo = _written(owner if name is None else _access(owner)[0](name))
    else:
        undo = _replaced(owner, name, way)
    try:
        yield
    finally:
        undo()


def _replaced(owner: Any, name: Any, way: str) -> Callable[[], Any]:
    """Puts another object at a place, and returns what puts the one back that was there."""
    get, put = _access(owner)
    is_absent = name not in vars(owner) if isinstance(owner, type) else isinstance(owner, dict) and name not in owner
    before = None if is_absent and isinstance(owner, dict) else get(name)
    try:
        put(name, _new(owner, name, before, way))
    except (TypeError, AttributeError, ValueError) as error:
        raise Unchangeable(str(error)) from error
    if is_absent:
        return partial(owner.pop if isinstance(owner, dict) else partial(type.__delattr__, owner), name)
    return partial(put, name, before)


def _new(owner: Any, name: Any, before: Any, way: str) -> Any:
    """What comes in place of an object."""
    if name == "__code__":
        return _other_code(owner)
    if not isinstance(before, Tensor):
        return _other(before)
    new = _OF_TENSORS[way](before)
    is_parameter = type(before) is nn.Parameter
    return nn.Parameter(new, new.requires_grad or way != "that learns") if is_parameter else new


def _access(owner: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """What reads a place of an owner, and what writes it."""
    if isinstance(owner, (dict, list)):
        return owner.__getitem__, owner.__setitem__
    if isinstance(owner, type):
        return partial(inspect.getattr_static, owner), partial(type.__setattr__, owner)
    return partial(getattr, owner), partial(setattr, owner)


def _longer(owner: Any) -> Callable[[], Any]:
    """Adds an entry, a hook if it is a dictionary of hooks, and returns what takes it away."""

    def hook(*given: Any) -> Any:
        return scaled(given[-1])

    if isinstance(owner, dict):
        owner["one more"] = hook
        return partial(owner.pop, "one more")
    if isinstance(owner, type):
        type.__setattr__(owner, "one_more", hook)
        return partial(type.__delattr__, owner, "one_more")
    if isinstance(owner, list):
        owner.append(hook)
        return owner.pop
    owner.add(hook)
    return partial(owner.remove, hook)


def _other(value: Any) -> Any:
    """Another object of the same kind, with which something else is computed, if there is one."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return 2 * value + 0.1 if math.isfinite(value) else 0.5
        case str():
            return f"{value}_"
        case nn.Parameter():
            return nn.Parameter(other(value), value.requires_grad)
        case Tensor():
            return other(value) if value.is_floating_point() else value.flip(0) if value.dim() else value + 1
        case EmbeddingTable():
            return replace(value, table=_other(value.table))
        case nn.Module():
            return Scaled(value)
        case type():
            return _other_class(value)
        case property():
            return property(None if value.fget is None else _scaling(value.fget), value.fset, value.fdel)
        case staticmethod() | classmethod():
            return type(value)(_scaling(value.__func__))
        case dict() | list() | set():
            return value.copy()
        case tuple():
            return tuple(map(_other, value)) or (1.0,)
        case types.ModuleType():
            module = types.ModuleType(value.__name__)
            vars(module).update(vars(value))
            return module
        case _ if callable(value):
            return _scaling(value)
        case None:
            return 1.0
    return object()


def _scaling(function: Any) -> Any:
    """The function with other results."""

    def run(*args: Any, **options: Any) -> Any:
        return mapped(_times, function(*args, **options))

    return run


def _times(x: Tensor) -> Tensor:
    return x * 1.2 if x.is_floating_point() else x


def _other_class(kind: type) -> type:
    """A class derived from this one, with other results."""
    names = [name for name in ("forward", "__call__") if any(name in vars(base) for base in kind.__mro__)]
    methods = {name: _scaling(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})


def _other_code(function: types.FunctionType) -> types.CodeType:
    """A code with other results for a function. It refers to the function by a constant: it has the same globals."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a number that is called
        code = eval("lambda *args, **options: 0.5(*args, **options)").__code__
    constants = tuple(_scaling(copy) if x == 0.5 else x for x in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=function.__code__.co_freevars)
