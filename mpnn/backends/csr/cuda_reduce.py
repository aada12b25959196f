"""Plain aggregation along the rows of any graph on a GPU: brings a request into the form of
`mpnn.kernels.cuda.row_reduce`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.backends.csr import on_device
from mpnn.backends.csr.reduce import KINDS, leaves_of, taken_apart
from mpnn.backends.estimate import Counts, Estimate, on_gpu
from mpnn.scores import Request

_TOGETHER = 1024  # numbers of all heads that are taken as one head where heads make no difference


def supports(request: Request) -> str | None:
    own = [type(leaf).__name__ for leaf in leaves_of(request.reduce) if type(leaf) not in KINDS]
    if own:
        return f"on CUDA it runs {', '.join(KINDS.values())} and what is composed of them, and not {own[0]}"
    return on_device.unavailable(request)


def counts(request: Request) -> Counts:
    """Bytes that must move: each edge's features, neighbour, and weight, and what nodes are given."""
    graph, times = request.graph, len(leaves_of(request.reduce)) * request.batch.numel()
    size, width = request.value.element_size(), request.heads * request.value.shape[-1]
    each = width * size + 8 * bool(request.bias) + 4
    moved = times * (graph.num_edges * each + graph.num_dst * width * size)
    return {"byte": float(moved), "launch": 2.0 * len(leaves_of(request.reduce))}


def estimate(request: Request) -> Estimate:
    found, passes = counts(request), 2 if request.needs_grad else 1
    kept = request.graph.num_dst * request.batch.numel() * request.heads * request.value.shape[-1] * 4.0
    seconds = on_gpu(0.0, passes * found["byte"], request.wide, passes * found["launch"])
    return Estimate(seconds, kept * (2 if request.needs_grad else 1))


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    graph, value, batch = request.graph, request.value, request.batch.numel()
    weight, heads = on_device.biases(request), value.shape[-2]
    if weight is not None:
        heads = max(heads, weight.shape[-1])
        value = value if value.shape[-2] == heads else value.repeat_interleave(heads // value.shape[-2], -2)
        weight = on_device.per_edge(weight, heads, request)
    numbers = value.shape[-2:].numel()
    shape = (1, numbers) if weight is None and numbers <= _TOGETHER else (heads, value.shape[-1])
    features = value.reshape(batch, graph.num_src, *shape)

    def fold(aggregator: Any) -> Tensor:
        from mpnn.kernels.cuda.row_reduce import RowReduce

        walks = on_device.rows(graph), on_device.columns(graph)
        out: Tensor = RowReduce.apply(features, weight, *walks, KINDS[type(aggregator)])
        return out.view(*request.batch, graph.num_dst, *value.shape[-2:])

    return taken_apart(request.reduce, graph, fold).to(value.dtype), None
