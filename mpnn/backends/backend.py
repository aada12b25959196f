"""The protocol that every backend follows. `mpnn.backends` lists the backends there are."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mpnn.backends.cost_model import Estimate
from mpnn.request.request import Request


class Backend(Protocol):
    """Computes requests. A module or an object with these four members is a backend.

    For each new combination of a graph and a request's shapes, dtypes and options, `supports` and `estimate` are called
    once, on all backends; `run` is called each time. None of them modifies the request. `NAME` is the name that users
    pass as `backend="name"`.

    A backend may also have `direct(request)`, which returns a function of (query, key, value, scale) that computes all
    requests of this form, or None. `ops.attend` then calls that function without building a request.
    """

    NAME: str

    def supports(self, request: Request) -> str | None:
        """None if `run` computes this request, else the reason why not: a clause such as "it has no kernels for
        torch.int64". Users read it in `explain` and in the error if they name this backend."""

    def estimate(self, request: Request) -> Estimate:
        """The expected time and memory of a request that this backend supports. The lowest time is chosen."""

    def run(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """Out [..., N_dst, H, D] in the dtype of the values, and the weights [..., E, H] in the caller's edge order if
        the request returns them, else None. A request that returns lse gets it in their place: the logarithm of the sum
        of exp(logits) of each destination, [..., N_dst, H], -inf for one without edges. `edge_list` defines the
        numbers."""
