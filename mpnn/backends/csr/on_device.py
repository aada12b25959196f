"""What kernels on a GPU need of a graph and of tensors on its edges, beside what requests say of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from mpnn.edges import CSR, sorted_by
from mpnn.graph import Graph
from mpnn.kernels.cuda.schedule import Sorted
from mpnn.kernels.cuda.shapes import WIDEST
from mpnn.scores import Lookup, PerEdge, Request

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OLDEST = 3, 7  # of Triton: before, tuples that kernels take could not hold None


def unavailable(request: Request) -> str | None:
    """Why no kernel on a GPU can take these features, if none can."""
    if (why := _unusable()) is not None:
        return why
    if request.value.dtype not in _TYPES:
        return f"it has no kernels for {request.value.dtype}"
    width = max((x.shape[-1] for x in request.tensors if x.dim()), default=0)
    return f"on CUDA its features are at most {WIDEST:,} wide, and these {width:,}" if width > WIDEST else None


def _unusable() -> str | None:
    try:
        version: str = import_module("triton").__version__
    except ImportError:
        return 'triton is not installed: pip install "mpnn[triton]"'
    if tuple(map(int, version.split(".")[:2])) < _OLDEST:
        return f"its kernels need triton 3.7, as PyTorch 2.12 and newer bring it, and triton {version} is installed"
    return None


def rows(graph: Graph) -> Sorted:
    """The edges by destination."""
    return graph.memo("device rows", lambda: _sorted(graph.csr, graph.num_src))


def columns(graph: Graph) -> Callable[[], Sorted]:
    """The edges by source, sorted when asked for."""
    return lambda: graph.memo("device columns", lambda: _sorted(graph.csc, graph.num_dst))


def _sorted(edges: CSR, num_cols: int) -> Sorted:
    return Sorted(edges.ptr, edges.col, edges.edge_id, num_cols)


def per_edge(x: Tensor, heads: int, request: Request, trailing: int = 1) -> Tensor:
    """[B, E, H] (or, with 2 trailing dimensions, [B, E, H, D]) of numbers that may lack dimensions of the batch, or
    have 1 there or for heads: views that repeat them, where that is possible."""
    shape = (*x.shape[-1 - trailing : -trailing], heads, *x.shape[x.dim() - trailing + 1 :])
    if x.dim() == trailing + 1:
        return x.expand(request.batch.numel(), *shape)
    return x.expand(*request.batch, *shape).reshape(request.batch.numel(), *shape)


def biases(request: Request) -> Tensor | None:
    """All biases as one tensor in the caller's edge order; tables are spread, which takes E x H."""
    graph, parts = request.graph, [b for b in request.bias if isinstance(b, Tensor)]
    parts = [b.to(request.wide) for b in parts] + [_spread(b, graph, request.wide) for b in _tables(request.bias)]
    return sum(parts[1:], parts[0]) if parts else None


def _tables(bias: tuple[PerEdge, ...]) -> list[Lookup]:
    return [b for b in bias if isinstance(b, Lookup)]


def _spread(table: Lookup, graph: Graph, dtype: torch.dtype) -> Tensor:
    """Each edge's entry of the table, [E, H], in the caller's order."""
    from mpnn.kernels.cuda.row_reduce import Spread

    out: Tensor = Spread.apply(table.table.to(dtype), ids(table, graph), by_class(table, graph))
    return out


def ids(table: Lookup, graph: Graph) -> Tensor:
    """The class of each edge, [E], in the caller's order."""
    return table.memo(graph, "device classes", lambda: graph.csr.to_caller(table.ids(graph)))


def by_class(table: Lookup, graph: Graph) -> Callable[[], Sorted]:
    """Edges, numbered in the caller's order, by class; sorted when asked for."""
    count = len(table.table)

    def build() -> Sorted:
        classes = ids(table, graph)
        sources = torch.arange(len(classes), device=classes.device)
        edges = sorted_by(classes, sources, count)
        return Sorted(edges.ptr, edges.col, None, len(classes))

    return lambda: table.memo(graph, ("device edges by class", count), build)
