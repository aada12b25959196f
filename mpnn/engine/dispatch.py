"""Runs rounds eagerly: prepares a round, takes the cached choice, and runs that.

Choices are cached on the graph by the round's signature: rounds of one form over one graph are validated and planned
once.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn import backends
from mpnn.engine import direct, slowness
from mpnn.engine.choice import TRANSFORMED, choose
from mpnn.engine.rewrites.prepare import PREPARATIONS, Preparation, as_planned, lower_score
from mpnn.graph import Graph
from mpnn.graph.bound import BoundGraph
from mpnn.graph.modes import is_transformed
from mpnn.kernels import batches
from mpnn.round import Result, Round, validation
from mpnn.scores import BUILT_IN, Dot

Direct = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""A function of query, key, value and scale that returns out [..., N_dst, H, D]."""


class Planned(NamedTuple):
    """What all rounds of one signature over a graph need.

    `run` runs a round that `preparations` prepared. `device` is the type of the device: to write its name takes as long
    as to allocate a small tensor, so it is kept. `direct` is the kernel itself if the backend does nothing else for
    these rounds, see `Backend`.
    """

    preparations: tuple[Preparation, ...]
    run: Callable[[Round], Result]
    device: str
    direct: Direct | None


def run(round: Round, backend: str = "auto") -> Result:
    """`mpnn.engine.run` outside of traced programs, with results by name."""
    # Each call of a layer passes here, so what is as it should be is tested without a call of its validation.
    graph: object = round.graph
    if not isinstance(graph, BoundGraph):
        validation.graph(graph)
    if backend == "auto" and is_transformed():
        # Kernels read addresses, and a transform of torch.func wraps tensors that have none.
        backend = TRANSFORMED
    if backend == "auto" and round.score is None and (out := direct.result(round)) is not None:
        return Result(out)
    if round.score is not None and type(round.score) not in BUILT_IN:
        round = lower_score(round, backend)
    try:
        plan = _cached(round.graph, backend, round.signature, lambda: round)
    except TypeError:  # an unhashable option: validation has a sentence for it
        plan = planned(round, backend)
    # A seed is drawn here, once a call, and not where plans are made, which would move torch's generator.
    for preparation in plan.preparations:
        round = preparation.prepare(round)
    if not torch.is_autocast_enabled(plan.device):
        return plan.run(round)
    with torch.autocast(plan.device, enabled=False):
        return plan.run(round)


def attend(graph: Graph, query: Tensor, key: Tensor, value: Tensor, scale: float, backend: str) -> Tensor:
    """The round of dot products with a softmax and nothing else. Calls the kernel directly if the plan for this form is
    that kernel alone: on a hundred nodes the steps between take as long as the kernel."""

    def round() -> Round:
        return Round(graph, value, Dot(query, key, scale))

    backend = TRANSFORMED if backend == "auto" and is_transformed() else backend
    # A decoding step passes here for each layer and token, and a round with its signature would take longer.
    forms = [(x.shape, x.dtype, x.device, x.layout, x.requires_grad) for x in (query, key, value)]
    plan = _cached(graph, backend, ("attend", torch.is_grad_enabled(), *forms), round)
    if plan.direct is None or torch.is_autocast_enabled(plan.device):
        return run(round(), backend).out
    return plan.direct(query, key, value, scale)


def _cached(graph: Graph, backend: str, form: Hashable, round: Callable[[], Round]) -> Planned:
    """The plan for all rounds of one form over the graph. A newly registered backend makes plans anew."""
    # The tuple itself is part of the key, so that nothing has to be forgotten when a backend is registered.
    key = "backend", backend, backends._registered, batches.STATE.padding is not None, form
    return graph.cached(key, lambda: planned(round(), backend))


def planned(round: Round, backend: str) -> Planned:
    """Validates and plans a round.

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
    by: Any = choice.by
    direct = by.direct(round) if hasattr(by, "direct") else None
    return Planned(needed, choice.prepare(round), round.value.device.type, direct)
