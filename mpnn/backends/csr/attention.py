"""Attention along the rows of any graph on CPU: converts a request for `mpnn.kernels.row_attention`. The scores it
supports are supported on GPUs too (`mpnn.backends.csr.cuda_attention`).

Torch operations pad widths to whole vectors and cast 16-bit features to float32, so autograd differentiates both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.aggregate import Mean, Sum
from mpnn.backends.cost_model import Estimate, both_ways, priced
from mpnn.graph import Graph
from mpnn.kernels import row_attention
from mpnn.kernels.row_spec import ACTIVATED, ADDITIVE, CONSTANT, DOT, LANES, NORMALIZERS, Given, Ids, Order, Spec
from mpnn.request import rng
from mpnn.request.request import Request
from mpnn.request.scores import Activation, fused_form, slope_of
from mpnn.request.tables import EmbeddingTable, PerEdge

_BEYOND_CACHE = 1 << 24  # bytes of features
KINDS = {"dot": DOT, "additive": ADDITIVE, "activated": ACTIVATED}


def supports(request: Request) -> str | None:
    score, value = request.score, request.value
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
        vectors.append(("edge_key" if fused.kind == "dot" else "edge", fused.edge, fused.dst.shape[-1]))
    for name, data, width in vectors:
        numbers = None if data is None else _numbers(data)
        if numbers is not None and numbers.shape[-1] != width:
            return f"{name} is {numbers.shape[-1]} wide, and the features it is added to are {width} wide"
    return None


def counts(request: Request) -> dict[str, float]:
    """Edges, edges times heads, and the components that each edge gathers from its two ends."""
    graph, batch, fused = request.graph, request.batch.numel(), fused_form(request.score)
    width = request.heads * request.value.shape[-1]
    edges, nodes = float(graph.num_edges * batch), max(graph.num_dst, graph.num_src)
    gathered = edges * width * (2 if fused and fused.kind != "additive" else 1)
    # features that exceed the cache are read from memory for each edge
    far = nodes * width * (torch.finfo(request.accumulate_dtype).bits // 8) > _BEYOND_CACHE
    operations = {"attention": 1.0, "scored edge": edges, "scored head": edges * request.heads}
    operations |= {
        "far gathered number" if far else "gathered number": gathered,
        "attending number": float(nodes * batch * width),
    }
    if fused and fused.kind == "activated":
        operations["activated number"] = edges * width
    added = (request.edge_value, fused.edge if fused and fused.kind == "dot" else None)
    if vectors := sum(vector is not None for vector in added):
        operations["vector number"] = edges * width * vectors
    if request.dropout:
        operations["dropped head"] = edges * request.heads
    return {**both_ways(operations, request.needs_grad), "compiled": 1.0}


def estimate(request: Request) -> Estimate:
    size = request.graph.num_edges * request.batch.numel() * request.heads * 2 * request.needs_grad
    return priced("csr", counts(request), size * torch.finfo(request.accumulate_dtype).bits / 8)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    graph, dtype = request.graph, request.accumulate_dtype
    edges = graph.cached("csr edges", lambda: _Edges(graph))
    bias, table = _biases(request)
    dst = src = vector = edge = before = None
    kind, scale, cap = CONSTANT, 1.0, 0.0
    slope: Any = 1.0
    fused = fused_form(request.score)
    if fused is not None:
        kind, scale, cap, pad = KINDS[fused.kind], fused.scale, fused.softcap or 0.0, fused.kind != "additive"
        dst, src = (_pad(x, dtype) if pad else x.to(dtype) for x in (fused.dst, fused.src))
        edge, before = (fused.edge, None) if pad else (None, fused.edge)
        vector = None if fused.vector is None else _pad(fused.vector, dtype)
        slope = slope_of(fused.activation)
    elif request.weighted:
        scale = 0.0  # the logits are the biases
    tanh = slope == "tanh"
    on_edges = (edge, request.edge_value, before, bias, table)
    spec = Spec(
        edges.rows,
        partial(edges.by_source, graph),
        tuple(edges.ids(x, graph) for x in on_edges),  # type: ignore[arg-type]
        request.heads,
        kind,
        NORMALIZERS[request.normalize if request.weighted else "none"],
        scale,
        cap,
        1.0 if tanh else slope,
        tanh,
        *_dropout(request),
        request.return_weights,
    )
    numbers = (None if x is None else _numbers(x).to(dtype) for x in on_edges)
    tensors = Given(_pad(request.value, dtype), dst, src, vector, *numbers)
    out, weights = row_attention.attend(spec, tensors)
    width = request.value.shape[-1]
    out = out if out.shape[-1] == width else out[..., :width]
    if type(request.reduce) is Mean:
        out = out * edges.inverse_degree(graph, dtype)
    if not request.return_weights:
        return out.to(request.value.dtype), None
    return out.to(request.value.dtype), graph.csr.to_caller(weights, -2).to(request.value.dtype)


class _Edges:
    """The arrays of a graph that kernels read, without copies.

    The graph caches this object, so it holds no reference to the graph: a cycle would keep both alive.
    """

    def __init__(self, graph: Graph) -> None:
        self.csr = graph.csr
        self.rows = Order(self.csr.ptr.numpy(), self.csr.col.contiguous().numpy())
        self.by_edge = Ids() if self.csr.edge_id is None else Ids(self.csr.edge_id.numpy())

    def by_source(self, graph: Graph) -> Order:
        return graph.cached("csr edges by source", lambda: self._by_source(graph))

    def _by_source(self, graph: Graph) -> Order:
        csc = graph.csc
        assert csc.edge_id is not None
        edge = csc.edge_id if self.csr.position is None else self.csr.position[csc.edge_id]
        return Order(csc.ptr.numpy(), csc.col.numpy(), edge.numpy())

    def ids(self, data: PerEdge | None, graph: Graph) -> Ids:
        """The row of `data` that each edge reads."""
        if data is None:
            return Ids()
        if isinstance(data, Tensor):
            return self.by_edge
        ids = data.cached(graph, "csr classes", lambda: data.ids(graph).numpy())
        return Ids(ids, partial(data.cached, graph, "csr edges by class", partial(self._by_class, ids)))

    def _by_class(self, ids: np.ndarray) -> Order:
        edge = np.argsort(ids, kind="stable")
        ptr = np.append(0, np.cumsum(np.bincount(ids)))
        return Order(ptr, self.csr.row.numpy()[edge], edge)

    def inverse_degree(self, graph: Graph, dtype: torch.dtype) -> Tensor:
        """[N_dst, 1, 1]."""
        return graph.cached(
            ("csr inverse degree", dtype), lambda: (1 / self.csr.ptr.diff().clamp(min=1).to(dtype))[:, None, None]
        )


def _biases(request: Request) -> tuple[Tensor | None, EmbeddingTable | None]:
    """All biases as one tensor in the caller's order and one table. Further tables are expanded to edges."""
    csr = request.graph.csr
    tables = [b for b in request.bias if isinstance(b, EmbeddingTable)]
    expanded = [
        csr.to_caller(b.table.to(request.accumulate_dtype).index_select(0, b.ids(request.graph))) for b in tables[1:]
    ]
    tensors = [x.to(request.accumulate_dtype) for x in (*(b for b in request.bias if isinstance(b, Tensor)), *expanded)]
    return sum(tensors[1:], tensors[0]) if tensors else None, tables[0] if tables else None


def _numbers(data: PerEdge) -> Tensor:
    return data.table if isinstance(data, EmbeddingTable) else data


def _dropout(request: Request) -> tuple[np.ndarray, float]:
    """The keys of `mpnn.request.rng`, which depend on seed and stream only (empty without dropout), and the rate."""
    if not request.dropout or not request.weighted:
        return np.zeros(0, np.uint32), 0.0
    assert request.seed is not None
    streams = torch.arange(request.batch.numel() * request.heads)
    return rng.keys(request.seed, streams).numpy().view(np.uint32), request.dropout


def _name_of(activation: Activation | None) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


def _pad(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Features padded with zeros to at least one whole vector."""
    missing = -x.shape[-1] % LANES if x.shape[-1] else LANES
    return F.pad(x.to(dtype), (0, missing)) if missing else x.to(dtype)
