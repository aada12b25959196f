"""`torch.ops.mpnn.run` and its backward.

Backends differentiate with torch's autograd, so the operator runs them with gradients on and keeps what they recorded
for its own backward, `torch.ops.mpnn.run_backward`. What is kept lives as long as the memory of one of the operator's
results, the ticket, which the compiled program saves for its backward like any other tensor. A compiler may write over
tensors that it thinks nobody needs, and make them again for the backward. Then, or when a ticket was copied, the
forward runs a second time on the tensors at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from mpnn import check, eager
from mpnn.compiled.embedded import opened
from mpnn.compiled.form import Call, derived, names_objects, put_together, read, result, taken_apart
from mpnn.compiled.outline import bound
from mpnn.graph import Graph
from mpnn.scores import Request


def run(request: Request, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """As `mpnn.eager.run`, written into the program that is traced."""
    out, weights, _ = torch.ops.mpnn.run(*taken_apart(eager.seeded(request), backend))
    return out, weights if request.return_weights else None


# ---------------------------------------------------------------------------------------------------- forward


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Out, the weights (empty unless asked for) and the ticket."""
    call = Call(*arguments)
    graph = _graph(call)
    if any(call.needs):
        recorded = _record(call, graph)
        outputs, ticket = [x.detach() for x in recorded.outputs], _ticket(recorded)
    else:
        outputs, ticket = result(call, graph), torch.zeros((), dtype=torch.int64)
    out, *weights = (_apart(x, call.tensors) for x in outputs)
    return out, weights[0] if weights else out.new_empty(0), ticket


def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*arguments)
    form, value = read(call.form), call.tensors[0]
    request = put_together(call, cast(Graph, _Sizes(call.sizes, value.device)))
    check.request(request)
    heads, width = form.reduced or (request.heads, value.shape[-1])
    out = value.new_empty(*request.batch, call.sizes[0], heads, width)
    asked = (*request.batch, call.sizes[2], request.heads) if form.return_weights else (0,)
    return out, value.new_empty(asked), torch.empty((), dtype=torch.int64)


class _Sizes:
    """A graph as far as checks and shapes need one."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.num_dst, self.num_src, self.num_edges = sizes[:3]
        self.device, self.num_relations = device, 0

    def memo(self, key: Any, build: Callable[[], Any]) -> Any:
        return build()

    def __repr__(self) -> str:
        return f"the graph ({self.num_dst} x {self.num_src})"


def _graph(call: Call) -> Graph:
    given = bound(opened(call.token), *call.sizes[3:5]).to(call.tensors[0].device)
    return derived(call, given)


# ---------------------------------------------------------------------------------------------------- what is kept


class _Recorded(NamedTuple):
    """What a forward leaves for its backward: its inputs, cut off from whatever made them, and what came of them."""

    graph: Graph
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Memory(np.ndarray):
    """A ticket's memory, to which hangs what was recorded."""

    recorded: _Recorded


_TICKETS: WeakValueDictionary[int, _Memory] = WeakValueDictionary()


def _ticket(recorded: _Recorded) -> Tensor:
    memory = np.zeros((), np.int64).view(_Memory)
    memory.recorded = recorded
    ticket = torch.from_numpy(memory)
    _TICKETS[ticket.data_ptr()] = memory
    return ticket


def _record(call: Call, graph: Graph) -> _Recorded:
    """The forward with gradients on."""
    with _differentiable():
        inputs = [t.detach().requires_grad_(needed) for t, needed in zip(call.tensors, call.needs, strict=True)]
        outputs = result(call._replace(tensors=inputs), graph)
    if names_objects(call):
        _check_learns_nothing_else(outputs, inputs)
    return _Recorded(graph, inputs, outputs)


def _check_learns_nothing_else(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raises if other tensors than the inputs need gradients: the program knows nothing of them."""
    known = {id(x) for x in inputs}
    todo = [x.grad_fn for x in outputs]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
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
    """Autograd on: inside an operator torch has it off, both its mode and its kernels."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _apart(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Contiguous, and sharing no memory with the others, as results of an operator must be."""
    x = x.contiguous()
    memory = x.untyped_storage().data_ptr()
    return x.clone() if any(memory == t.untyped_storage().data_ptr() for t in others) else x


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


# ---------------------------------------------------------------------------------------------------- backward


def run_backward(grads: Sequence[Tensor], outputs: Sequence[Tensor], ticket: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of those tensors that need one. `outputs` are not read: backends may have kept them, and as long
    as they are needed here nobody writes over them."""
    call = Call(*arguments)
    memory = _TICKETS.get(ticket.data_ptr())
    if memory is None:
        recorded = _record(call, _graph(call))
    elif all(map(_same_memory, memory.recorded.inputs, call.tensors)):
        recorded = memory.recorded
    else:
        recorded = _record(call, memory.recorded.graph)
    wanted = [x for x, needed in zip(recorded.inputs, call.needs, strict=True) if needed]
    made = [(x, g) for x, g in zip(recorded.outputs, grads, strict=False) if x.requires_grad]
    with _differentiable():
        found = torch.autograd.grad(
            [x for x, _ in made], wanted, [g for _, g in made], retain_graph=True, allow_unused=True
        )
    given: list[Tensor] = []
    for x, g in zip(wanted, found, strict=True):
        given.append(x.new_zeros(x.shape) if g is None else _apart(g, [*grads, *given]))
    return given


def run_backward_fake(
    grads: Sequence[Tensor], outputs: Sequence[Tensor], ticket: Tensor, *arguments: Any
) -> list[Tensor]:
    call = Call(*arguments)
    return [t.new_empty(t.shape) for t, needed in zip(call.tensors, call.needs, strict=True) if needed]


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = Call(*inputs)
    ctx.save_for_backward(*output, call.token, *call.tensors)
    ctx.sizes, ctx.rest = call.sizes, call[3:]


def backward(ctx: Any, grad_out: Tensor, grad_weights: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    out, weights, ticket, token, *tensors = ctx.saved_tensors
    call = Call(token, ctx.sizes, tensors, *ctx.rest)
    grads = iter(torch.ops.mpnn.run_backward([grad_out, grad_weights], [out, weights], ticket, *call))
    return None, None, [next(grads) if needed else None for needed in call.needs], None, None, None
