"""The functional core: attention and aggregation over a graph, without layers or weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from mpnn import random
from mpnn.aggregate import aggregator
from mpnn.graph import Graph
from mpnn.plan import choose
from mpnn.scores import NORMALIZERS, Dot, Lookup, PerEdge, Request


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
    _check_features("query", query, graph.num_dst, "destinations", graph)
    _check_features("key", key, graph.num_src, "sources", graph)
    _check_features("value", value, graph.num_src, "sources", graph)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must be equally wide; got {query.shape[-1]} and {key.shape[-1]}")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    request = Request(
        graph,
        value,
        Dot(query, key, float(scale)),
        bias=() if bias is None else (bias,),
        normalize=normalize,
        dropout=dropout,
        return_weights=return_weights,
    )
    out, weights = run(request, backend)
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
        reduce: a name ("sum", "mean", "max", ...), an object with `reduce(messages, index)`, or such a function.
        weight: [E] or [E, 1] in the caller's edge order.

    Returns:
        [..., N_dst, F] (aggregators that give more than one number per feature widen F). Zeros where nobody is heard.
    """
    if x.dim() < 2:
        raise ValueError(f"x must have shape [..., N, F]; got {list(x.shape)}")
    _check_features("x", x, graph.num_src, "sources", graph, trailing=1)
    bias: tuple[PerEdge, ...] = ()
    if weight is not None:
        bias = (weight[:, None] if weight.dim() == 1 else weight,)
    request = Request(graph, x.unsqueeze(-2), bias=bias, normalize="none", reduce=aggregator(reduce))
    return run(request, backend)[0].squeeze(-2)


def run(request: Request, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Checks a request, has it planned and runs it: out [..., N_dst, H, D], and the weights if it asks for them."""
    request = checked(request)
    return choose(request, backend).run(request)


def checked(request: Request) -> Request:
    """The request with everything that backends rely on made sure of, and a dropout seed drawn if it needs one.

    Raises:
        ValueError, TypeError: naming what does not fit.
    """
    graph, value = request.graph, request.value
    if request.normalize not in NORMALIZERS:
        raise ValueError(f"there is no normaliser {request.normalize!r}; there are {', '.join(NORMALIZERS)}")
    if not 0.0 <= request.dropout < 1.0:
        raise ValueError(f"dropout must lie in [0, 1); got {request.dropout}")
    if value.device != graph.device:
        raise ValueError(
            f"the graph is on {graph.device} and the features on {value.device}; call graph.to({str(value.device)!r})"
        )
    for t in request.tensors:
        if t.device != value.device:
            raise ValueError(f"all tensors must be on one device; got {t.device} and {value.device}")
    if isinstance(request.score, Dot):
        for other in (request.score.query, request.score.key):
            if other.dtype != value.dtype:
                raise TypeError(f"query, key and value must have one dtype; got {other.dtype} and {value.dtype}")
    heads = request.heads
    for name, given in _head_counts(request):
        if given != 1 and heads % given:
            raise ValueError(f"{heads} heads cannot share {given} heads of {name}: {given} does not divide {heads}")
    for b in request.bias:
        if isinstance(b, Tensor) and (b.dim() < 2 or b.shape[-2] != graph.num_edges or b.shape[-1] not in (1, heads)):
            raise ValueError(
                f"a bias must have shape [E, H] = [{graph.num_edges}, {heads}], one row an edge; got {list(b.shape)}"
            )
    if request.dropout and request.seed is None:
        return replace(request, seed=random.new_seed(value.device))
    return request


def _head_counts(request: Request) -> list[tuple[str, int]]:
    counts = [("value", request.value.shape[-2])]
    if isinstance(request.score, Dot):
        counts.append(("key", request.score.key.shape[-2]))
    return counts


def _check_features(name: str, x: Tensor, n: int, role: str, graph: Graph, trailing: int = 2) -> None:
    if x.dim() < trailing + 1:
        shape = "[..., N, H, D]" if trailing == 2 else "[..., N, F]"
        raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}")
    found = x.shape[-1 - trailing]
    if found != n:
        raise ValueError(f"{name} has {found} nodes (shape {list(x.shape)}), but {graph} has {n} {role}")
