"""Plans rounds whose form is new, and teaches the steps of their forms."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from mpnn.engine import slowness, steps
from mpnn.engine.choice import FORWARD, TRANSFORMED, Choice, choose
from mpnn.engine.rewrites.prepare import PREPARATIONS, Preparation, as_planned
from mpnn.graph.modes import is_forward_mode, is_transformed, outside_modes
from mpnn.round import Result, Round, validation


class Planned(NamedTuple):
    """The plan of all rounds of one form over graphs of one kind: `run` runs a round that `preparations` prepared, by
    the `choice`."""

    preparations: tuple[Preparation, ...]
    run: Callable[[Round], Result]
    choice: Choice


def run(round: Round, backend: str = "auto") -> Result:
    """`mpnn.engine.run` outside of traced programs, with results by name."""
    return steps.run(round, backend, learn)


def learn(round: Round, backend: str) -> steps.Run:
    """Plans a round, and returns what runs it and those of its form."""
    transformed = is_transformed()
    if backend == "auto" and transformed:
        # Kernels read addresses, and a transform of torch.func wraps tensors that have none.
        backend = FORWARD if is_forward_mode() else TRANSFORMED
    # Plans keep what they derive from graphs, which serves later calls in any mode.
    plan = outside_modes(lambda: planned(round, backend, transformed))
    step = plan.run
    if plan.preparations:
        step = partial(_prepare_and_run, plan)
    device = round.value.device.type
    if torch.is_autocast_enabled(device):
        step = partial(_run_outside_autocast, device, step)
    if backend not in (TRANSFORMED, FORWARD):
        steps.teach(round, backend, plan.choice, step)
    return step


def _prepare_and_run(plan: Planned, round: Round) -> Result:
    # A seed is drawn here, once a call, and not where plans are made, which would move torch's generator.
    for preparation in plan.preparations:
        round = preparation.prepare(round)
    return plan.run(round)


def _run_outside_autocast(device: str, step: steps.Run, round: Round) -> Result:
    """The dtype of the features decides the arithmetic: autocast acts on the linear maps around a round."""
    with torch.autocast(device, enabled=False):
        return step(round)


def planned(round: Round, backend: str, transformed: bool = False) -> Planned:
    """Validates and plans a round.

    Args:
        transformed: whether a transform of torch.func wraps its tensors, so that no address is known beforehand.

    Raises:
        ValueError, TypeError: the parts of the round do not fit together, or the named backend refuses it.
    """
    needed = tuple(preparation for preparation in PREPARATIONS if preparation.applies(round))
    # From here on the round is what backends see: its own score is lowered, its tables and its seed are there.
    round = as_planned(round, backend)
    validation.round(round)
    if round.value.is_meta:
        raise ValueError("tensors on the device meta hold no numbers; move the graph and the features elsewhere")
    choice = choose(round, backend)
    if backend == "auto" and slowness.estimated(choice):
        slowness.warn(round, choose(round, backend, estimated=True))
    return Planned(needed, choice.run if transformed else choice.bind(round), choice)
