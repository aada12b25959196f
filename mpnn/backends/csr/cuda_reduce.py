"""Plain aggregation along the rows of any graph on a GPU: converts a round for `mpnn.kernels.rows.cuda.reduce`."""

from functools import partial
from typing import Any

from torch import Tensor

from mpnn.backends import reference as again
from mpnn.backends.cost_model import Counts, Estimate, both_ways, kind_of, priced
from mpnn.backends.csr import on_device, reduce
from mpnn.backends.csr.reduce import FAMILIES, KINDS
from mpnn.graph import Graph
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.round import Result, Round

_TOGETHER = 1024  # most components of all heads that run as one head if there are no weights


SERVES = (reduce.SERVES | {"cuda"}) - {"cpu", "own aggregate"}
REASONS = {"own aggregate": f"on CUDA it runs {', '.join(KINDS.values())}, and not {{aggregate}}"}


def refusal(round: Round) -> str | None:
    return unavailable(round.value, round.tensors)


def counts(round: Round) -> Counts:
    """Edges, the numbers that they gather, and those of nodes."""
    edges = float(round.graph.num_edges * round.batch.numel())
    family = FAMILIES[type(round.reduce)]
    kind = kind_of(round.value.dtype)
    width = round.heads * round.value.shape[-1]
    operations = {
        f"{family} call": 1.0,
        "reduced edge": edges,
        f"{kind}{family} number": edges * width,
        f"{kind}reduced number": float(round.graph.num_dst * round.batch.numel() * width),
    }
    if round.biased:
        operations |= {"weights call": 1.0, "weighed edge": edges * round.heads}
    return both_ways(operations, round.needs_grad)


def estimate(round: Round) -> Estimate:
    saved = round.graph.num_dst * round.batch.numel() * round.heads * round.value.shape[-1] * 4.0
    return priced(round.value.device, "csr", counts(round), saved * (2 if round.needs_grad else 1))


def run(round: Round) -> Result:
    graph = round.graph
    value = round.value
    batch = round.batch.numel()
    weight = on_device.biases(round)
    heads = value.shape[-2]
    if weight is not None:
        heads = max(heads, weight.shape[-1])
        value = value if value.shape[-2] == heads else value.repeat_interleave(heads // value.shape[-2], -2)
        weight = on_device.per_edge(weight, heads, round)
    numbers = value.shape[-2:].numel()
    shape = (1, numbers) if weight is None and numbers <= _TOGETHER else (heads, value.shape[-1])
    features = value.reshape(batch, graph.num_src, *shape)

    from mpnn.kernels.rows.cuda.reduce import RowReduce

    walks = on_device.rows(graph), on_device.columns(graph)
    kind = KINDS[type(round.reduce)]
    differentiable = partial(_again, graph, round.reduce)
    out: Tensor = RowReduce.apply(features, weight, *walks, kind, round.result_dtype, differentiable)
    return Result(out.view(*round.batch, graph.num_dst, *value.shape[-2:]).to(round.result_dtype))


def _again(graph: Graph, reduce: Any, value: Tensor, weight: Tensor | None) -> Tensor:
    """`RowReduce` by differentiable operations."""
    bias = () if weight is None else (weight,)
    return again.run(Round(graph, value, bias=bias, normalize="none", reduce=reduce)).out
