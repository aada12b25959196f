"""Runs a request now: checks it, has it planned, and hands it to its backend."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from mpnn import check, random
from mpnn.plan import choose
from mpnn.scores import Request


def run(request: Request, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Out [..., N_dst, H, D], and the weights if the request asks for them; autocast ends here."""
    chosen = request.graph.memo(("backend", backend, request.signature), lambda: _checked_choice(request, backend))
    request, device = seeded(request), request.value.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        return chosen.run(request)


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


def _checked_choice(request: Request, backend: str) -> ModuleType:
    """The backend to run it, chosen once for all requests of the same form over a graph."""
    check.request(request)
    return choose(request, backend)
