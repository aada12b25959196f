"""Attention along the rows of any graph on CPU: converts a request for `mpnn.kernels.row_attention`. The scores it
supports are supported on GPUs too (`mpnn.backends.csr.cuda_attention`).

Torch operations pad widths to whole vectors and cast 16-bit features to float32, so autograd differentiates both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.aggregate import Mean, Sum
from mpnn.backends.cost_model import Estimate, both_ways, of_biases, priced
from mpnn.backends.csr import edges
from mpnn.graph import Graph
from mpnn.kernels import row_attention
from mpnn.kernels.cpu import library
from mpnn.kernels.row_attention import LANES, Spec, Tensors
from mpnn.kernels.row_spec import ACTIVATED, ADDITIVE, CONSTANT, DOT, NORMALIZERS
from mpnn.kernels.sinks import share_of_edges
from mpnn.request import rng
from mpnn.request.request import Request
from mpnn.request.scores import Activation, fused_form, slope_of
from mpnn.request.tables import EmbeddingTable, PerEdge

_BEYOND_CACHE = 1 << 24  # bytes of features
KINDS = {"dot": DOT, "additive": ADDITIVE, "activated": ACTIVATED}


def supports(request: Request) -> str | None:
    score, value = request.score, request.value
    if (why := library.why_missing()) is not None:
        return why
    if not value.is_floating_point():
        return f"it has no kernels for {value.dtype}"
    if type(request.reduce) not in (Sum, Mean):
        return "its attention sums messages or takes their mean, and cannot aggregate them otherwise"
    fused = fused_form(score)
    if score is not None and fused is None:
        return f"it has no kernel for {type(score).__name__}"
    if request.heads == 0:
        return "there is no head to compute"
    if fused and slope_of(fused.activation) is None:
        return f"its additive scores support LeakyReLU and tanh, and it cannot compile {_name_of(fused.activation)}"
    vectors = [("edge_value", request.edge_value, value.shape[-1])]
    if fused and fused.kind != "additive":
        vectors.append(("edge_key" if fused.kind == "dot" else "edge", fused.edge_key, fused.query.shape[-1]))
    for name, data, width in vectors:
        numbers = None if data is None else _numbers(data)
        if numbers is not None and numbers.shape[-1] != width:
            return f"{name} is {numbers.shape[-1]} wide, and the features it is added to are {width} wide"
    if max(request.graph.num_dst, request.graph.num_src) >= 2**31:
        return "it numbers nodes with 32 bits"
    return None


def counts(request: Request) -> dict[str, float]:
    """Edges, edges times heads, and the components that each edge gathers from its two ends."""
    graph, batch, fused = request.graph, request.batch.numel(), fused_form(request.score)
    width = request.heads * request.value.shape[-1]
    edges = float(graph.num_edges * batch)
    gathered = edges * width * (2 if fused and fused.kind != "additive" else 1)
    # features that exceed the cache are read from memory for each edge
    far = max(graph.num_dst, graph.num_src) * width * (torch.finfo(request.accumulate_dtype).bits // 8) > _BEYOND_CACHE
    kind = fused.kind if fused else "biased"
    operations = {f"{kind} call": 1.0, "scored edge": edges, f"{kind} head": edges * request.heads}
    operations |= {
        "far gathered number" if far else "gathered number": gathered,
        "attending number": float(graph.num_dst * batch * width),
    }
    if kind == "activated":
        operations["activated number"] = edges * width
    if request.bias:
        operations |= of_biases(request.bias, "edge", graph.num_edges)
    added = (request.edge_value, fused.edge_key if fused and kind == "dot" else None)
    if vectors := sum(vector is not None for vector in added):
        operations["vector number"] = edges * width * vectors
    if request.dropout:
        operations["dropped head"] = edges * request.heads
    operations = both_ways(operations, request.needs_grad)
    if request.needs_grad:  # the forward pass reads those sources that have edges; the backward pass writes all
        operations["attending number, back"] = float(max(graph.num_dst, graph.num_src) * batch * width)
    return operations


def estimate(request: Request) -> Estimate:
    size = request.graph.num_edges * request.batch.numel() * request.heads * 2 * request.needs_grad
    return priced("csr", counts(request), size * torch.finfo(request.accumulate_dtype).bits / 8)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    graph, dtype = request.graph, request.accumulate_dtype
    bias, table = _biases(request)
    query = key = vector = edge_key = edge_term = None
    kind, scale, softcap = CONSTANT, 1.0, 0.0
    slope: Any = 1.0
    fused = fused_form(request.score)
    if fused is not None:
        kind, scale, softcap, pad = KINDS[fused.kind], fused.scale, fused.softcap or 0.0, fused.kind != "additive"
        query, key = (_pad(x, dtype) if pad else x.to(dtype) for x in (fused.query, fused.key))
        edge = fused.edge_key
        if isinstance(edge, EmbeddingTable) and fused.kind != "dot":
            edge = _expand(edge, graph)
        edge_key, edge_term = (edge, None) if pad else (None, edge)
        vector = None if fused.vector is None else _pad(fused.vector, dtype)
        slope = slope_of(fused.activation)
    elif request.weighted:
        scale = 0.0  # the logits are the biases
    tanh = slope == "tanh"
    on_edges: dict[str, PerEdge | None] = {
        "edge_key": edge_key, "edge_value": request.edge_value, "edge_term": edge_term, "bias": bias, "table": table
    }  # fmt: skip
    spec = Spec(
        edges.by_destination(graph),
        partial(edges.by_source_with_slots, graph),
        {name: edges.edge_types(graph, x) for name, x in on_edges.items() if isinstance(x, EmbeddingTable)},
        request.heads,
        kind,
        NORMALIZERS[request.normalize if request.weighted else "none"],
        scale,
        softcap,
        1.0 if tanh else slope,
        tanh,
        *_dropout(request),
        request.return_weights,
        request.return_lse or request.sinks is not None,
    )
    numbers = {name: None if x is None else _numbers(x).to(dtype) for name, x in on_edges.items()}
    out, weights, lse = row_attention.attend(spec, Tensors(_pad(request.value, dtype), query, key, vector, **numbers))
    if request.sinks is not None:
        share = share_of_edges(lse, request.sinks)
        out = out * share[..., None]
        if request.return_weights:
            weights = weights * share.index_select(-2, graph.edge_index[1])
    width = request.value.shape[-1]
    out = out if out.shape[-1] == width else out[..., :width]
    if type(request.reduce) is Mean:
        inverse = ("csr inverse degree", dtype)
        out = out * graph.cached(inverse, lambda: (1 / edges.by_destination(graph).degree.to(dtype))[..., None])
    out = out.to(request.value.dtype)
    if request.return_lse:
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)
    return out, weights.to(request.value.dtype) if request.return_weights else None


def _biases(request: Request) -> tuple[Tensor | None, EmbeddingTable | None]:
    """All biases as one tensor in the caller's order and one table. Further tables are expanded to edges."""
    tables = [b for b in request.bias if isinstance(b, EmbeddingTable)]
    tensors = [b for b in request.bias if isinstance(b, Tensor)] + [_expand(b, request.graph) for b in tables[1:]]
    tensors = [x.to(request.accumulate_dtype) for x in tensors]
    return sum(tensors[1:], tensors[0]) if tensors else None, tables[0] if tables else None


def _expand(data: EmbeddingTable, graph: Graph) -> Tensor:
    """A table by edge type as a tensor with a row for each edge, in the caller's order."""
    return graph.csr.to_caller(data.table.index_select(0, data.ids(graph)))


def _numbers(data: PerEdge) -> Tensor:
    return data.table if isinstance(data, EmbeddingTable) else data


def _dropout(request: Request) -> tuple[Tensor | None, float, tuple[Tensor, Tensor] | None]:
    """The keys of `mpnn.request.rng`, which depend on seed and stream only (None without dropout), the rate, and what
    stands for the numbers of nodes."""
    if not request.dropout or not request.weighted:
        return None, 0.0, None
    assert request.seed is not None
    keys = rng.keys(request.seed, rng.streams(request.batch, request.heads, head_ids=request.head_ids).flatten())
    return keys, request.dropout, request.graph.node_ids


def _name_of(activation: Activation | None) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


def _pad(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Features padded with zeros to at least one whole vector."""
    missing = -x.shape[-1] % LANES if x.shape[-1] else LANES
    return F.pad(x.to(dtype), (0, missing)) if missing else x.to(dtype)
