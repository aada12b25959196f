"""Sums, means, extremes and variances over a list of edges, without a plan: what a layer over molecules runs, whose
graph is made anew in each step. To describe, validate and plan a round takes longer than such a sum.

Over lists of edges these rounds run by the row kernels, whatever their size (`mpnn/engine/choice.py`), so nothing is
left to choose. All that asks for more than the sum has a plan as any round.
"""

from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from mpnn.aggregate import Mean, Sum
from mpnn.backends import BACKENDS, registered
from mpnn.backends.csr import edges, reduce
from mpnn.engine.choice import is_matrix
from mpnn.graph import Graph
from mpnn.graph.exchange import LOCAL
from mpnn.graph.modes import is_transformed
from mpnn.graph.sharding import active
from mpnn.kernels import row_reduce
from mpnn.kernels.cpu import library
from mpnn.round import Round
from mpnn.update import Update

_METHODS = {"forward", "rounds", "_run", "_attend", "_exchanged", "_prepared"}
_LINEAR = (Sum, Mean)
_PLAIN = {
    **dict.fromkeys(("score", "edge_value", "sinks", "log_gate", "beta", "state", "dst_bias", "src_bias"), None),
    **dict.fromkeys(("head_ids", "mix_logits", "mix_weights"), None),
    **dict.fromkeys(("return_weights", "return_lse", "return_state", "keep_accumulate_dtype"), False),
}
_fields = attrgetter(*_PLAIN)
_values = tuple(_PLAIN.values())


def message(operator: Any, graph: Any, x: Tensor) -> Tensor | None:
    """The messages [..., N, D] of an operator without attention, for a call of x and a graph alone; None if something
    asks for a plan."""
    graph = operator.graph if graph is None else graph
    update = operator._modules["update"]
    aggregate = operator.aggregate
    if type(x) is not Tensor or not _runs(graph, aggregate, x, 2) or x.shape[-2] != graph.num_dst:
        return None
    if operator.backend != "auto" or (operator.training and operator.edge_dropout):
        return None
    is_own = type(update).prepare is not Update.prepare or "prepare" in vars(update)
    if is_own or not _METHODS.isdisjoint(vars(operator)) or _is_special(x):
        return None
    recorded = x.requires_grad and torch.is_grad_enabled()
    if x.dim() > 2 or type(aggregate) not in _LINEAR:
        return reduce.reduced(graph, aggregate, x.unsqueeze(-2), None, recorded).squeeze(-2)
    return _summed(graph, aggregate, x.contiguous(), None, recorded)


def _summed(graph: Graph, aggregate: Any, x: Tensor, weight: Tensor | None, recorded: bool) -> Tensor:
    """Sums or means of x [N_src, D]."""
    if graph.stored_edges.dtype is not torch.int64:  # they are many
        return reduce.reduced(graph, aggregate, x.unsqueeze(1), weight, recorded).squeeze(1)
    kind = reduce.KINDS[type(aggregate)]
    rows = partial(edges.in_order, graph)
    listed = graph.cached("listed", lambda: row_reduce.Listed(graph.ends, graph.num_dst, graph.num_src))
    summed: Tensor = (row_reduce.RowSum.apply if recorded else row_reduce.row_sum)(x, weight, rows, listed, kind)
    return summed


def result(round: Round) -> Tensor | None:
    """What a round of plain or weighted messages results in, [..., N, H, D]; None if something asks for a plan. No
    transform of torch.func is active."""
    value = round.value
    bias = round.bias
    if type(value) is not Tensor or not _runs(round.graph, round.reduce, value, 3):
        return None
    if round.normalize != "none" or round.dropout or not all(map(is_, _fields(round), _values)):
        return None
    if len(bias) > 1 or value.is_neg() or torch._C._len_torch_dispatch_stack():
        return None
    weight = None
    recorded = value.requires_grad
    if bias:
        given = bias[0]
        if type(given) is not Tensor or given.shape != (round.graph.num_edges, 1) or given.dtype is not value.dtype:
            return None
        if not given.is_cpu or given.layout is not torch.strided or given.is_neg():
            return None
        weight = given.unsqueeze(0).contiguous()
        recorded = recorded or given.requires_grad
    recorded = recorded and torch.is_grad_enabled()
    is_fixed = weight is None or not weight.requires_grad
    if value.dim() == 3 and value.shape[1] == 1 and is_fixed and type(round.reduce) in _LINEAR:
        return _summed(round.graph, round.reduce, value.squeeze(1).contiguous(), weight, recorded).unsqueeze(1)
    return reduce.reduced(round.graph, round.reduce, value, weight, recorded)


def _runs(graph: Any, aggregate: Any, x: Tensor, trailing: int) -> bool:
    """Whether the row kernels aggregate x [..., N_src, trailing dimensions] along this graph."""
    return (
        type(graph) is Graph
        and type(aggregate) in reduce.KINDS
        and (x.dtype is torch.float32 or x.dtype is torch.float64)
        and x.is_cpu
        and x.layout is torch.strided
        and x.dim() >= trailing
        and x.shape[-trailing] == graph.num_src
        and x.numel() > 0
        and graph.exchange is LOCAL
        and graph.cached("runs by rows", lambda: _is_listed(graph))
        and registered() is BACKENDS
    )


def _is_special(x: Tensor) -> bool:
    """Whether the modes that are on, or the tensor, ask for more than its numbers."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes or torch._C._get_tracing_state()) or is_transformed() or x.is_neg() or active() is not None


def _is_listed(graph: Graph) -> bool:
    """Whether the row kernels run along this graph: a list of edges, and no matrix of pairs."""
    fits = graph.is_explicit and graph.device.type == "cpu" and max(graph.num_dst, graph.num_src) < 2**31
    return fits and not is_matrix(graph) and library.why_missing() is None
