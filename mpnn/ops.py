"""The functional core: attention and aggregation over a graph, without layers or weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpnn import check, eager
from mpnn.aggregate import SUM, aggregator
from mpnn.graph import Graph
from mpnn.scores import Dot, Lookup, PerEdge, Request
from mpnn.topology import Topology

T = TypeVar("T")


def attend(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | Lookup | None = None,
    scale: float | None = None,
    normalize: str = "softmax",
    dropout: float = 0.0,
    backend: str = "auto",
    return_weights: bool = False,
) -> Any:
    """Dot-product attention along the edges of a graph (Vaswani et al. 2017, eq. 1, over any graph).

        w_ij = softmax_j( scale * <query_i, key_j> + bias_ij )   over the j that i hears
        out_i = sum_j w_ij * value_j

    Args:
        query: [..., N_dst, H, D]. key: [..., N_src, H_kv, D]. value: [..., N_src, H_kv, D_v]; H a multiple of H_kv.
        bias: [E, H] or [E, 1] in the caller's edge order, or a `Lookup` table over edge classes.
        scale: default 1 / sqrt(D).
        normalize: "softmax", "sigmoid" or "none".
        dropout: probability that a weight is dropped; the mask follows from torch's default generator.
        backend: "auto", or the name of one, which then runs or raises with its reason.
        return_weights: also return the weights before dropout, [..., E, H] in the caller's edge order.

    Returns:
        out [..., N_dst, H, D_v], or (out, weights). A destination that hears nobody gets zeros.

    Raises:
        ValueError, TypeError: shapes, types or devices that do not fit together, or a backend that refuses.
    """
    check.types(graph, query, key, value)
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    else:
        check.scale(scale)
    plain = bias is None and normalize == "softmax" and not dropout and not return_weights and type(backend) is str
    if plain and not torch.compiler.is_compiling():
        return _attend_plainly(graph, query, key, value, float(scale), backend)
    graph = _traced(graph, value)
    request = Request(
        graph,
        value,
        Dot(query, key, float(scale)),
        bias=() if bias is None else (bias,),
        normalize=normalize,
        dropout=dropout,
        reduce=SUM,
        return_weights=return_weights,
    )
    out, weights = run(request.told(), backend)
    return (out, weights) if return_weights else out


def aggregate(
    graph: Graph,
    x: Tensor,
    reduce: str | Any | Callable[..., Tensor] = "sum",
    *,
    weight: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """What each destination gathers from the sources it hears: `out_i = reduce_j( weight_ij * x_j )`.

    Args:
        x: [..., N_src, F].
        reduce: a name ("sum", "mean", "max", ...), an object with `reduce(messages, index)`, or such a function;
            messages are [E, batch..., 1, F], see `mpnn.aggregate`, whose `per_node` is for those that rank messages.
        weight: [E] or [E, 1] in the caller's edge order.

    Returns:
        [..., N_dst, F] (aggregators that give more than one number per feature widen F). Zeros where nobody is heard.
    """
    check.graph(graph)
    graph = _traced(graph, x)
    check.features("x", x, "sources", 1, graph)
    bias: tuple[PerEdge, ...] = ()
    if weight is not None:
        check.tensor("weight", weight)
        check.floating("weight", weight, f": call .to({x.dtype})")
        if weight.shape not in ((graph.num_edges,), (graph.num_edges, 1)):
            raise ValueError(f"weight must have shape [{graph.num_edges}], one for each edge; got {list(weight.shape)}")
        bias = (weight.view(-1, 1),)
    request = Request(graph, x.unsqueeze(-2), bias=bias, normalize="none", reduce=_aggregator(reduce))
    return run(request, backend)[0].squeeze(-2)


def run(request: Request, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Checks a request, has it planned and runs it: out [..., N_dst, H, D], and the weights if it asks for them.

    The features' type decides how it is computed; autocast, which acts on the maps around it, ends here.
    """
    if torch.compiler.is_compiling():
        from mpnn.compiled.operator import run as traced

        return traced(request, backend)
    return eager.run(request, backend)


def outline(given: Topology | Graph, num_dst: int, num_src: int, device: torch.device) -> Graph:
    """What stands for a graph of this size in a program that `torch.compile` traces."""
    from mpnn.compiled.outline import outline  # on request, as it imports torch's compiler: a second's work

    return outline(given, num_dst, num_src, device)


def built(build: Callable[..., T], *arguments: Any) -> T:
    """`build(*arguments)`, which in a program that `torch.compile` traces is a constant: how a model makes topologies
    that depend on the size of what it is called with."""
    if torch.compiler.is_compiling():
        from mpnn.compiled.outline import built

        return built(build, *arguments)
    return build(*arguments)


def _attend_plainly(graph: Graph, query: Tensor, key: Tensor, value: Tensor, scale: float, backend: str) -> Tensor:
    """As `run`, for dot products and a softmax alone: straight to torch's kernel where calls of this form were found to
    be no more than that. On a hundred nodes, all that stands between takes as long as the kernel does."""

    def request() -> Request:
        return Request(graph, value, Dot(query, key, scale))

    forms = [(x.shape, x.dtype, x.device, x.layout, x.requires_grad) for x in (query, key, value)]
    form = "attend", backend, torch.is_grad_enabled(), *forms
    choice = graph.memo(form, lambda: eager.choice(request(), backend))
    if choice.direct is None or torch.is_autocast_enabled(choice.device):
        return eager.run_by(choice, request())[0]
    return choice.direct(query, key, value, scale)


def _traced(graph: Graph, x: Tensor) -> Graph:
    """The graph, or what stands for it while a program is traced."""
    return outline(graph, graph.num_dst, graph.num_src, x.device) if torch.compiler.is_compiling() else graph


def _aggregator(given: str | Any | Callable[..., Tensor]) -> Any:
    if torch.compiler.is_compiling():
        from mpnn.compiled.form import aggregator_of

        return aggregator_of(given)
    return aggregator(given)
