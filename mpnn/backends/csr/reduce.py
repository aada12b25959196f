"""Plain aggregation along the rows of any graph: brings a request into the form of `mpnn.kernels.row_reduce`, which is
for CPU; `mpnn.backends.csr.cuda_reduce` does so for GPUs.

An aggregator is run whole if its kind is known; by its `combine` if it states one; or by its `parts`, one after the
other, if it is made of aggregators that can be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.aggregate import Composed, Max, Mean, Min, Sum, Var
from mpnn.backends.estimate import Estimate, both_ways, priced
from mpnn.graph import Graph
from mpnn.kernels.row_reduce import Associative, RowReduce, Walk
from mpnn.scores import Lookup, Request

_BEYOND_CACHE = 40e6  # bytes of features, of which next to none are found in a cache
KINDS: dict[type, str] = {Sum: "sum", Mean: "mean", Max: "max", Min: "min", Var: "var"}
_FAMILIES: dict[type, str] = {Sum: "sum", Mean: "sum", Max: "extreme", Min: "extreme", Var: "variance"}


def is_plain(request: Request) -> bool:
    """Whether weights, if there are any, are given: nothing is scored, normalised, dropped, added or returned."""
    unscored = request.score is None and request.normalize == "none" and request.edge_value is None
    return unscored and not request.dropout and not request.return_weights


def supports(request: Request) -> str | None:
    value = request.value
    if not value.is_floating_point():
        return f"it has no kernels for {value.dtype}"
    if max(request.graph.num_dst, request.graph.num_src) >= 2**31:
        return "it numbers nodes with 32 bits"
    return _why_not(request.reduce, request.needs_grad)


def _why_not(aggregator: Any, needs_grad: bool) -> str | None:
    """Why it has no kernels for an aggregator, if it has none."""
    name = type(aggregator).__name__
    if type(aggregator) in KINDS:
        return None
    if is_composed(aggregator):
        return next(filter(None, (_why_not(part, needs_grad) for part in aggregator.parts)), None)
    if not hasattr(aggregator, "combine"):
        return f"it cannot take {name} apart: it gives no combine(a, b), and is not Composed"
    if not hasattr(aggregator, "identity"):
        return f"{name} gives combine(a, b), but no identity to start from"
    for function in ("combine", "gradient"):
        if inspect.ismethod(getattr(aggregator, function, None)):
            return f"{function} of {name} must be a function of two numbers: make it a staticmethod"
    if needs_grad and getattr(aggregator, "gradient", None) is None:
        return f"{name} gives no gradient(message, out), so there is a forward pass only"
    return None


def is_composed(aggregator: Any) -> bool:
    return isinstance(aggregator, Composed) and type(aggregator).reduce is Composed.reduce


def counts(request: Request) -> dict[str, float]:
    """Edges, the numbers on them, and those of nodes, for each aggregator that is run."""
    graph, batch, leaves = request.graph, request.batch.numel(), leaves_of(request.reduce)
    width = request.heads * request.value.shape[-1]
    edges, numbers = float(graph.num_edges * batch), float(graph.num_edges * batch * width)
    beyond = min(1.0, graph.num_src * width * (torch.finfo(request.wide).bits // 8) / _BEYOND_CACHE)
    found = {"reduce": float(len(leaves)), "reduced edge": edges * len(leaves)}
    found["node number"] = float((graph.num_dst + graph.num_src) * batch * width * len(leaves))
    found["far number"] = numbers * beyond * len(leaves)
    for leaf in leaves:
        kind = f"{_FAMILIES.get(type(leaf), 'own')} number"
        found[kind] = found.get(kind, 0.0) + numbers
    if request.bias:
        found["weighed edge"] = edges * len(leaves)
    own = any(type(leaf) not in KINDS for leaf in leaves)
    return {**both_ways(found, request.needs_grad), "own compiled" if own else "compiled": 1.0}


def estimate(request: Request) -> Estimate:
    width = request.heads * request.value.shape[-1] * (torch.finfo(request.wide).bits // 8)
    kept = request.graph.num_dst * request.batch.numel() * width * (2.0 if request.needs_grad else 0.0)
    return priced("csr", counts(request), kept)


def leaves_of(aggregator: Any) -> list[Any]:
    """The aggregators that are run, those of a composition in its place."""
    if not is_composed(aggregator):
        return [aggregator]
    return [leaf for part in aggregator.parts for leaf in leaves_of(part)]


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    weight, value = _weight(request), request.value.to(request.wide)
    if weight is not None and weight.shape[-1] > 1 and value.shape[-2] < weight.shape[-1]:
        value = value.repeat_interleave(weight.shape[-1] // value.shape[-2], -2)
    out = taken_apart(request.reduce, request.graph, lambda part: _folded(part, value, weight, request))
    return out.to(request.value.dtype), None


def taken_apart(aggregator: Any, graph: Graph, fold: Callable[[Any], Tensor]) -> Tensor:
    """What an aggregator makes of the messages, [..., N_dst, H, D], where `fold` runs each that is not composed."""
    if not is_composed(aggregator):
        return fold(aggregator)
    found = [taken_apart(part, graph, fold).movedim(-3, 0) for part in aggregator.parts]
    out: Tensor = aggregator.compose(found, graph.csr.ptr.diff()).movedim(0, -3)
    return out


def _folded(aggregator: Any, value: Tensor, weight: Tensor | None, request: Request) -> Tensor:
    graph = request.graph
    kind: Any = KINDS.get(type(aggregator))
    if kind is None:
        kind = Associative(aggregator.combine, float(aggregator.identity), getattr(aggregator, "gradient", None))
    rows = graph.memo("csr rows", lambda: _walk(graph, by_source=False))
    columns = graph.memo("csr columns", lambda: _walk(graph, by_source=True)) if request.needs_grad else None
    flat = value.reshape(request.batch.numel(), graph.num_src, value.shape[-2:].numel())
    out = RowReduce.apply(flat.contiguous(), weight, rows, columns, kind)
    return out.view(*request.batch, graph.num_dst, *value.shape[-2:])


def _weight(request: Request) -> Tensor | None:
    """All biases as one [B or 1, E, H or 1] in the caller's order; None without any."""
    if not request.bias:
        return None
    graph, parts = request.graph, []
    for bias in request.bias:
        if isinstance(bias, Lookup):
            parts.append(graph.csr.to_caller(bias.table.to(request.wide).index_select(0, bias.ids(graph))))
        else:
            parts.append(bias.to(request.wide))
    total = sum(parts[1:], parts[0])
    batch = request.batch.numel() if total.dim() > 2 else 1
    if total.dim() > 2:
        total = total.expand(*request.batch, *total.shape[-2:])
    return total.reshape(batch, graph.num_edges, total.shape[-1]).contiguous()


def _walk(graph: Graph, by_source: bool) -> Walk:
    edges, order = graph.csc if by_source else graph.csr, graph.order
    absent = np.empty(0, np.int64)
    edge = absent if edges.edge_id is None else edges.edge_id.numpy()
    ptr, col = edges.ptr.numpy(), edges.col.int().numpy()
    if order is None:
        return Walk((ptr, col, edge, absent))
    node = order.numpy()
    begin, degree = ptr[node], np.diff(ptr)[node]
    walked = np.append(0, np.cumsum(degree))
    places = np.repeat(begin - walked[:-1], degree) + np.arange(len(col))
    return Walk((walked, col[places], edge[places] if len(edge) else places, node))
