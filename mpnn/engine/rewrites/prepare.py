"""Preparations: the same round in the words that backends know. Which of them a round needs follows from its form and
its graph, so the cached choice lists them."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from mpnn.graph import rng
from mpnn.graph.edge_tables import TABLES, PerEdge
from mpnn.round import Round
from mpnn.scores import BUILT_IN, lowered


class Preparation(NamedTuple):
    """`applies(round)`: whether a round needs it. `prepare(round)`: the round that runs. `planned(round)`: a round of
    the same form, which draws no number of torch's generator."""

    applies: Callable[[Round], bool]
    prepare: Callable[[Round], Round]
    planned: Callable[[Round], Round]


def lower_score(round: Round, backend: str = "auto") -> Round:
    """The round with the built-in score that its own score lowers to; the specification runs the score as it is.

    This comes before choices are looked up, because the form of an own score does not say what it lowers to.
    """
    if round.score is None or type(round.score) in BUILT_IN or backend == "edge_list":
        return round
    # `lower` computes in the dtype of the features.
    with torch.autocast(round.value.device.type, enabled=False):
        score = lowered(round.score)
    return round if score is round.score else round.with_fields(score=score)


def _tables_per_edge(round: Round) -> Round:
    """Tables by relation are looked up for each edge, because kernels compute edge types from node numbers."""

    def look_up(data: PerEdge) -> PerEdge:
        if isinstance(data, Tensor) or type(data) not in TABLES or data.relation is None:
            return data
        if len(data.table) < data.relation.count:
            return data  # Validation names the table that is too short.
        ids = data.relation.ids(*round.graph.edge_positions())
        return data.table.to(round.accumulate_dtype).index_select(0, ids)

    return round.map_edges(look_up)


def _with_seed(draw: Callable[[torch.device], Tensor], round: Round) -> Round:
    """All rounds of a rewrite share the seed, so that they drop the same edges."""
    return round.with_fields(seed=draw(round.value.device))


def _any_seed(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


PREPARATIONS = (
    # The tables of a stacked graph are looked up when it is folded.
    Preparation(
        lambda round: round.graph.positions is not None and not round.graph.stack, _tables_per_edge, _tables_per_edge
    ),
    Preparation(
        lambda round: bool(round.dropout) and round.seed is None,
        partial(_with_seed, rng.new_seed),
        partial(_with_seed, _any_seed),
    ),
)


def prepared(round: Round, backend: str = "auto") -> Round:
    """The round in the words of backends: with a built-in score, tables of edges, and a seed."""
    return _each(round, backend, attrgetter("prepare"))


def as_planned(round: Round, backend: str = "auto") -> Round:
    """The form of the prepared round, without a number of torch's generator."""
    return _each(round, backend, attrgetter("planned"))


def _each(round: Round, backend: str, how: Callable[[Preparation], Callable[[Round], Round]]) -> Round:
    round = lower_score(round, backend)
    for preparation in PREPARATIONS:
        if preparation.applies(round):
            round = how(preparation)(round)
    return round
