"""Structured graphs tile by tile: exact attention at the cost of the edges, forward and backward.

The graph's runs say which tiles of (destinations, sources) are empty and which are full, at any length; nothing looks
at pairs. On CPU the kernels are this library's own, on CUDA they are FlexAttention's, driven by the same runs.

NaN and infinities of a node reach only the rows that attend to it, on CPU: a query tile whose sums are not finite runs
again, and goes edge by edge through the tiles in which some pairs are no edges. On CUDA, and in gradients, they can
reach other rows of the same tiles, because a weight of zero times NaN is NaN.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mpnn.aggregate import Sum
from mpnn.backends.estimate import Counts, Estimate
from mpnn.backends.tiles import cpu, cuda
from mpnn.scores import Dot, Request

NAME = "tiles"

_BY_DEVICE: dict[str, ModuleType] = {"cpu": cpu, "cuda": cuda}


def supports(request: Request) -> str | None:
    graph, score, device = request.graph, request.score, request.value.device.type
    if device not in _BY_DEVICE:
        return f"its kernels are for {' and '.join(_BY_DEVICE)}, and the features are on {device}"
    if not isinstance(score, Dot):
        return "it runs dot-product attention only"
    if type(request.reduce) is not Sum:
        return "it sums messages, and cannot aggregate them otherwise"
    if request.normalize != "softmax":
        return f"it normalises by softmax, not {request.normalize}"
    if graph.is_explicit:
        return "the graph is a list of edges, which have no runs worth a tile"
    if score.edge_key is not None or request.edge_value is not None:
        return "vectors on edges would have to be written out for all pairs"
    if request.return_weights:
        return "it never writes weights down"
    return _BY_DEVICE[device].supports(request)


def counts(request: Request) -> Counts:
    return _BY_DEVICE[request.value.device.type].counts(request)


def estimate(request: Request) -> Estimate:
    return _BY_DEVICE[request.value.device.type].estimate(request)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    return (cpu if request.value.is_cpu else cuda).run(request)
