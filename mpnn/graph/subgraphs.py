"""Parts of a graph: subsets of its destinations, sources or nodes. Positions are preserved."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph.derive import renumbered, selected, structured
from mpnn.graph.runs import Runs
from mpnn.graph.strips import Strips

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph


def rows(graph: Graph, start: int, stop: int) -> Graph:
    """`Graph.rows`."""
    for name, bound in (("start", start), ("stop", stop)):
        if not hasattr(bound, "__index__"):
            raise TypeError(f"{name} must be an integer; got {bound!r}")
    start, stop = operator.index(start), operator.index(stop)
    if not 0 <= start <= stop <= graph.num_dst:
        raise ValueError(f"rows {start} to {stop} are not among the {graph.num_dst} destinations of {graph}")
    shift = graph.shift + start
    positions = None if graph.positions is None else (graph.positions[0][start:stop], graph.positions[1])
    if not graph.is_explicit:
        edges = graph.structure
        part = edges.between(start, stop) if isinstance(edges, Strips) else edges.take(np.arange(start, stop))
        return structured(graph, part, shift=shift, positions=positions)
    first, last = (int(graph.csr.ptr[i]) for i in (start, stop))
    edge_id = graph.csr.edge_id
    which = torch.arange(first, last, device=graph.device) if edge_id is None else edge_id[first:last].sort().values
    src, dst = graph.stored_edges[:, which]
    return selected(
        graph, which, edges=torch.stack([src, dst - start]), num_dst=stop - start, shift=shift, positions=positions
    )


def take(graph: Graph, nodes: Tensor) -> Graph:
    """The graph of the destinations `nodes`, int64 ascending and distinct, over the same sources."""
    dst, src = graph.node_positions()
    changes: dict[str, Any] = {"num_dst": len(nodes), "shift": 0, "positions": (dst[nodes], src)}
    if not graph.is_explicit:
        return structured(graph, graph.runs.take(nodes.cpu().numpy()), **changes)
    place = torch.full((graph.num_dst,), -1, device=graph.device)
    place[nodes] = torch.arange(len(nodes), device=graph.device)
    which = (place[graph.stored_edges[1]] >= 0).nonzero().squeeze(1)
    src, dst = graph.stored_edges[:, which]
    return selected(graph, which, edges=torch.stack([src, place[dst]]), **changes)


def without_rows(graph: Graph, rows: Tensor) -> Graph:
    """The graph without the edges of the destinations `rows`, bool [num_dst]."""
    if graph.is_explicit:
        return selected(graph, ~rows.to(graph.device)[graph.ends[1]])
    runs, dropped = graph.runs, rows.cpu().numpy()
    keep = ~dropped[runs.row]
    return structured(
        graph, Runs.of(graph.num_dst, graph.num_src, [(runs.row[keep], runs.start[keep], runs.stop[keep])])
    )


def columns(graph: Graph, sources: Tensor) -> Graph:
    """`Graph.columns`."""
    sources = torch.as_tensor(sources, device=graph.device)
    if sources.dim() != 1 or sources.dtype != torch.int64:
        raise ValueError(f"sources must be int64 [n]; got {sources.dtype} {list(sources.shape)}")
    if len(sources) and (bool((sources.diff() <= 0).any()) or sources[0] < 0 or sources[-1] >= graph.num_src):
        raise ValueError(f"sources must ascend, each once, from 0 to {graph.num_src - 1} at most")
    first, last = (int(sources[0]), int(sources[-1])) if len(sources) else (0, -1)
    changes: dict[str, Any] = {"num_src": len(sources), "shift": graph.shift - first}
    if graph.positions is not None or last - first + 1 != len(sources):
        dst, src = graph.node_positions()
        changes |= {"shift": 0, "positions": (dst, src[sources])}
    if not graph.is_explicit:
        return structured(graph, graph.runs.columns(sources.cpu().numpy()), **changes)
    place = torch.full((graph.num_src,), -1, device=graph.device)
    place[sources] = torch.arange(len(sources), device=graph.device)
    which = (place[graph.stored_edges[0]] >= 0).nonzero().squeeze(1)
    src, dst = graph.stored_edges[:, which]
    return selected(graph, which, edges=torch.stack([place[src], dst]), **changes)


def compact(graph: Graph, keep: Tensor | None = None) -> tuple[Tensor, Graph]:
    """`Graph.compact`. The sources `keep`, int64, stay even without an edge."""
    if graph.is_explicit:
        src, dst = graph.stored_edges
        index, place = torch.unique(src if keep is None else torch.cat([src, keep]), return_inverse=True)
        index = index.long()
        narrower = renumbered(graph, torch.stack([place[: len(src)], dst]), num_src=len(index))
    else:
        runs = graph.runs.sources()
        if keep is not None:
            nodes = keep.cpu().numpy()
            runs = runs | Runs.from_edges(1, graph.num_src, np.zeros_like(nodes), nodes)
        index = torch.from_numpy(runs.edges()[1]).to(graph.device)
        narrower = structured(graph, graph.runs.over_sources(runs), num_src=len(index))
    if graph.positions is None:  # not `node_positions`, whose size is `num_src`, which may be much larger
        narrower.positions = torch.arange(graph.num_dst, device=graph.device) + graph.shift, index
    else:
        narrower.positions = graph.positions[0], graph.positions[1][index]
    return index, narrower


def with_sources(graph: Graph, order: Tensor) -> Graph:
    """An explicit graph whose source k is source `order[k]` of this one, int64 [num_src], a permutation."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    src, dst = graph.stored_edges
    at = graph.positions and (graph.positions[0], graph.positions[1][order])
    return renumbered(graph, torch.stack([place[src], dst]), positions=at)


def subgraph(graph: Graph, keep: Tensor) -> Graph:
    """`Graph.subgraph`."""
    try:
        keep = torch.as_tensor(keep, device=graph.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"keep must be a bool tensor [{graph.num_dst}]; got {type(keep).__name__}") from None
    if keep.shape != (graph.num_dst,) or keep.dtype != torch.bool:
        raise ValueError(f"keep must be bool [{graph.num_dst}]; got {keep.dtype} of shape {list(keep.shape)}")
    if keep.all():
        return graph
    dst, src = graph.node_positions()
    positions = dst[keep], src[keep]
    if not graph.is_explicit:
        return structured(graph, graph.runs.subgraph(keep.cpu().numpy()), shift=0, positions=positions)
    which = keep[graph.stored_edges].all(0).nonzero().squeeze(1)
    edges = (keep.cumsum(0) - 1)[graph.stored_edges[:, which]]
    num_nodes = int(keep.sum())
    return selected(graph, which, edges=edges, num_dst=num_nodes, num_src=num_nodes, shift=0, positions=positions)
