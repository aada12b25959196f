"""Tiles on CPU, by this library's own kernels; `mpnn.kernels.cpu.tiles` says how.

Biases that follow from j - i are looked up in the kernel by offset; any other is read edge by edge.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import random
from mpnn.backends.estimate import Estimate, both_ways, priced
from mpnn.backends.tiles.bias import by_offset, table
from mpnn.graph import Graph
from mpnn.kernels.tile_attention import COLUMNS, MOST_KEPT, ROWS, Dropout, Layout, TileAttention
from mpnn.scores import Dot, Lookup, PerEdge, Request
from mpnn.tiling import Tiles


def supports(request: Request) -> str | None:
    score, graph = request.score, request.graph
    assert isinstance(score, Dot)
    if graph.labels is not None and bool((np.diff(graph.labels) < 0).any()):
        return "the graph's cliques are scattered over its nodes, and run better as a batch"
    return None


def counts(request: Request) -> dict[str, float]:
    """Pairs that the tiles span, for each head, products on them, tiles, and numbers of nodes that are copied."""
    graph, score = request.graph, request.score
    assert isinstance(score, Dot)
    tiles, batch = _tiles(graph), request.batch.numel()
    heads, widths = batch * request.heads, score.query.shape[-1] + request.value.shape[-1]
    pairs = float(tiles.area * heads)
    kind = "double " * (request.wide == torch.float64)
    nodes = graph.num_src * request.value.shape[-2] + graph.num_dst * request.heads
    found = {"call": 1.0, f"{kind}pair": pairs, f"{kind}product": pairs * widths}
    found |= {"tile": float(len(tiles.column) * heads), "node number": float(batch * nodes * widths)}
    if request.dropout:
        found["dropped pair"] = pairs
    if not all(map(by_offset, request.bias)):
        found["biased edge"] = float(graph.num_edges * heads)
    return {**both_ways(found, request.needs_grad), "compiled": 1.0}


def estimate(request: Request) -> Estimate:
    graph, score = request.graph, request.score
    assert isinstance(score, Dot)
    widths, size = score.query.shape[-1] + request.value.shape[-1], torch.finfo(request.wide).bits // 8
    one_head = (2 * graph.num_dst if request.needs_grad else graph.num_src) * widths * size
    biases = 0 if all(map(by_offset, request.bias)) else graph.num_edges * request.heads * size
    return priced("tiles", counts(request), torch.get_num_threads() * min(one_head, MOST_KEPT) + biases)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    graph, score, value = request.graph, request.score, request.value
    assert isinstance(score, Dot)
    query, key, padded = (_padded(x, request.wide) for x in (score.query, score.key, value))
    if key.shape[2] != padded.shape[2]:
        key, padded = (x.repeat_interleave(request.heads // x.shape[2], 2) for x in (key, padded))
    out = TileAttention.apply(
        query,
        key,
        padded,
        table(request, ROWS),
        _per_edge([b for b in request.bias if not by_offset(b)], request),
        score.scale,
        score.softcap,
        _dropout(request),
        graph.memo("tiles: layout", lambda: _layout(graph)),
    )
    out = out[..., : value.shape[-1]].to(value.dtype)
    return out.view(*request.batch, *out.shape[1:]), None


def _tiles(graph: Graph) -> Tiles:
    return graph.memo("tiles", lambda: Tiles.of(graph.runs, ROWS, COLUMNS))


def _layout(graph: Graph) -> Layout:
    tiles, runs = _tiles(graph), graph.runs
    ptr, row, order = tiles.transposed()
    length = runs.stop - runs.start
    arrays = (
        (tiles.ptr, tiles.column, tiles.full, tiles.low, tiles.high),
        (ptr, row, tiles.full[order], tiles.low[order], tiles.high[order]),
        (runs.ptr, runs.start, runs.stop, np.cumsum(length) - length),
    )
    by_query, by_key, of_runs = (tuple(map(np.ascontiguousarray, group)) for group in arrays)
    return Layout(by_query, by_key, of_runs)


def _padded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N, H, D] of x [..., N, H, D], D filled up to vectors."""
    x = (x.flatten(0, -4) if x.dim() > 3 else x.unsqueeze(0)).to(dtype)
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def _per_edge(biases: list[PerEdge], request: Request) -> Tensor | None:
    """Biases edge by edge as one [B or 1, H, E]."""
    if not biases:
        return None
    graph, wide = request.graph, request.wide  # already here, as edges' gradients are summed in the type of the table
    parts = [b.table.to(wide).index_select(0, b.ids(graph)) if isinstance(b, Lookup) else b.to(wide) for b in biases]
    total = sum(parts[1:], parts[0])
    batch = request.batch if total.dim() > 2 else torch.Size(())
    total = total.expand(*batch, graph.num_edges, request.heads)
    return total.reshape(batch.numel(), *total.shape[-2:]).transpose(1, 2).contiguous()


def _dropout(request: Request) -> Dropout:
    if request.seed is None or not request.dropout:
        return Dropout(np.zeros(0, np.uint32), 0.0)
    streams = torch.arange(request.batch.numel() * request.heads)
    return Dropout(random.keys(request.seed, streams).numpy().view(np.uint32), request.dropout)
