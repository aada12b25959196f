"""Attention along the rows of any graph on a GPU: converts a request for `mpnn.kernels.cuda.row_attention`.

Features of any width and any supported dtype are passed without a copy, except that heads are repeated if keys and
values have different numbers of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpnn.aggregate import Mean
from mpnn.backends.cost_model import Counts, Estimate, on_gpu
from mpnn.backends.csr import attention, on_device
from mpnn.kernels.row_spec import NORMALIZERS
from mpnn.request.request import Request
from mpnn.request.scores import AdditiveScore, AdditiveV2Score, Dot, slope_of
from mpnn.request.tables import PerEdge

SERVES = (attention.SERVES | {"cuda"}) - {"cpu", "sinks", "return_lse", "node_ids"}
REASONS = {"sinks": "on CUDA it does not support sinks", "return_lse": "on CUDA it does not return lse",
    "node_ids": "on CUDA its dropout hashes the numbers of nodes in the part, not in the whole graph"}  # fmt: skip


def refusal(request: Request) -> str | None:
    return attention.refusal(request) or on_device.unavailable(request)


def counts(request: Request) -> Counts:
    """Bytes moved by the forward pass: the features that each edge gathers from its source, its index and biases, and
    the results of each node."""
    graph, batch, size = request.graph, request.batch.numel(), request.value.element_size()
    value, source = request.value.shape[-2:].numel(), 0
    for name, role in () if request.score is None else request.score.roles.items():
        if role.of == "src":
            source += getattr(request.score, name).shape[-role.trailing :].numel()
    biases = sum(x.shape[-1] * 4 for x in request.bias if isinstance(x, Tensor))
    edges = graph.num_edges * batch * ((value + source) * size + biases + 8)
    nodes = graph.num_dst * batch * request.heads * (2 * request.value.shape[-1] * size + 4)
    return {"byte": float(edges + nodes), "number": float(graph.num_edges * batch * (value + source)), "launch": 3.0}


def estimate(request: Request) -> Estimate:
    """The backward pass gathers the same bytes once by destination and once by source."""
    operations, passes = counts(request), 3 if request.needs_grad else 1
    # on ordinary cores, for features of any dtype
    arithmetic = torch.float64 if request.accumulate_dtype == torch.float64 else torch.float32
    seconds = on_gpu(
        4 * passes * operations["number"], passes * operations["byte"], arithmetic, passes * operations["launch"]
    )
    saved = request.graph.num_dst * request.batch.numel() * request.heads * 4.0 * passes
    weights = request.graph.num_edges * request.batch.numel() * request.heads * 4.0
    return Estimate(seconds, saved + weights * (request.return_weights + bool(request.bias) * request.needs_grad))


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    from mpnn.kernels.cuda import row_attention

    graph, batch, heads = request.graph, request.batch, request.heads
    features, options = _score(request)
    bias = on_device.biases(request)
    if bias is not None:
        features["bias"] = on_device.per_edge(bias, heads, request)
    if request.edge_value is not None:
        features["edge_value"], options["value_types"] = _vectors(request.edge_value, request)
    spec = row_attention.Spec(
        on_device.rows(graph),
        on_device.columns(graph),
        heads,
        normalize=NORMALIZERS[request.normalize if request.weighted else "none"],
        dropout_keys=request.dropout_keys(),
        dropout=request.dropout if request.weighted else 0.0,
        return_weights=request.return_weights,
        **options,
    )
    out, weights = row_attention.attend(spec, row_attention.Given(**features))
    if type(request.reduce) is Mean:
        dtype = request.accumulate_dtype
        inverse = graph.cached(("device inverse degree", dtype), lambda: spec.rows.inverse_degree(dtype))
        out = (out * inverse).to(out.dtype)
    out = out.view(*batch, *out.shape[1:])
    return out, None if weights is None else weights.view(*batch, *weights.shape[1:]).to(out.dtype)


def _score(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of nodes and of the score as fields of `Given`, and the options of the score as fields of `Spec`."""
    value, heads = _entries(request.value, request), request.heads
    kind, options, vector = attention.KINDS[type(request.score)], {}, None
    match request.score:
        case Dot(query, key, scale, edge, softcap):
            options = {"scale": scale, "softcap": softcap or 0.0}
        case AdditiveScore(query, key, activation, edge):
            query, key, slope = query[..., None], key[..., None], slope_of(activation)
            options = {"slope": 0.0 if slope == "tanh" else slope, "tanh": slope == "tanh"}
        case AdditiveV2Score(query, key, vector, activation, edge):
            slope = slope_of(activation)
            options = {"slope": 0.0 if slope == "tanh" else slope, "tanh": slope == "tanh"}
        case _:
            return {"value": value}, {"kind": kind, "scale": 0.0 if request.weighted else 1.0}
    query, key, options["kind"] = _entries(query, request), _entries(key, request), kind
    if key.shape[2] != value.shape[2]:  # the kernel groups both or neither
        key, value = _repeat(key, heads), _repeat(value, heads)
    features = {"value": value, "query": query, "key": key, "vector": vector}
    if edge is not None and isinstance(request.score, AdditiveScore):
        features["edge_key"] = on_device.per_edge(on_device.numbers(edge, request), heads, request)
    elif edge is not None:
        features["edge_key"], options["key_types"] = _vectors(edge, request)
    return features, options


def _vectors(data: PerEdge, request: Request) -> tuple[Tensor, Any]:
    """Vectors per edge or per edge type, [B, E or edge types, H, D], and the edge types, None for vectors per edge."""
    from mpnn.kernels.cuda.row_attention import EdgeTypes, Ends

    if isinstance(data, Tensor):
        return on_device.per_edge(data, request.heads, request, trailing=2), None
    graph = request.graph
    src, dst = graph.ends
    types = EdgeTypes(on_device.ids(data, graph), on_device.by_type(data, graph), Ends(dst, src))
    return on_device.per_edge(data.table, request.heads, request, trailing=2), types


def _entries(x: Tensor, request: Request) -> Tensor:
    """Features of nodes as [B, N, H, D]."""
    return x.reshape(request.batch.numel(), *x.shape[-3:])


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Repeats each shared head of x [..., H_kv, D] to [..., heads, D]."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)
