"""The base class of rewrites: equalities between the result of a round and the results of others."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

from mpnn.backends.cost_model import Counts, Estimate, both_ways, priced
from mpnn.round import Result, Round

Finish = Callable[[Result], Result]
"""From the result of the last round to that of the round which was rewritten."""


class Runner(Protocol):
    """Runs the earlier rounds of a rewrite. The plan passes one that records them and computes nothing."""

    def __call__(self, round: Round) -> Result:
        """The result of a round; while planning, stand-ins of the same shapes without memory."""

    def run_if(self, needed: Callable[[], bool], round: Callable[[], Round]) -> Result | None:
        """The result of `round()` if `needed()`, else None. The plan counts it, and chooses for the later rounds as
        if it was."""

    def compute(self, function: Callable[..., Tensor], x: Tensor, *more: object) -> Tensor:
        """`function(x, *more)`, of the shape of x; while planning, x itself. For long work between two rounds."""


class Rewrite:
    """An equality: a round over the results of other rounds. A subclass defines `NAME`, `SERVES` and `apply`.

    The plan treats a rewrite as it treats a backend. It refuses a round with a need that is not in `SERVES`, so that a
    field which is added to rounds later passes no rewrite that does not know it. Its rounds are planned in the same
    way, and may be rewritten in their turn; they are not validated. The cached choice is a tree of rewrites and
    backends.

    Attributes:
        NAME: as `explain` prints it: "mean as sum".
        SERVES: the needs of the rounds for which the equality holds, see `mpnn.round.needs`.
        REASONS: its own sentences about some other needs.
        same_work: whether the rounds do the work of the one that is rewritten. The reason why a backend cannot run
            them is then shown as the reason why it cannot run that round.
        scales: whether its own work is to multiply the result by numbers.
    """

    NAME = ""
    SERVES: frozenset[str] = frozenset()
    REASONS: ClassVar[dict[str, str]] = {}
    same_work = False
    scales = False

    def applies(self, round: Round) -> bool:
        """Whether this is about rounds of this form, which is the signature. Called once for each form."""
        return True

    def refusal(self, round: Round) -> str | None:
        """Why the equality does not hold, or does not help, over this graph. Called once for each form and graph."""
        return None

    def estimate(self, round: Round) -> Estimate:
        """The time and memory of its own operations, without its rounds."""
        if not self.scales:
            return Estimate(0.0, 0.0)
        numbers = float(round.graph.num_dst * round.batch.numel() * round.heads * round.value.shape[-1])
        return work({"call": 1.0, "scaled number": numbers}, round)

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        """The last round, after `run(an earlier one)` as often as there are others, and what makes its result that of
        the round. The form of each follows from the form of the first and from its graph."""
        raise NotImplementedError


def work(counts: Counts, round: Round, size: float = 0.0) -> Estimate:
    """The estimate of torch operations of a rewrite, which `costs.json` prices as those of a backend."""
    return priced(round.value.device, "rewrites", both_ways(counts, round.needs_grad), size)
