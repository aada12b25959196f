"""The protocol that every backend follows. `mpnn.backends` lists the backends there are."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mpnn.backends.cost_model import Estimate
from mpnn.request.request import Request


class Backend(Protocol):
    """Computes requests. A module or an object with these five members is a backend.

    `NAME` is what users pass as `backend="name"`. `SERVES` are the needs of requests that it serves, see `mpnn.needs`; the
    engine refuses a request with any other need, with the sentence of `mpnn.needs.SENTENCES` or, if the backend has one,
    of its own dictionary `REASONS`. A feature that is added to requests later is a need that `SERVES` does not hold, so it
    is refused until the backend says that it serves it.

    For each new combination of a graph and a request's shapes, dtypes and options, `refusal` and `estimate` are called
    once; `run` is called each time. They are asked only if all needs are served. None of them modifies the request.

    Optional members:
        serves(request): returns (SERVES, REASONS), for a backend that serves other needs on other devices.
        direct(request): returns a function of (query, key, value, scale) that computes all requests of this form, or
            None. `ops.attend` then calls that function without building a request.
    """

    NAME: str
    SERVES: frozenset[str]

    def refusal(self, request: Request) -> str | None:
        """None if `run` computes requests of these shapes, else the reason why not: a clause such as "there is no head
        to compute". Users read it in `explain` and in the error if they name this backend."""

    def estimate(self, request: Request) -> Estimate:
        """The expected time and memory of a request that this backend runs. The lowest time is chosen."""

    def run(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """Out [..., N_dst, H, D] in the dtype of the values, and the weights [..., E, H] in the caller's edge order if
        the request returns them, else None. A request that returns lse gets it in their place: the logarithm of the sum
        of exp(logits) of each destination, [..., N_dst, H], -inf for one without edges. `edge_list` defines the
        numbers."""
