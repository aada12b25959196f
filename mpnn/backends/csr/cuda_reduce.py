"""Plain aggregation along the rows of any graph on a GPU: converts a request for `mpnn.kernels.cuda.row_reduce`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.backends.cost_model import Counts, Estimate, on_gpu
from mpnn.backends.csr import on_device, reduce
from mpnn.backends.csr.reduce import KINDS, leaves_of, reduce_parts
from mpnn.request.request import Request

_TOGETHER = 1024  # most components of all heads that run as one head if there are no weights


SERVES = (reduce.SERVES | {"cuda"}) - {"cpu", "own aggregate"}
REASONS = {
    "own aggregate": f"on CUDA it runs {', '.join(KINDS.values())} and compositions of them, and not {{aggregate}}"
}


def refusal(request: Request) -> str | None:
    return on_device.unavailable(request)


def counts(request: Request) -> Counts:
    """Bytes moved: the features, source and weight of each edge, and the results of each node."""
    graph, times = request.graph, len(leaves_of(request.reduce)) * request.batch.numel()
    size, width = request.value.element_size(), request.heads * request.value.shape[-1]
    each = width * size + 8 * bool(request.bias) + 4
    moved = times * (graph.num_edges * each + graph.num_dst * width * size)
    return {"byte": float(moved), "launch": 2.0 * len(leaves_of(request.reduce))}


def estimate(request: Request) -> Estimate:
    operations, passes = counts(request), 2 if request.needs_grad else 1
    saved = request.graph.num_dst * request.batch.numel() * request.heads * request.value.shape[-1] * 4.0
    seconds = on_gpu(0.0, passes * operations["byte"], request.accumulate_dtype, passes * operations["launch"])
    return Estimate(seconds, saved * (2 if request.needs_grad else 1))


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

    return reduce_parts(request.reduce, graph, fold).to(value.dtype), None
