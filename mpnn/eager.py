"""Runs a request now: checks it, has it planned, and hands it to its backend."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mpnn import check, random
from mpnn.plan import Direct, choose, direct
from mpnn.scores import Request


class Choice(NamedTuple):
    """What runs all requests of one form over a graph: a backend, on this type of device (whose name takes as long to
    write as a small tensor takes to make), and perhaps the kernel itself, as `plan.direct` gives it."""

    backend: ModuleType
    device: str
    direct: Direct | None


def run(request: Request, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Out [..., N_dst, H, D], and the weights if the request asks for them; autocast ends here."""
    try:
        key = "backend", backend, request.signature
        found = request.graph.memo(key, lambda: choice(request, backend))
    except TypeError:  # of a key that cannot be: what is wrong with the request has its own sentence
        found = choice(request, backend)
    return run_by(found, request)


def choice(request: Request, backend: str) -> Choice:
    """Raises ValueError or TypeError naming what does not fit."""
    check.request(request)
    if request.value.is_meta:
        raise ValueError(
            "tensors on the device meta hold no numbers to compute with; move graph and features to another"
        )
    chosen = choose(request, backend)
    return Choice(chosen, request.value.device.type, direct(chosen, request))


def run_by(choice: Choice, request: Request) -> tuple[Tensor, Tensor | None]:
    """As `run`, for a request of a form that was chosen for."""
    request = seeded(request)
    if not torch.is_autocast_enabled(choice.device):
        return choice.backend.run(request)
    with torch.autocast(choice.device, enabled=False):
        return choice.backend.run(request)


def checked(request: Request) -> Request:
    """The request, made sure of everything that backends rely on, with a dropout seed if it needs one.

    Raises:
        ValueError, TypeError: naming what does not fit.
    """
    if not torch.compiler.is_compiling():  # which checks when sizes are known
        check.request(request)
    return seeded(request)


def seeded(request: Request) -> Request:
    """The request with a dropout seed if it needs one."""
    if request.dropout and request.seed is None:
        return replace(request, seed=random.new_seed(request.value.device))
    return request
