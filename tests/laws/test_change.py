"""The law of change over things, changes and modes.

By default each thing has one change, and changes and modes take turns. The slow tests go through all changes of layers,
through a part of them for every other thing, and through all families of transformers.

    PYTHONPATH=tests/support python tests/laws/test_change.py THING CHANGE ...     prints the cases whose names begin so
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import things
import torch
from change import MODES, check, compiled
from changes import CHANGES, Nothing
from results import is_refusal, outcome
from things import CACHES, CONVOLUTIONS, FAMILIES, FUNCTIONS, LAYERS, MODELS, OPERATORS, Thing

from mpnn.kernels.cpu import library
from mpnn.kernels.layers.encoder_layer import EncoderLayer

THINGS = {**LAYERS, **FUNCTIONS, **OPERATORS, **MODELS, **CACHES, **CONVOLUTIONS, **FAMILIES}

Case = tuple[str, str]


def _cases(number: int) -> list[Case]:
    """All changes with a mode each. Things begin with different ones, by their number, and modes take turns."""
    first = 7 * number % len(CHANGES)
    names = [*CHANGES][first:] + [*CHANGES][:first]
    return [(change, [*MODES][(k + number) % len(MODES)]) for k, change in enumerate(names)]


def _run(name: str, thing: Thing, cases: list[Case], at_most: int = 10**9) -> None:
    """Checks a thing: as many cases as concern it, up to a number. Shows all cases that do not hold."""
    broken: dict[Case, Exception] = {}
    done = 0
    for change, mode in cases:
        try:
            check(thing, CHANGES[change], mode)
        except Nothing:
            continue
        except Exception as error:
            broken[change, mode] = error
        done += 1
        if done == at_most:
            break
    assert not broken
    assert done


def test_names_are_of_one_thing() -> None:
    assert len(THINGS) == sum(len(table) for table, _ in _TABLES)


@pytest.mark.parametrize("name", THINGS)
def test_each_thing_after_a_change(name: str) -> None:
    _run(name, THINGS[name], _cases([*THINGS].index(name)), at_most=1)


_TABLES = [(LAYERS, 1), (FUNCTIONS, 1), (CONVOLUTIONS, 2), (FAMILIES, 3), (CACHES, 4), (OPERATORS, 6), (MODELS, 6)]
_EVERY = {name: every for table, every in _TABLES for name in table}
"""Every which change of a thing the slow tests check."""


@pytest.mark.slow
@pytest.mark.parametrize("name", THINGS)
def test_each_thing_after_many_changes(name: str) -> None:
    number = [*THINGS].index(name)
    every = _EVERY[name]
    _run(name, THINGS[name], _cases(number)[number % every :: every])


_PARTS = 8


def _is_computed(thing: Thing) -> bool:
    """Whether there is a tiny model of a family, and this library computes it in place."""
    assert thing.peer is not None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            thing.call(thing.peer())
    except Exception:
        return False
    try:
        result = outcome(thing, thing.make(), torch.no_grad)
    except Exception as error:
        result = error
    return not (isinstance(result, Exception) and is_refusal(result))


@pytest.mark.slow
@pytest.mark.skipif(not things.HAS_TRANSFORMERS, reason="transformers is not installed")
@pytest.mark.parametrize("part", range(_PARTS))
def test_each_family_of_transformers_after_two_changes(part: int) -> None:
    broken = {}
    for number, (name, model) in enumerate(sorted(things.all_families().items())):
        thing = things.of_family(model)
        if number % _PARTS == part and _is_computed(thing):
            try:
                _run(name, thing, _cases(number), at_most=2)
            except AssertionError as error:
                broken[name] = error
            except pytest.xfail.Exception:
                continue
    assert not broken


_COMPILED = [
    "PreNorm(FeedForward), DotProduct",
    "Additive",
    "aggregate mean",
    "whole layers: LlamaForCausalLM",
    "in place: GCN",
]
_OF_PROGRAMS = [
    "weights are copied over", "weights are written through numpy", "a state is loaded by assignment",
    "each number of a module in turn is set",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", _OF_PROGRAMS)
@pytest.mark.parametrize("name", [name for name in _COMPILED if name in THINGS])
def test_compiled_programs(name: str, change: str) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check(compiled(THINGS[name]), CHANGES[change], "no_grad")
        except Nothing as reason:
            pytest.skip(str(reason))


_WHOLE = [*LAYERS, *(name for name in FAMILIES if name.startswith("whole layers"))]


@pytest.mark.skipif(library.why_missing() is not None, reason="there are no compiled kernels")
@pytest.mark.parametrize("name", _WHOLE)
def test_whole_layers_run_by_their_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the cases above would say nothing about it."""
    calls = []
    run = EncoderLayer.__call__

    def counted(self: EncoderLayer, *arguments: Any) -> Any:
        calls.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(EncoderLayer, "__call__", counted)
    thing = THINGS[name]
    with torch.no_grad():
        thing.call(thing.make(), *thing.inputs)
    assert calls


if __name__ == "__main__":
    torch.set_num_threads(1)
    thing, change = [*sys.argv[1:], "", ""][:2]
    for name in (name for name in THINGS if name.startswith(thing)):
        for kind, mode in ((kind, mode) for kind in CHANGES if kind.startswith(change) for mode in MODES):
            try:
                check(THINGS[name], CHANGES[kind], mode)
            except Nothing:
                continue
            except Exception as error:
                print(f"{name}; {kind}; {mode}: {type(error).__name__}: {str(error)[:200]}", flush=True)
