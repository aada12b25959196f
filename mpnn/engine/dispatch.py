"""Runs rounds eagerly: lowers a round, draws its seed, takes the cached choice of a backend, and runs that.

Choices are cached on the graph by the round's signature: rounds of one form over one graph are validated and planned
once.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch

from mpnn import rng, validation
from mpnn.backends import Backend, registered
from mpnn.engine import folding
from mpnn.engine.plan import Direct, choose, direct
from mpnn.graph import Graph
from mpnn.round import Result, Round
from mpnn.scores import BUILT_IN


class Choice(NamedTuple):
    """What runs all rounds of one signature over a graph.

    `device` is the type of the device: to write its name takes as long as to allocate a small tensor, so it is kept.
    `direct` is the kernel itself if the backend does nothing else for these rounds, see `plan.direct`.
    """

    backend: Backend
    device: str
    direct: Direct | None


def run(round: Round, backend: str = "auto") -> Result:
    """`mpnn.engine.run` outside of traced programs, with results by name."""
    validation.graph(round.graph)
    if round.graph.stack:
        return folding.run(round, lambda folded: run(folded, backend))
    round = normalize(round, backend)
    try:
        chosen = cached_choice(round.graph, backend, round.signature, lambda: round)
    except TypeError:  # an unhashable option: validation has a sentence for it
        chosen = choice(round, backend)
    return run_by(chosen, round)


def cached_choice(graph: Graph, backend: str, form: Hashable, round: Callable[[], Round]) -> Choice:
    """The choice for all rounds of one form over the graph. A newly registered backend makes choices anew."""
    return graph.cached(("backend", backend, registered(), form), lambda: choice(round(), backend))


def choice(round: Round, backend: str) -> Choice:
    """Validates and plans a round.

    Raises:
        ValueError, TypeError: the parts of the round do not fit together, or the named backend refuses it.
    """
    validation.round(round)
    if round.value.is_meta:
        raise ValueError("tensors on the device meta hold no numbers; move the graph and the features elsewhere")
    chosen = choose(round, backend)
    return Choice(chosen, round.value.device.type, direct(chosen, round))


def run_by(choice: Choice, round: Round) -> Result:
    """Runs a normalized round whose signature was planned before."""
    if not torch.is_autocast_enabled(choice.device):
        result = choice.backend.run(round)
    else:
        with torch.autocast(choice.device, enabled=False):
            result = choice.backend.run(round)
    return result if type(result) is Result else Result(*result)  # of a registered backend: (out, weights)


def normalize(round: Round, backend: str = "auto") -> Round:
    """The round as backends expect it: with a dropout seed, drawn from torch's default generator unless it has one,
    and with tables looked up per edge where edge types do not follow from node numbers."""
    if type(round.score) not in BUILT_IN and round.score is not None:
        with torch.autocast(round.value.device.type, enabled=False):  # `lower` computes in the dtype of the features
            round = round.lowered(backend)
    round = round.with_tables_per_edge()
    if round.dropout and round.seed is None:
        return replace(round, seed=rng.new_seed(round.value.device))
    return round
