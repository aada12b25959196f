"""A way of a backend: how it runs rounds of one kind, or on one kind of device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpnn.backends.cost_model import Counts, Estimate, priced
from mpnn.round import Result, Round


@dataclass
class Way:
    """The members of a `Backend` for some of its rounds. `bytes`: of working memory. `bind`: the function that runs all
    rounds of a form."""

    NAME: str
    SERVES: frozenset[str]
    REASONS: dict[str, str]
    refusal: Callable[[Round], str | None]
    counts: Callable[[Round], Counts]
    bytes: Callable[[Round], float]
    bind: Callable[[Round], Callable[[Round], Result]]

    def estimate(self, round: Round) -> Estimate:
        return priced(round.value.device, self.NAME, self.counts(round), self.bytes(round))

    def run(self, round: Round) -> Result:
        return self.bind(round)(round)


def members(way_of: Callable[[Round], Way]) -> tuple[Callable[[Round], Any], ...]:
    """Returns `refusal`, `counts`, `estimate`, `bind` and `run` of a backend with several ways: those of the way that
    `way_of` returns for a round."""

    def member(name: str) -> Callable[[Round], Any]:
        return lambda round: getattr(way_of(round), name)(round)

    return tuple(map(member, ("refusal", "counts", "estimate", "bind", "run")))
