"""The protocol that every backend follows. `mpnn.backends` lists the backends there are."""

from typing import Protocol

from torch import Tensor

from mpnn.backends.cost_model import Estimate
from mpnn.round import Round


class Backend(Protocol):
    """Computes rounds. A module or an object with these five members is a backend.

    `NAME` is what users pass as `backend="name"`. `SERVES` are the needs that it serves, see `mpnn.needs`. The
    engine refuses a round with any other need, with a sentence of `mpnn.needs.SENTENCES` or of the backend's own
    dictionary `REASONS`. So a feature that is added to rounds later is refused until the backend says that it serves
    it.

    For each new combination of a graph and a round's shapes, dtypes and options, `refusal` and `estimate` are called
    once, and only if all needs are served; `run` is called each time. None of them modifies the round.

    Optional members:
        serves(round): returns (SERVES, REASONS), for a backend that serves other needs on other devices. It depends on
            the round's signature only; conditions on graphs belong in `refusal`.
        direct(round): returns a function of (query, key, value, scale) that computes all rounds of this form, or
            None. `ops.attend` then calls that function without building a round.
    """

    NAME: str
    SERVES: frozenset[str]

    def refusal(self, round: Round) -> str | None:
        """None if `run` computes rounds of these shapes, else the reason why not: a clause such as "there is no head
        to compute". Users read it in `explain` and in the error if they name this backend."""

    def estimate(self, round: Round) -> Estimate:
        """The expected time and memory of a round that this backend runs. The lowest time is chosen."""

    def run(self, round: Round) -> tuple[Tensor, Tensor | None]:
        """Out [..., N_dst, H, D] in the dtype of the values, and the weights [..., E, H] in the caller's edge order if
        the round returns them, else None. A round that returns lse gets it in their place: the logarithm of the sum
        of exp(logits) of each destination, [..., N_dst, H], -inf for one without edges. So does a round that returns
        its state, [..., H, D, D_v] in the dtype of the arithmetic. `edge_list` defines the numbers."""
