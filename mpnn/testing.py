"""A check of an operator with parts of your own: an aggregator, a score, an attention, an update, a backend."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import product

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from mpnn import engine
from mpnn.backends import registered
from mpnn.engine.choice import Refused
from mpnn.graph import Graph
from mpnn.graphs import batch, from_edges, window
from mpnn.message_passing import MessagePassing

__all__ = ["check_operator"]

_NODES = 9
_SOURCES = 7  # of the graph with two sets of nodes
_REFERENCE = "edge_list"
_CLOSE = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-3, 1e-4)}
"""How far results may differ, relatively and absolutely."""

Numbers = dict[str, Tensor]
"""The result and the gradients of an operator, by their names in messages."""


def check_operator(
    operator: MessagePassing, width: int, edge_dim: int | None = None, *, two_sets: bool = True, seed: int = 0
) -> list[str]:
    """Checks that an operator computes what an operator over graphs must, with random features.

    Use it in the test of an aggregator, a score, an attention, an update or a backend that you add.

    - Nodes without in-neighbors and a graph without edges give finite results and gradients. The aggregator returns
      zeros for these nodes.
    - The aggregator returns one row for each node and head, as wide as a message or a multiple of that.
    - Each backend that runs the operator gives the result and the gradients of `edge_list`, which defines them.
    - Another order of the edges changes nothing.
    - Two graphs side by side, and two texts in a batch, give what each gives alone.
    - Sources that are a set of their own give what they give as nodes of the graph.
    - The gradient with respect to x is that of finite differences.

    Args:
        operator: it is copied, and not changed. Its graph is not used.
        width: of the features of nodes, x [N, width].
        edge_dim: of the features of edges, if the operator takes them as `edge_attr`.
        two_sets: False for an operator that refuses sources that are another set of nodes than its destinations.
        seed: of the features and the edges.

    Returns:
        The names of the backends that were compared.

    Raises:
        TypeError: `operator` is not an operator.
        AssertionError: one of these does not hold, or the operator raises an error over one of these graphs. The
            message says which, and whether the result or which gradient is wrong.
    """
    _check_kind(operator)
    operator = deepcopy(operator).double().eval()
    operator.backend = _REFERENCE
    random = torch.Generator().manual_seed(seed)
    # Nodes 0 and 1 have no in-neighbors, and one edge is there twice.
    edges = torch.cat([torch.tensor([[3, 4, 4], [2, 3, 3]]), _random_edges(30, 3, random)], 1)
    # Without these nodes, each node has an in-neighbor.
    ring = torch.stack([torch.arange(_NODES), torch.arange(_NODES).roll(1)])
    graph, other, empty, full = (
        _graph(some, edge_dim, random) for some in (edges, _random_edges(12, 0, random), edges[:, :0], ring)
    )
    x, y = torch.randn(2, _NODES, width, dtype=torch.float64, generator=random)

    _check_shape(operator, x, full)
    _finite(operator, x, full, "a graph in which each node has an in-neighbor")
    of_x = _finite(operator, x, graph, "a graph in which nodes 0 and 1 have no in-neighbors")
    _finite(operator, x, empty, "a graph without edges")
    if operator.edges is None:
        messages = [engine.run(operator.rounds(x, one)[0], _REFERENCE)[0] for one in (graph, empty)]
        assert not torch.cat([messages[0][:2], messages[1]]).any(), "a node without in-neighbors does not get zeros"

    compared = [graph, *([window(2).bind(_NODES)] if edge_dim is None else [])]
    names = (backend.NAME for backend in registered())
    backends = [name for name in names if sum(_is_run_by(operator, name, x, one) for one in compared)]

    order = torch.randperm(graph.num_edges, generator=random)
    shuffled = _with_attr(graph, graph.edge_attr, order)
    of_order = "another order of the edges gives another result (two edges are equal: their messages tie)"
    _same(_numbers(operator, x, shuffled), of_x, of_order)
    of_y = operator(y, graph)
    of_both = operator(torch.stack([x, y]), graph)
    expected = torch.stack([of_x["result"], of_y])
    _same({"result": of_both}, {"result": expected}, "two texts in a batch give another result than each alone")
    side_by_side = operator(torch.cat([x, y]), batch([graph, other]))
    alone = torch.cat([of_x["result"], operator(y, other)])
    _same({"result": side_by_side}, {"result": alone}, "two graphs side by side give another result than each alone")
    if two_sets:
        _check_two_sets(operator, x, graph)

    try:
        gradcheck(lambda features: operator(features, graph), x.clone().requires_grad_())
    except GradcheckError as error:
        raise AssertionError(f"the gradient with respect to x is not that of finite differences: {error}") from None
    return backends


def _check_kind(operator: object) -> None:
    """Raises TypeError unless this is an operator. People pass the part that they wrote, or its class."""
    if hasattr(operator, "rounds") and not isinstance(operator, type):
        return
    kind = operator if isinstance(operator, type) else type(operator)
    given = f"the class {kind.__name__}" if kind is operator else f"an object of {kind.__name__}"
    hint = "check_operator(MessagePassing(None, aggregate, update, attention), width) with your part in its place"
    if hasattr(kind, "reduce"):
        hint = f"check_operator(MessagePassing(None, {kind.__name__}()), width)"
    raise TypeError(f"check_operator takes an operator, which uses your part; got {given}: write {hint}")


def _random_edges(count: int, first_dst: int, random: torch.Generator) -> Tensor:
    """Edges int64 [2, count], to the nodes from `first_dst` on."""
    src = torch.randint(_NODES, (count,), generator=random)
    return torch.stack([src, torch.randint(first_dst, _NODES, (count,), generator=random)])


def _graph(edges: Tensor, edge_dim: int | None, random: torch.Generator) -> Graph:
    attr = None
    if edge_dim is not None:
        attr = torch.randn(edges.shape[1], edge_dim, dtype=torch.float64, generator=random)
    return from_edges(edges, _NODES, edge_attr=attr)


def _with_attr(graph: Graph, attr: Tensor | None, kept: Tensor | slice = slice(None)) -> Graph:
    """The graph with these features of edges, and of its edges those of the numbers or the mask `kept`."""
    return from_edges(graph.edge_index[:, kept], _NODES, edge_attr=None if attr is None else attr[kept])


@contextmanager
def _names_errors(what: str, advice: str = "") -> Iterator[None]:
    """Raises AssertionError for an error of any type, with a text that says what raised it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}: {error}{advice}") from error


def _numbers(operator: MessagePassing, x: Tensor, graph: Graph, needs_gradient: bool = True) -> Numbers:
    """The result, and the gradients with respect to x and the parameters of a sum with other weights of each number."""
    with torch.set_grad_enabled(needs_gradient):
        x = x.clone().requires_grad_(needs_gradient)
        out = operator(x, graph)
    if not needs_gradient:
        return {"result": out}
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    leaves = {"x": x} | {name: each for name, each in operator.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(
        (out * weights).sum(), [*leaves.values()], allow_unused=True, materialize_grads=True
    )
    named = {f"gradient with respect to {name}": each for name, each in zip(leaves, gradients, strict=True)}
    return {"result": out.detach()} | named


def _finite(operator: MessagePassing, x: Tensor, graph: Graph, what: str) -> Numbers:
    """The numbers of the operator over this graph, if they are finite."""
    with _names_errors(f"the operator over {what}"):
        numbers = _numbers(operator, x, graph)
    for name, tensor in numbers.items():
        rows = (~tensor.isfinite()).flatten(1).any(1) if tensor.dim() > 1 else ~tensor.isfinite().flatten()
        where = ", ".join(map(str, rows.nonzero().flatten().tolist()))
        assert not where, f"over {what}, the {name} is not finite in row {where}"
    return numbers


def _check_shape(operator: MessagePassing, x: Tensor, graph: Graph) -> None:
    """Raises AssertionError if the result of the aggregator has another shape than [N, H, D], or a multiple of D."""
    with _names_errors("the operator over a graph in which each node has an in-neighbor"):
        round = operator.rounds(x, graph)[0]
        shape = list(engine.run(round, _REFERENCE)[0].shape)
    heads, width = round.heads, round.value.shape[-1]
    factor = max(shape[-1] // width, 1)
    assert shape == [_NODES, heads, factor * width], (
        f"the aggregator returns a result of shape {shape} for {_NODES} nodes, {heads} heads and messages of {width} "
        f"numbers; expected {[_NODES, heads, width]}, or a multiple of {width} numbers"
    )


def _check_two_sets(operator: MessagePassing, x: Tensor, graph: Graph) -> None:
    """Compares edges from the first nodes of a graph with the same edges from sources that are a set of their own. The
    sets have two sizes, so that a score that takes one for the other is refused."""
    one_set = _with_attr(graph, graph.edge_attr, graph.edge_index[0] < _SOURCES)
    two_sets = from_edges(one_set.edge_index, num_dst=_NODES, num_src=_SOURCES, edge_attr=one_set.edge_attr)
    advice = ". If the operator is for one set of nodes only, pass two_sets=False"
    with _names_errors(f"the operator over a graph from {_SOURCES} sources to {_NODES} destinations", advice):
        out = operator(x, two_sets, lambda prepared: prepared[:_SOURCES])
    law = "sources that are a set of their own give another result than as nodes of the graph"
    _same({"result": out}, {"result": operator(x, one_set)}, law)


def _is_run_by(operator: MessagePassing, backend: str, x: Tensor, graph: Graph) -> bool:
    """Whether a backend runs this operator, in float64 or float32, with gradients or without. Its results are compared
    with those of the reference."""
    is_run = False
    for dtype, needs_gradient in product(_CLOSE, (True, False)):
        typed = graph if graph.edge_attr is None else _with_attr(graph, graph.edge_attr.to(dtype))
        call = x.to(dtype), typed, needs_gradient
        operator.to(dtype).backend = _REFERENCE
        expected = _numbers(operator, *call)
        operator.backend = backend
        with _names_errors(f"backend {backend}"):
            try:
                found = _numbers(operator, *call)
            except Refused:
                continue
        is_run = True
        _same(found, expected, f"backend {backend} differs from {_REFERENCE}")
    operator.double().backend = _REFERENCE
    return is_run


def _same(found: Numbers, expected: Numbers, law: str) -> None:
    """Raises AssertionError with the law that is broken and the name of the numbers that differ."""
    for name, one in found.items():
        rtol, atol = _CLOSE[one.dtype]
        message = f"{law} ({name}, {one.dtype}):\n{{}}"
        torch.testing.assert_close(one, expected[name], rtol=rtol, atol=atol, msg=message.format)
