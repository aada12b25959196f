"""The law of change: what computes gives after a change what an unused copy with the same change gives.

    use; call; change; call         equals          change; call           of a copy that nobody has called

Fast ways keep what they made from a module: plans, packed weights, graphs, programs. A kept thing must not outlive what
it was made from. A case is a thing that computes (`things.py`), a change between two calls, and the mode of the calls.
Things come from the registries, so that a new family, option, convolution or model is among the cases unasked.

A change is a function of a module. A generator changes it step by step: after each `yield` the module is called, or
what was yielded in its place, and once more behind the last. The reference is made anew for each step. Where a thing
has a peer, the same computation by code that keeps nothing, the results must be those of the peer, too. A thing may
refuse a change with a ValueError or TypeError of this library. At least one step must have an effect on the reference,
else the case proves nothing, unless the reference is code of another library: that has parts which a call leaves out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from typing import Any

import changes_of_calls  # noqa: F401
import changes_of_code  # noqa: F401
import changes_of_maps  # noqa: F401
import changes_of_weights  # noqa: F401
import torch
from changes import (
    BEFORE_A_CALL,
    COARSE,
    LOOSE,
    OF_GRADIENTS,
    WHERE_READ,
    WITHOUT_EFFECT,
    WITHOUT_GRADIENTS,
    Change,
    Nothing,
)
from results import EFFECT, Amplified, Results, difference, must_equal, outcome, roundings
from things import Thing
from torch import Tensor, nn

MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad": (torch.enable_grad, torch.enable_grad),
    "no_grad": (torch.no_grad, torch.no_grad),
    "inference_mode": (torch.inference_mode, torch.inference_mode),
    "no_grad, then grad": (torch.no_grad, torch.enable_grad),
}
"""The mode of the first calls, and that of the calls after a change. `compiled` makes a thing that is a program."""


def compiled(thing: Thing) -> Thing:
    """The thing, called by a program that its first call compiles."""
    programs: dict[nn.Module, Any] = {}

    def call(module: Any, *inputs: Tensor) -> Any:
        if module not in programs:
            programs[module] = torch.compile(module, backend="eager")
        return thing.call(programs[module], *inputs)

    return thing._replace(call=call)


def check(thing: Thing, change: Change, mode: str) -> None:
    """Raises AssertionError if the law does not hold, and Nothing if the change does not concern the thing."""
    first, later = MODES[mode]
    has_gradients = later is torch.enable_grad
    if (change in OF_GRADIENTS and not has_gradients) or (change in WITHOUT_GRADIENTS and has_gradients):
        raise Nothing("the change is of other modes")
    before = _before(thing, later)
    assert isinstance(before, dict), f"the thing does not compute: {before!r}"
    if change in OF_GRADIENTS and not any(value is True for value in before.values()):
        raise Nothing("it has no gradients")
    references = _references(thing, change, first, later)
    found = _along(thing, _used(thing, thing.make(), change, first), change, later)
    has_effect = change in WITHOUT_EFFECT
    dtype = torch.bfloat16 if change in COARSE else torch.float32
    for k, (result, expected) in enumerate(zip(found, references, strict=True)):
        right = {name: x for name, x in expected.items() if isinstance(x, dict)}
        for x in right.values():
            has_effect = has_effect or difference(x, before, thing) > EFFECT
        if isinstance(result, Exception) and isinstance(expected.get("its peer"), Exception):
            continue  # the peer, which was called before, too, raises as well
        for name, x in right.items():
            of_reference = thing._replace(make=thing.peer) if name == "its peer" else thing
            rounded = partial(_rounded, of_reference, change, k, later, dtype)
            where = f"step {k + 1} of {len(found)}: "
            try:
                must_equal(result, x, where + name, thing, dtype, rounded)
            except Amplified:  # an unused copy rounds as it does
                must_equal(result, _unused(thing, change, k, later), where + "an unused copy", thing, dtype, rounded)
        if not right:
            assert not isinstance(result, dict), f"step {k + 1}: {expected} raise, and what was called before does not"
    if not has_effect and (change in WHERE_READ or thing.is_loose or not any(map(_has_result, references))):
        raise Nothing("it does not read what changes, or does not allow it")
    assert has_effect, "the change has no effect on the reference: the case proves nothing"


@cache
def _before(thing: Thing, mode: Any) -> Results | Exception:
    return outcome(thing, thing.make(), mode)


def _has_result(expected: dict[str, Results | Exception]) -> bool:
    return any(isinstance(x, dict) for x in expected.values())


def _used(thing: Thing, module: Any, change: Change, mode: Any) -> Any:
    """The module, called twice: what a first call learns, a second one may take."""
    if change not in BEFORE_A_CALL:
        for _ in range(2):
            outcome(thing, module, mode)
    return module


def _references(thing: Thing, change: Change, first: Any, later: Any) -> list[dict[str, Results | Exception]]:
    """What is right after each step of a change: by the peer, and by an unused copy, after the last step and where the
    peer raises. A change that an unused copy or the peer does not allow is none."""
    try:
        with closing(_states(thing.make(), change)) as states:
            *others, last = states
        references: list[dict[str, Results | Exception]] = [{} for _ in others]
        references.append({"an unused copy": outcome(thing, last, later)})
        if thing.peer is not None and not (change in LOOSE and thing.is_loose):
            peer = _used(thing, thing.peer(), change, first)
            for k, result in enumerate(_along(thing, peer, change, later)):
                if _is_finite(result):  # transformers' own Longformer in float64 has gradients that are not
                    references[k]["its peer"] = result
        for k in range(len(references)):
            if not isinstance(references[k].get("its peer"), dict) and "an unused copy" not in references[k]:
                references[k]["an unused copy"] = _unused(thing, change, k, later)
    except Nothing:
        raise
    except Exception as error:
        raise Nothing(f"it does not allow the change: {error!r}") from error
    return references


def _is_finite(result: Results | Exception) -> bool:
    """Whether all numbers are finite, or it is an error."""
    if not isinstance(result, dict):
        return True
    return all(bool(x.isfinite().all()) for x in result.values() if isinstance(x, Tensor))


def _along(thing: Thing, module: Any, change: Change, mode: Any) -> list[Results | Exception]:
    """The results after each step of a change."""
    with closing(_states(module, change)) as states:
        return [outcome(thing, state, mode) for state in states]


def _unused(thing: Thing, change: Change, step: int, mode: Any) -> Results | Exception:
    """The result after a step of a change, of a module that nobody has called."""
    with closing(_states(thing.make(), change)) as states:
        for _ in range(step):
            next(states)
        return outcome(thing, next(states), mode)


def _rounded(thing: Thing, change: Change, step: int, mode: Any, dtype: torch.dtype) -> Iterator[Results]:
    """The results of `_unused` with other roundings."""
    for seed in range(3):
        with roundings(thing.width, dtype, seed):
            result = _unused(thing, change, step, mode)
        assert isinstance(result, dict), f"with other roundings it does not compute: {result!r}"
        yield result


def _states(module: Any, change: Change) -> Iterator[Any]:
    """What to call after each step of a change."""
    if not inspect.isgeneratorfunction(change):
        change(module)
    else:
        for other in change(module):
            yield module if other is None else other
    yield module
