"""Runs requests eagerly: lowers a request, draws its seed, takes the cached choice of a backend, and runs that.

Choices are cached on the graph by the request's signature: requests of one form over one graph are validated and planned
once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mpnn.backends import Backend, registered
from mpnn.engine.plan import Direct, choose, direct
from mpnn.graph import Graph
from mpnn.request import rng, validation
from mpnn.request.request import Request


class Choice(NamedTuple):
    """What runs all requests of one signature over a graph.

    `device` is the type of the device: to write its name takes as long as to allocate a small tensor, so it is kept.
    `direct` is the kernel itself if the backend does nothing else for these requests, see `plan.direct`.
    """

    backend: Backend
    device: str
    direct: Direct | None


def run(request: Request, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """`mpnn.engine.run` outside of traced programs."""
    request = normalize(request, backend)
    try:
        chosen = cached_choice(request.graph, backend, request.signature, lambda: request)
    except TypeError:  # an unhashable option: validation has a sentence for it
        chosen = choice(request, backend)
    return run_by(chosen, request)


def cached_choice(graph: Graph, backend: str, form: Hashable, request: Callable[[], Request]) -> Choice:
    """The choice for all requests of one form over the graph. A newly registered backend makes choices anew."""
    return graph.cached(("backend", backend, registered(), form), lambda: choice(request(), backend))


def choice(request: Request, backend: str) -> Choice:
    """Validates and plans a request.

    Raises:
        ValueError, TypeError: the parts of the request do not fit together, or the named backend refuses it.
    """
    validation.request(request)
    if request.value.is_meta:
        raise ValueError("tensors on the device meta hold no numbers; move the graph and the features elsewhere")
    chosen = choose(request, backend)
    return Choice(chosen, request.value.device.type, direct(chosen, request))


def run_by(choice: Choice, request: Request) -> tuple[Tensor, Tensor | None]:
    """Runs a normalized request whose signature was planned before."""
    if not torch.is_autocast_enabled(choice.device):
        return choice.backend.run(request)
    with torch.autocast(choice.device, enabled=False):
        return choice.backend.run(request)


def normalize(request: Request, backend: str = "auto") -> Request:
    """The request as backends expect it: with a dropout seed, drawn from torch's default generator unless it has one,
    and with tables looked up per edge where edge types do not follow from node numbers."""
    request = request.lowered(backend).with_tables_per_edge()
    if request.dropout and request.seed is None:
        return replace(request, seed=rng.new_seed(request.value.device))
    return request
