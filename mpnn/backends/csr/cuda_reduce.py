"""Plain aggregation along the rows of any graph on a GPU: converts a round for `mpnn.kernels.cuda.row_reduce`."""

from typing import Any

from torch import Tensor

from mpnn.backends.cost_model import Counts, Estimate, on_gpu
from mpnn.backends.csr import on_device, reduce
from mpnn.backends.csr.reduce import KINDS, leaves_of, reduce_parts
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.round import Result, Round

_TOGETHER = 1024  # most components of all heads that run as one head if there are no weights


SERVES = (reduce.SERVES | {"cuda"}) - {"cpu", "own aggregate"}
REASONS = {
    "own aggregate": f"on CUDA it runs {', '.join(KINDS.values())} and compositions of them, and not {{aggregate}}"
}


def refusal(round: Round) -> str | None:
    return unavailable(round.value, round.tensors)


def counts(round: Round) -> Counts:
    """Bytes moved: the features, source and weight of each edge, and the results of each node."""
    graph, times = round.graph, len(leaves_of(round.reduce)) * round.batch.numel()
    size, width = round.value.element_size(), round.heads * round.value.shape[-1]
    each = width * size + 8 * bool(round.bias) + 4
    moved = times * (graph.num_edges * each + graph.num_dst * width * size)
    return {"byte": float(moved), "launch": 2.0 * len(leaves_of(round.reduce))}


def estimate(round: Round) -> Estimate:
    operations, passes = counts(round), 2 if round.needs_grad else 1
    saved = round.graph.num_dst * round.batch.numel() * round.heads * round.value.shape[-1] * 4.0
    seconds = on_gpu(0.0, passes * operations["byte"], round.accumulate_dtype, passes * operations["launch"])
    return Estimate(seconds, saved * (2 if round.needs_grad else 1))


def run(round: Round) -> Result:
    graph, value, batch = round.graph, round.value, round.batch.numel()
    weight, heads = on_device.biases(round), value.shape[-2]
    if weight is not None:
        heads = max(heads, weight.shape[-1])
        value = value if value.shape[-2] == heads else value.repeat_interleave(heads // value.shape[-2], -2)
        weight = on_device.per_edge(weight, heads, round)
    numbers = value.shape[-2:].numel()
    shape = (1, numbers) if weight is None and numbers <= _TOGETHER else (heads, value.shape[-1])
    features = value.reshape(batch, graph.num_src, *shape)

    # parts of a composed aggregator are rounded once, after they are composed
    dtype = round.accumulate_dtype if reduce.is_composed(round.reduce) else round.result_dtype

    def fold(aggregator: Any) -> Tensor:
        from mpnn.kernels.cuda.row_reduce import RowReduce

        walks = on_device.rows(graph), on_device.columns(graph)
        out: Tensor = RowReduce.apply(features, weight, *walks, KINDS[type(aggregator)], dtype)
        return out.view(*round.batch, graph.num_dst, *value.shape[-2:])

    return Result(reduce_parts(round.reduce, graph, fold).to(round.result_dtype))
