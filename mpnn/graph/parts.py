"""Parts of a graph: some of its destinations, sources or nodes, all standing where they stood."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mpnn.graph.made import renumbered, selected, structured

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph


def rows(graph: Graph, start: int, stop: int) -> Graph:
    """`Graph.rows`."""
    for name, at in (("start", start), ("stop", stop)):
        if not hasattr(at, "__index__"):
            raise TypeError(f"{name} must be an integer; got {at!r}")
    start, stop = operator.index(start), operator.index(stop)
    if not 0 <= start <= stop <= graph.num_dst:
        raise ValueError(f"rows {start} to {stop} are not among the {graph.num_dst} destinations of {graph}")
    shift = graph.shift + start
    places = None if graph.places is None else (graph.places[0][start:stop], graph.places[1])
    if not graph.is_explicit:
        return structured(graph, graph.runs.take(np.arange(start, stop)), shift=shift, places=places)
    first, last = (int(graph.csr.ptr[i]) for i in (start, stop))
    assert graph.csr.edge_id is not None
    which = graph.csr.edge_id[first:last].sort().values
    edges = graph.edge_index[:, which]
    edges = edges - edges.new_tensor([[0], [start]])
    return selected(graph, which, edges=edges, num_dst=stop - start, shift=shift, places=places)


def heard(graph: Graph) -> tuple[Tensor, Graph]:
    """`Graph.heard`."""
    if graph.is_explicit:
        index, src = torch.unique(graph.edge_index[0], return_inverse=True)
        narrower = renumbered(graph, torch.stack([src, graph.edge_index[1]]), num_src=len(index))
    else:
        runs = graph.runs.heard()
        index = torch.from_numpy(runs.edges()[1]).to(graph.device)
        narrower = structured(graph, graph.runs.narrowed(runs), num_src=len(index))
    if graph.places is None:  # not `where`, as sources may be many more than are heard
        narrower.places = torch.arange(graph.num_dst, device=graph.device) + graph.shift, index
    else:
        narrower.places = graph.places[0], graph.places[1][index]
    return index, narrower


def induced(graph: Graph, keep: Tensor) -> Graph:
    """`Graph.induced`."""
    try:
        keep = torch.as_tensor(keep, device=graph.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"keep must be a bool tensor [{graph.num_dst}]; got {type(keep).__name__}") from None
    if keep.shape != (graph.num_dst,) or keep.dtype != torch.bool:
        raise ValueError(f"keep must be bool [{graph.num_dst}]; got {keep.dtype} of shape {list(keep.shape)}")
    if keep.all():
        return graph
    dst, src = graph.where()
    places = dst[keep], src[keep]
    if not graph.is_explicit:
        return structured(graph, graph.runs.induced(keep.cpu().numpy()), shift=0, places=places)
    which = keep[graph.edge_index].all(0).nonzero().squeeze(1)
    edges = (keep.cumsum(0) - 1)[graph.edge_index[:, which]]
    kept = int(keep.sum())
    return selected(graph, which, edges=edges, num_dst=kept, num_src=kept, shift=0, places=places)
