"""A check of an operator with parts of your own: an aggregator, a score, an attention, an update, a backend."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import product

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from mpnn.backends import registered
from mpnn.engine.choice import Refused
from mpnn.graph import Graph
from mpnn.graphs import batch, from_edges, window
from mpnn.message_passing import MessagePassing
from mpnn.update import Replace

__all__ = ["check_operator"]

_NODES = 9
_REFERENCE = "edge_list"
_CLOSE = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-3, 1e-4)}
"""How far results may differ, relatively and absolutely."""


def check_operator(operator: MessagePassing, width: int, edge_dim: int | None = None, *, seed: int = 0) -> list[str]:
    """Checks that an operator computes what an operator over graphs must, with random features.

    Use it in the test of an aggregator, a score, an attention, an update or a backend that you add.

    - Each backend that runs the operator gives the result and the gradients of `edge_list`, which defines them.
    - Another order of the edges changes nothing.
    - Two graphs side by side, and two texts in a batch, give what each gives alone.
    - A node without in-neighbors and a graph without edges give finite results and gradients, and zeros if the operator
      has neither an attention nor an update.
    - The gradient with respect to x is that of finite differences.

    Args:
        operator: it is copied, and not changed. Its graph is not used.
        width: of the features of nodes.
        edge_dim: of the features of edges, if the operator takes them as `edge_attr`.
        seed: of the features and the edges.

    Returns:
        The names of the backends that were compared.

    Raises:
        AssertionError: one of these does not hold; the message names it.
    """
    operator = deepcopy(operator).double().eval()
    operator.backend = _REFERENCE
    random = torch.Generator().manual_seed(seed)
    # Nodes 0 and 1 have no in-neighbors, and one edge is there twice.
    edges = torch.cat([torch.tensor([[3, 4, 4], [2, 3, 3]]), _random_edges(30, 3, random)], 1)
    graph, other, empty = (
        _graph(some, edge_dim, random) for some in (edges, _random_edges(12, 0, random), edges[:, :0])
    )
    x, y = torch.randn(2, _NODES, width, dtype=torch.float64, generator=random)
    is_bare = operator.attention is None and isinstance(operator.update, Replace)
    for one, silent in ((graph, slice(0, 2)), (empty, slice(None))):
        results = _results(operator, x, one)
        assert all(tensor.isfinite().all() for tensor in results), f"results or gradients over {one} are not finite"
        assert not is_bare or not results[0][silent].any(), "a node without in-neighbors does not get zeros"

    compared = [graph, *([window(2).bind(_NODES)] if edge_dim is None else [])]
    names = (backend.NAME for backend in registered())
    backends = [name for name in names if sum(_is_run_by(operator, name, x, one) for one in compared)]

    (of_x, *gradients), (of_y, *_) = _results(operator, x, graph), _results(operator, y, graph)
    order = torch.randperm(graph.num_edges, generator=random)
    shuffled = _with_attr(graph, graph.edge_attr, order)
    _same(_results(operator, x, shuffled), [of_x, *gradients], "another order of the edges gives another result")
    of_both = operator(torch.stack([x, y]), graph).detach()
    _same([of_both], [torch.stack([of_x, of_y])], "two texts in a batch give another result than each alone")
    side_by_side = operator(torch.cat([x, y]), batch([graph, other])).detach()
    alone = torch.cat([of_x, operator(y, other).detach()])
    _same([side_by_side], [alone], "two graphs side by side give another result than each alone")

    try:
        gradcheck(lambda features: operator(features, graph), x.clone().requires_grad_())
    except GradcheckError as error:
        raise AssertionError(f"the gradient with respect to x is not that of finite differences: {error}") from None
    return backends


def _random_edges(count: int, first_dst: int, random: torch.Generator) -> Tensor:
    """Edges int64 [2, count], to the nodes from `first_dst` on."""
    src = torch.randint(_NODES, (count,), generator=random)
    return torch.stack([src, torch.randint(first_dst, _NODES, (count,), generator=random)])


def _graph(edges: Tensor, edge_dim: int | None, random: torch.Generator) -> Graph:
    attr = None
    if edge_dim is not None:
        attr = torch.randn(edges.shape[1], edge_dim, dtype=torch.float64, generator=random)
    return from_edges(edges, _NODES, edge_attr=attr)


def _with_attr(graph: Graph, attr: Tensor | None, order: Tensor | slice = slice(None)) -> Graph:
    """The graph with these features of edges, its edges in another order."""
    return from_edges(graph.edge_index[:, order], _NODES, edge_attr=None if attr is None else attr[order])


def _results(operator: MessagePassing, x: Tensor, graph: Graph, needs_gradient: bool = True) -> list[Tensor]:
    """The output, and the gradients with respect to x and the parameters of a sum with other weights of each number."""
    with torch.set_grad_enabled(needs_gradient):
        x = x.clone().requires_grad_(needs_gradient)
        out = operator(x, graph)
    if not needs_gradient:
        return [out]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    leaves = [x, *(each for each in operator.parameters() if each.requires_grad)]
    gradients = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    return [out.detach(), *gradients]


def _is_run_by(operator: MessagePassing, backend: str, x: Tensor, graph: Graph) -> bool:
    """Whether a backend runs this operator, in float64 or float32, with gradients or without. Its results are compared
    with those of the reference."""
    is_run = False
    for dtype, needs_gradient in product(_CLOSE, (True, False)):
        typed = graph if graph.edge_attr is None else _with_attr(graph, graph.edge_attr.to(dtype))
        call = x.to(dtype), typed, needs_gradient
        operator.to(dtype).backend = _REFERENCE
        expected = _results(operator, *call)
        operator.backend = backend
        try:
            found = _results(operator, *call)
        except Refused:
            continue
        is_run = True
        _same(found, expected, f"backend {backend} differs from {_REFERENCE}")
    operator.double().backend = _REFERENCE
    return is_run


def _same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        rtol, atol = _CLOSE[one.dtype]
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=lambda why: f"{what}:\n{why}")
