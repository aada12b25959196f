"""`torch.ops.mpnn.run` and its backward.

Backends differentiate with torch's autograd. The operator therefore runs them with gradients enabled and stores the
recorded graph for its own backward, `torch.ops.mpnn.run_backward`. The record lives as long as the memory of one of the
operator's results, its key, which the compiled program saves for its backward like any other tensor. A compiler may
overwrite tensors that it considers unused and recompute them for the backward. If it did, or if the key was copied,
the forward runs a second time on the current tensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from mpnn.engine.compile.form import (
    Call,
    derived_graph,
    flatten,
    forward_fake as forward_fake,
    names_objects,
    result,
)
from mpnn.engine.compile.graph_tensor import graph_from_tensor
from mpnn.engine.compile.standard import run_in_trace as run_in_trace
from mpnn.engine.compile.traced_graph import bound
from mpnn.engine.rewrites.prepare import prepared
from mpnn.graph import Graph
from mpnn.graph.exchange import LOCAL
from mpnn.round import Round


def run(round: Round, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """As `mpnn.engine.run`, recorded in the traced program."""
    out, weights, _ = torch.ops.mpnn.run(*flatten(prepared(round, backend), backend))
    return out, weights if round.return_weights or round.return_lse or round.return_state else None


# ---------------------------------------------------------------------------------------------------- forward


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Out, the weights (empty unless returned) and the key of the record."""
    call = Call(*arguments)
    graph = _graph(call)
    # Inference tensors cannot require gradients, so in inference mode there is nothing to record.
    if any(call.needs) and not torch.is_inference_mode_enabled():
        recorded = _record(call, graph)
        outputs = [x.detach() for x in recorded.outputs]
        record_key = _keep(recorded)
    else:
        # No record has this key. A backward that comes all the same runs the forward again.
        outputs = result(call, graph)
        record_key = torch.zeros((), dtype=torch.int64)
    out, *weights = (_unaliased(x, call.tensors) for x in outputs)
    # The schema of an operator has a fixed number of results.
    return out, weights[0] if weights else out.new_empty(0), record_key


def _graph(call: Call) -> Graph:
    sizes = call.sizes[3:5]
    graph = bound(graph_from_tensor(call.token, *sizes), *sizes).to(call.tensors[0].device)
    if graph.exchange is not LOCAL:
        raise ValueError("torch.compile does not trace layers over a part of a graph; leave them uncompiled")
    return derived_graph(call, graph)


# ---------------------------------------------------------------------------------------------------- records


class _Recorded(NamedTuple):
    """The record of a forward for its backward: the detached inputs and the outputs."""

    graph: Graph
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Memory(np.ndarray):
    """The memory of a key, which owns the record."""

    recorded: _Recorded


_RECORDS: WeakValueDictionary[int, _Memory] = WeakValueDictionary()


def _keep(recorded: _Recorded) -> Tensor:
    # torch keeps the array alive while any tensor shares its storage, and the array keeps the record.
    memory = np.zeros((), np.int64).view(_Memory)
    memory.recorded = recorded
    record_key = torch.from_numpy(memory)
    _RECORDS[record_key.data_ptr()] = memory
    return record_key


def _record(call: Call, graph: Graph) -> _Recorded:
    """Runs the forward with gradients enabled."""
    with _differentiable():
        inputs = [t.detach().requires_grad_(needed) for t, needed in zip(call.tensors, call.needs, strict=True)]
        outputs = result(call._replace(tensors=inputs), graph)
    # Only a user's code can hide a tensor, so rounds of the library skip this walk over the recorded graph.
    if names_objects(call):
        _check_learns_nothing_else(outputs, inputs)
    return _Recorded(graph, inputs, outputs)


def _check_learns_nothing_else(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raises RuntimeError if a tensor that is not an input of the program requires gradients."""
    known = {id(x) for x in inputs}
    todo = [x.grad_fn for x in outputs]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        # The recorded graph ends in nodes that hold the tensor which accumulates the gradient.
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise RuntimeError(
                f"an aggregator or activation learns a tensor {list(variable.shape)} that compiled programs cannot "
                "see; make it an nn.Module that has the tensor as a parameter"
            )
        new = {n for n, _ in node.next_functions} - seen
        seen |= new
        todo += new


@contextmanager
def _differentiable() -> Iterator[None]:
    """Enables autograd: inside an operator torch disables both its mode and its kernels."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _unaliased(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A contiguous tensor that shares no memory with the others, as torch requires for results of an operator."""
    x = x.contiguous()
    memory = x.untyped_storage().data_ptr()
    return x.clone() if any(memory == t.untyped_storage().data_ptr() for t in others) else x


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


# ---------------------------------------------------------------------------------------------------- backward


def run_backward(
    grads: Sequence[Tensor], outputs: Sequence[Tensor], record_key: Tensor, *arguments: Any
) -> list[Tensor]:
    """The gradients of the tensors that need one. `outputs` are not read. They are arguments because backends may have
    saved them, and the compiler does not overwrite arguments."""
    call = Call(*arguments)
    memory = _RECORDS.get(record_key.data_ptr())
    # A copied key lies at another address, and its record may be gone.
    if memory is None:
        recorded = _record(call, _graph(call))
    # If an input was overwritten and computed again elsewhere, the record holds numbers that are no longer its own.
    elif all(map(_same_memory, memory.recorded.inputs, call.tensors)):
        recorded = memory.recorded
    else:
        recorded = _record(call, memory.recorded.graph)
    inputs = [x for x, needed in zip(recorded.inputs, call.needs, strict=True) if needed]
    pairs = [(x, g) for x, g in zip(recorded.outputs, grads, strict=False) if x.requires_grad]
    with _differentiable():
        # `retain_graph`, because a second backward may read the same record.
        gradients = torch.autograd.grad(
            [x for x, _ in pairs], inputs, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )
    results: list[Tensor] = []
    for x, g in zip(inputs, gradients, strict=True):
        # The gradient of a sum may be `g` itself, and torch forbids results of an operator that share memory.
        results.append(x.new_zeros(x.shape) if g is None else _unaliased(g, [*grads, *results]))
    return results


def run_backward_fake(
    grads: Sequence[Tensor], outputs: Sequence[Tensor], record_key: Tensor, *arguments: Any
) -> list[Tensor]:
    call = Call(*arguments)
    return [t.new_empty(t.shape) for t, needed in zip(call.tensors, call.needs, strict=True) if needed]


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = Call(*inputs)
    ctx.save_for_backward(*output, call.token, *call.tensors)
    ctx.sizes = call.sizes
    ctx.rest = call[3:]


def backward(ctx: Any, grad_out: Tensor, grad_weights: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    out, weights, record_key, token, *tensors = ctx.saved_tensors
    call = Call(token, ctx.sizes, tensors, *ctx.rest)
    grads = iter(torch.ops.mpnn.run_backward([grad_out, grad_weights], [out, weights], record_key, *call))
    return None, None, [next(grads) if needed else None for needed in call.needs], None, None, None
