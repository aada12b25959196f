"""Attention along the rows of any graph on a GPU: brings a request into the form of `mpnn.kernels.cuda.row_attention`.

Features go to the kernels as they are, of any width and any of their types; only heads that keys and values share
differently are written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpnn import random
from mpnn.aggregate import Mean
from mpnn.backends.csr import attention, on_device
from mpnn.backends.estimate import Counts, Estimate, on_gpu
from mpnn.kernels.row_spec import ACTIVATED, ADDITIVE, CONSTANT, DOT, NORMALIZERS
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, PerEdge, Request


def supports(request: Request) -> str | None:
    return attention.supports(request) or on_device.unavailable(request)


def counts(request: Request) -> Counts:
    """Bytes that the forward pass must move: what each edge gathers from its source, its number, what it has of its
    own; and what nodes are given."""
    graph, batch, size = request.graph, request.batch.numel(), request.value.element_size()
    value = request.value.shape[-2:].numel()
    source = {
        Dot: lambda score: score.key.shape[-2:].numel(),
        AdditiveScore: lambda score: score.src.shape[-1],
        AdditiveV2Score: lambda score: score.src.shape[-2:].numel(),
    }.get(type(request.score), lambda score: 0)(request.score)
    own = sum(x.shape[-1] * 4 for x in request.bias if isinstance(x, Tensor))
    edges = graph.num_edges * batch * ((value + source) * size + own + 8)
    nodes = graph.num_dst * batch * request.heads * (2 * request.value.shape[-1] * size + 4)
    return {"byte": float(edges + nodes), "number": float(graph.num_edges * batch * (value + source)), "launch": 3.0}


def estimate(request: Request) -> Estimate:
    """The backward pass gathers as much once more by destination, and once more by source."""
    found, passes = counts(request), 3 if request.needs_grad else 1
    # on ordinary cores, whatever the type of the features
    arithmetic = torch.float64 if request.wide == torch.float64 else torch.float32
    seconds = on_gpu(4 * passes * found["number"], passes * found["byte"], arithmetic, passes * found["launch"])
    kept = request.graph.num_dst * request.batch.numel() * request.heads * 4.0 * passes
    weighed = request.graph.num_edges * request.batch.numel() * request.heads * 4.0
    return Estimate(seconds, kept + weighed * (request.return_weights + bool(request.bias) * request.needs_grad))


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    from mpnn.kernels.cuda import row_attention

    graph, batch, heads = request.graph, request.batch, request.heads
    features, options = _scored(request)
    bias = on_device.biases(request)
    if bias is not None:
        features["bias"] = on_device.per_edge(bias, heads, request)
    if request.edge_value is not None:
        features["edge_value"], options["value_classes"] = _vectors(request.edge_value, request)
    spec = row_attention.Spec(
        on_device.rows(graph),
        on_device.columns(graph),
        heads,
        normalize=NORMALIZERS[request.normalize if request.weighted else "none"],
        keys=_keys(request),
        dropout=request.dropout if request.weighted else 0.0,
        return_weights=request.return_weights,
        **options,
    )
    out, weights = row_attention.attend(spec, row_attention.Given(**features))
    if type(request.reduce) is Mean:
        wide = request.wide
        inverse = graph.memo(("device inverse degree", wide), lambda: spec.rows.inverse_degree(wide))
        out = (out * inverse).to(out.dtype)
    out = out.view(*batch, *out.shape[1:])
    return out, None if weights is None else weights.view(*batch, *weights.shape[1:]).to(out.dtype)


def _scored(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of nodes, and of what scores know of edges, as `Given` names them; and the score as `Spec` does."""
    score, heads, value = request.score, request.heads, _entries(request.value, request)
    options: dict[str, Any]
    if isinstance(score, Dot):
        query, key = _entries(score.query, request), _entries(score.key, request)
        if key.shape[2] != value.shape[2]:
            key, value = _repeated(key, heads), _repeated(value, heads)
        found, options = {"value": value, "dst": query, "src": key}, {"kind": DOT, "scale": score.scale}
        options["cap"] = score.softcap or 0.0
        if score.edge_key is not None:
            found["edge"], options["edge_classes"] = _vectors(score.edge_key, request)
        return found, options
    if score is None:
        return {"value": value}, {"kind": CONSTANT, "scale": 0.0 if request.weighted else 1.0}
    slope = attention.slope_of(score.activation)
    options = {"slope": 0.0 if slope == "tanh" else slope, "tanh": slope == "tanh"}
    found = {"value": _repeated(value, heads)}
    if isinstance(score, AdditiveScore):
        found |= {"dst": _entries(score.dst[..., None], request), "src": _entries(score.src[..., None], request)}
        if score.edge is not None:
            found["before"] = on_device.per_edge(score.edge, heads, request)
        return found, {"kind": ADDITIVE, **options}
    found |= {"dst": _entries(score.dst, request), "src": _entries(score.src, request), "vector": score.vector}
    if score.edge is not None:
        found["edge"] = on_device.per_edge(score.edge, heads, request, trailing=2)
    return found, {"kind": ACTIVATED, **options}


def _vectors(given: PerEdge, request: Request) -> tuple[Tensor, Any]:
    """Vectors for each edge, or for each class, [B, E or classes, H, D]; and the classes, None for each edge's own."""
    from mpnn.kernels.cuda.row_attention import Classes, Ends

    if isinstance(given, Tensor):
        return on_device.per_edge(given, request.heads, request, trailing=2), None
    graph = request.graph
    src, dst = graph.edge_index
    classes = Classes(on_device.ids(given, graph), on_device.by_class(given, graph), Ends(dst, src))
    return on_device.per_edge(given.table, request.heads, request, trailing=2), classes


def _entries(x: Tensor, request: Request) -> Tensor:
    """Features of nodes as [B, N, H, D]."""
    return x.reshape(request.batch.numel(), *x.shape[-3:])


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[..., H, D], each shared head repeated for those that share it."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)


def _keys(request: Request) -> Tensor | None:
    """What dropout's hash makes of the seed and each (batch, head) pair, int32 [B * H]; None without dropout."""
    if not request.dropout or not request.weighted:
        return None
    assert request.seed is not None
    streams = torch.arange(request.batch.numel() * request.heads, device=request.value.device)
    return random.keys(request.seed, streams)
