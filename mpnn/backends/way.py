"""A way of a backend: how it runs rounds on one kind of device."""

from collections.abc import Callable
from dataclasses import dataclass

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
