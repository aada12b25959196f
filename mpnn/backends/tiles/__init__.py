"""Tiled attention for structured graphs: exact, at a cost proportional to the edges, forward and backward.

The graph's runs determine which tiles of (destinations, sources) are empty and which are full, for any length, without
visiting pairs. On CPU the kernels are this library's, on CUDA they are FlexAttention's.

On CPU, NaN and infinities of a node reach only the rows that attend to it: a query tile with sums that are not finite
runs again, edge by edge in partial tiles. On CUDA, and in gradients, they can reach other rows of the same tiles,
because a weight of zero times NaN is NaN.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mpnn.aggregate import Sum
from mpnn.backends.cost_model import Counts, Estimate
from mpnn.backends.tiles import cpu, cuda
from mpnn.request.request import Request
from mpnn.request.scores import Dot

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
        return f"it normalizes by softmax, not {request.normalize}"
    if graph.is_explicit:
        return "the graph is a list of edges, without runs that fill tiles"
    if score.edge_key is not None or request.edge_value is not None:
        return "edge_key and edge_value would be materialized for all pairs"
    if request.return_weights:
        return "it does not materialize weights"
    return _BY_DEVICE[device].supports(request)


def counts(request: Request) -> Counts:
    return _BY_DEVICE[request.value.device.type].counts(request)


def estimate(request: Request) -> Estimate:
    return _BY_DEVICE[request.value.device.type].estimate(request)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    return (cpu if request.value.is_cpu else cuda).run(request)
