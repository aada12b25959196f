"""Plain aggregation along the rows of any graph on CPU: converts a round for `mpnn.kernels.rows.reduce`.
`mpnn.backends.csr.cuda_reduce` does the same for GPUs.

An aggregator runs as one kernel if its type is in KINDS or if it has a `combine`.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpnn.aggregate import Max, Mean, Min, Sum, Var
from mpnn.backends import reference as again
from mpnn.backends.cost_model import Estimate, both_ways, priced
from mpnn.backends.csr import edges
from mpnn.graph import Graph
from mpnn.graph.edge_tables import numbers
from mpnn.graph.modes import is_transformed
from mpnn.kernels.cpu import library
from mpnn.kernels.rows import combine, reduce as row_reduce
from mpnn.kernels.rows.combine import Associative
from mpnn.kernels.rows.reduce import RowReduce, RowSum
from mpnn.round import Result, Round, reads
from mpnn.round.needs import AGGREGATES, FLOATS, on_edges

_BEYOND_CACHE = 40e6  # bytes of features beyond which almost all reads miss the cache
KINDS: dict[type, str] = {Sum: "sum", Mean: "mean", Max: "max", Min: "min", Var: "var"}
FAMILIES: dict[type, str] = {Sum: "sum", Mean: "sum", Max: "extreme", Min: "extreme", Var: "variance"}


def is_plain(round: Round) -> bool:
    """Whether this aggregates without attention: no score, normalizer, dropout, edge_value, biases of nodes or returned
    weights."""
    unscored = round.score is None and round.normalize == "none" and round.edge_value is None
    of_nodes = round.dst_bias is not None or round.src_bias is not None
    return unscored and not of_nodes and not round.dropout and not round.return_weights


SERVES = FLOATS | AGGREGATES | on_edges("bias") | {
    "cpu", "no score", "unnormalized", "own aggregate", "explicit graph", "gradient",
    "keep_accumulate_dtype",
}  # fmt: skip


def refusal(round: Round) -> str | None:
    if (why := library.why_missing()) is not None:
        return why
    if max(round.graph.num_dst, round.graph.num_src) >= 2**31:
        return "it numbers nodes with 32 bits"
    # `needs_grad` takes as long as all other checks, and decides for a user's own aggregators only
    return None if type(round.reduce) in KINDS else _why_not(round.reduce, round.needs_grad)


def _why_not(aggregator: Any, needs_grad: bool) -> str | None:
    """The reason why there are no kernels for an aggregator, or None if there are."""
    name = type(aggregator).__name__
    if type(aggregator) in KINDS:
        return None
    if not hasattr(aggregator, "combine"):
        return f"{name} has no combine(a, b)"
    if not hasattr(aggregator, "identity"):
        return f"{name} has combine(a, b), but no identity to start from"
    for function, what in (("combine", "two numbers"), ("gradient", "two numbers"), ("lift", "one number")):
        if inspect.ismethod(getattr(aggregator, function, None)):
            return f"{function} of {name} must be a function of {what}: make it a staticmethod"
    if needs_grad and getattr(aggregator, "gradient", None) is None:
        return f"{name} has no gradient(message, out), so there is no backward pass"
    return combine.why_missing()


def counts(round: Round) -> dict[str, float]:
    """Edges, their components, and the components of nodes."""
    graph = round.graph
    batch = round.batch.numel()
    kind = type(round.reduce)
    family = FAMILIES.get(kind, "own")
    width = round.heads * round.value.shape[-1]
    edges, components = float(graph.num_edges * batch), float(graph.num_edges * batch * width)
    beyond = min(1.0, graph.num_src * width * (torch.finfo(round.accumulate_dtype).bits // 8) / _BEYOND_CACHE)
    operations = {"reduced edge": edges, f"{family} call": 1.0, f"{family} number": components}
    operations["node number"] = float((graph.num_dst + graph.num_src) * batch * width)
    operations["far number"] = components * beyond
    if round.bias:
        operations |= {"weights call": 1.0, "weighed edge": edges}
        columns = max(numbers(bias).shape[-1] for bias in round.bias)
        operations["weighed head"] = edges * columns * (columns > 1)
    own = {} if kind in KINDS else {"compilation call": 1.0}
    return {**both_ways(operations, round.needs_grad), **own}


def estimate(round: Round) -> Estimate:
    width = round.heads * round.value.shape[-1] * (torch.finfo(round.accumulate_dtype).bits // 8)
    saved = round.graph.num_dst * round.batch.numel() * width * (2.0 if round.needs_grad else 0.0)
    return priced(round.value.device, "csr", counts(round), saved)


def bind(round: Round) -> Callable[[Round], Result]:
    """The function that runs all rounds of this form."""
    if not _is_row_sum(round):
        return run
    return partial(_run_sum, KINDS[type(round.reduce)], RowSum.apply if round.needs_grad else row_reduce.row_sum)


def _is_row_sum(round: Round) -> bool:
    """Whether this is a sum or mean along a list of edges that `row_sum` computes: of one head, with fixed weights."""
    value = round.value
    return (
        type(round.reduce) in (Sum, Mean)
        and reads(round, ("value", "normalize", "reduce", "bias"))
        and round.graph.is_explicit
        and round.graph.stored_edges.dtype is torch.int64  # else they are many
        and value.dtype in (torch.float32, torch.float64)
        and value.dim() == 3
        and value.shape[1] == 1
        and value.numel() > 0
        and not value.is_neg()
        and all(_is_fixed(weight, value.dtype) for weight in round.bias)
        and len(round.bias) < 2
    )


def _is_fixed(weight: Any, dtype: torch.dtype) -> bool:
    """Whether weights are one number for each edge, without a gradient."""
    is_tensor = type(weight) is Tensor and weight.dtype is dtype and not weight.is_neg()
    return is_tensor and weight.dim() == 2 and weight.shape[1] == 1 and not weight.requires_grad


def _run_sum(kind: str, sum_rows: Callable[..., Tensor], round: Round) -> Result:
    graph = round.graph
    edge_list = graph.cached("edge_list", lambda: row_reduce.EdgeList(graph.ends, graph.num_dst, graph.num_src))
    weight: Any = round.bias[0].unsqueeze(0).contiguous() if round.bias else None  # type: ignore[union-attr]
    return Result(sum_rows(round.value.contiguous(), weight, partial(edges.in_order, graph), edge_list, kind))


def run(round: Round) -> Result:
    weight = _weight(round)
    value = round.value
    # kernels read bfloat16 as it is, and round once
    if value.dtype != torch.bfloat16 or type(round.reduce) not in KINDS:
        value = value.to(round.accumulate_dtype)
    if weight is not None and weight.shape[-1] > 1 and value.shape[-2] < weight.shape[-1]:
        value = value.repeat_interleave(weight.shape[-1] // value.shape[-2], -2)
    recorded = round.needs_grad or is_transformed()
    return Result(reduced(round.graph, round.reduce, value, weight, recorded).to(round.result_dtype))


def reduced(graph: Graph, aggregator: Any, value: Tensor, weight: Tensor | None, recorded: bool) -> Tensor:
    """The aggregates [batch..., N_dst, H, D] of value [batch..., N_src, H, D] times weight, [B or 1, E, H] or None.
    `recorded`: whether they are differentiated, or transformed."""
    kind: Any = KINDS.get(type(aggregator))
    if kind is None:
        kind = Associative(
            aggregator.combine,
            float(aggregator.identity),
            getattr(aggregator, "gradient", None),
            getattr(aggregator, "lift", None),
            bool(getattr(aggregator, "shares_ties", False)),
        )
    shape = value.shape
    rows = edges.in_order(graph, transposed=False)
    flat = value.reshape(shape[:-3].numel(), graph.num_src, shape[-2:].numel())
    if not recorded:
        return row_reduce.reduced(flat, weight, rows, kind).view(*shape[:-3], graph.num_dst, *shape[-2:])
    columns = edges.in_order(graph, transposed=True)
    differentiable = partial(_again, graph, shape[:-3], shape[-2:], aggregator)
    out = RowReduce.apply(flat.contiguous(), weight, rows, columns, kind, differentiable)
    return out.view(*shape[:-3], graph.num_dst, *shape[-2:])


def _again(
    graph: Graph, batch: torch.Size, shape: torch.Size, aggregator: Any, value: Tensor, weight: Tensor | None
) -> Tensor:
    """`RowReduce` by differentiable operations."""
    value = value.view(*batch, graph.num_src, *shape)
    bias = () if weight is None else (weight.expand(batch.numel(), *weight.shape[1:]).view(*batch, *weight.shape[1:]),)
    out = again.run(Round(graph, value, bias=bias, normalize="none", reduce=aggregator)).out
    return out.reshape(batch.numel(), graph.num_dst, shape.numel())


def _weight(round: Round) -> Tensor | None:
    """The sum of all biases, [B or 1, E, H or 1] in the caller's order; None without biases."""
    total = round.edge_bias(round.bias)
    if total is None:
        return None
    batch = round.batch if total.dim() > 2 else torch.Size(())
    return total.expand(*batch, *total.shape[-2:]).reshape(batch.numel(), *total.shape[-2:]).contiguous()
