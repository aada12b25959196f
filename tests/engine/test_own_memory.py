"""Results own their memory: to write to one number of a result changes no other, and no input.

Every backend and every rewrite is asked for every round that it serves. The public calls are asked in the forms in
which a result may be a view: functions of sets, single edges, weights that are an input.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from capabilities import GRAPHS, REQUESTS
from torch import Tensor

from mpnn import MessagePassing, graphs, ops
from mpnn.attention import DotProduct
from mpnn.backends import BACKENDS
from mpnn.engine import choice
from mpnn.engine.rewrites.prepare import as_planned
from mpnn.graph import Graph
from mpnn.kernels.recurrent.scan import recurrence
from mpnn.round import Result, Round

SIZE = 640  # nodes, so many that sets are computed once

OVER: dict[str, Graph] = {
    **{name: GRAPHS[name] for name in ("complete", "causal", "repeated edges", "one node", "no source")},
    **{name: GRAPHS[name] for name in ("documents of unequal lengths", "window", "complete, more destinations")},
    "identity": graphs.identity().bind(4),
}


def faults(result: Result, inputs: list[Tensor]) -> Iterator[str]:
    """What is wrong with the memory of a result."""
    taken = {x.untyped_storage().data_ptr(): "an input" for x in inputs if x.numel()}
    for name, x in result._asdict().items():
        if x is None or not x.numel():
            continue
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            yield f"{name} is expanded"
        memory = x.untyped_storage().data_ptr()
        if memory in taken:
            yield f"{name} shares the memory of {taken[memory]}"
        taken[memory] = name


def runs(round: Round) -> Iterator[tuple[str, Callable[[], Result]]]:
    """All ways to run a round: each backend that serves it, alone or by a rewrite, and each rewrite."""
    planned = as_planned(round, "auto")
    for name in ("auto", *(b.NAME for b in BACKENDS)):
        try:
            run = choice.choose(planned, name).run
        except choice.Refused:
            continue
        yield name, partial(run, planned)
    for rewrite, reason in choice._candidates(planned)[1]:
        found = reason or choice._through(rewrite, planned, partial(choice._cheapest, estimated=True))
        if isinstance(found, choice.Choice):
            yield rewrite.NAME, partial(found.run, planned)


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.covering
def test_results_of_all_backends_and_rewrites(asked: str) -> None:
    count = 0
    for graph in OVER.values():
        for changes in ({}, {"return_weights": True}):
            given = replace(REQUESTS[asked](graph), **changes)
            inputs = list(given.tensors)
            for by, run in runs(given):
                for recorded in (True, False):
                    with torch.set_grad_enabled(recorded):
                        wrong = list(faults(run(), inputs))
                    assert not wrong, f"{by} over {graph}, gradients {recorded}, {changes}: {wrong}"
                    count += 1
    assert count > 10


CALLS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "a sum of a set": lambda x: MessagePassing(graphs.complete(), "sum")(x),
    "a mean of a set": lambda x: ops.aggregate(graphs.complete().bind(SIZE), x, "mean"),
    "a set of one": lambda x: ops.aggregate(graphs.complete().bind(1), x[:1]),
    "themselves": lambda x: MessagePassing(graphs.identity(), "max")(x),
    "themselves, along edges": lambda x: MessagePassing(graphs.identity().bind(SIZE), "sum")(x),
    "an aggregator that returns messages": lambda x: ops.aggregate(
        graphs.from_edges(graphs.identity().bind(SIZE).edge_index, SIZE), x, lambda messages, index: messages
    ),
    "weights of a sum": lambda x: MessagePassing(graphs.complete(), "sum")(x, return_weights=True),
    "weights of attention": lambda x: MessagePassing(graphs.complete(), "sum", None, DotProduct(8, 2))(
        x, return_weights=True
    ),
    "a bias as weights": lambda x: ops.attend(
        graphs.identity().bind(SIZE),
        *(0 * x[:, None], x[:, None], x[:, None]),
        bias=x[:, :1].detach(),
        normalize="none",
        return_weights=True,
    ),
    "attention to one node": lambda x: ops.attend(
        graphs.complete().bind(SIZE, 1), *(y[:, None] for y in (x, x[:1], x[:1])), return_lse=True
    ),
    "merged parts": lambda x: ops.merge([(x[:, None], x[:, :1])]),
    "a recurrence without features": lambda x: recurrence(*(x[None, :, None, :n] for n in (0, 0, 8))),
    "a state that nothing changes": lambda x: recurrence(
        x[None, :0, None], x[None, :0, None], x[None, :0, None], state=x[None, None, :8]
    ),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_of_public_calls(name: str, recorded: bool) -> None:
    """Writing to one number of a result changes no other, and not the input."""
    x = torch.randn(SIZE, 8, requires_grad=recorded)
    before = x.detach().clone()
    found = CALLS[name](x)
    results = found if isinstance(found, tuple) else (found,)
    for number, result in enumerate(results):
        others = [y.detach().clone() for y in results]
        if result.numel():
            with torch.no_grad():
                result[(0,) * result.dim()] = 7.0
            assert int((result != others[number]).sum()) == 1
        assert all(y.equal(other) for k, (y, other) in enumerate(zip(results, others, strict=True)) if k != number)
    assert x.detach().equal(before)
