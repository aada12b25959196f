"""Graphs from edges that somebody already has, and several graphs as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.relation import Offset
from mpnn.runs import Runs


def from_edges(
    edge_index: Tensor | Any,
    num_nodes: int | None = None,
    *,
    num_src: int | None = None,
    num_dst: int | None = None,
    edge_attr: Tensor | None = None,
    edge_type: Tensor | None = None,
) -> Graph:
    """The graph with just these edges, in this order, repeated ones too; no self-loop is added.

    Args:
        edge_index: integers [2, E], sources above destinations (PyTorch Geometric's convention).
        num_nodes: for one set of nodes; default: as many as the edges name.
        num_src, num_dst: for two sets of nodes (bipartite), instead of `num_nodes`.
        edge_attr: one row for each edge, [E] or [E, ...]. `edge_type`: the class of each edge, integers [E].

    Raises:
        IndexError: an end of an edge is no node; the sentence names the edge.
        TypeError, ValueError: not integers, wrong shapes, both ways of giving sizes.
    """
    edge_index = torch.as_tensor(edge_index)
    if edge_index.numel() == 0 and edge_index.dim() == 2 and edge_index.shape[0] == 2:
        edge_index = edge_index.long()
    if num_nodes is not None and (num_src is not None or num_dst is not None):
        raise ValueError("give num_nodes for one set of nodes, or num_src and num_dst for two, not both")
    if edge_index.dim() == 2 and edge_index.shape[0] == 2:
        named = [int(ends.max()) + 1 if ends.numel() else 0 for ends in edge_index]
        if num_src is None and num_dst is None:
            num_nodes = max(named) if num_nodes is None else num_nodes
        num_src = num_nodes if num_src is None and num_nodes is not None else (named[0] if num_src is None else num_src)
        num_dst = num_nodes if num_dst is None and num_nodes is not None else (named[1] if num_dst is None else num_dst)
    if not edge_index.is_floating_point() and edge_index.dtype != torch.bool:
        edge_index = edge_index.long()
    return Graph.from_edges(
        edge_index.contiguous(),
        num_dst or 0,
        num_src or 0,
        edge_attr=None if edge_attr is None else torch.as_tensor(edge_attr),
        edge_type=None if edge_type is None else torch.as_tensor(edge_type),
    )


def batch(graphs: Sequence[Graph]) -> Graph:
    """Disjoint union: the nodes of each graph follow those of the one before it; nothing passes between them.

    Structured graphs stay structured (a batch of packed sentences costs their runs); if any graph is explicit, so is
    the result, edges in the order given. Attributes and classes must be on all graphs or on none.
    """
    graphs = list(graphs)
    if not graphs:
        raise ValueError("a batch needs at least one graph")
    if len({g.shift for g in graphs}) > 1 or (graphs[0].shift and len(graphs) > 1):
        raise ValueError("graphs with remembered sources (memory) cannot be batched; batch their features instead")
    for name in ("edge_attr", "edge_type"):
        have = [getattr(g, name) is not None for g in graphs]
        if any(have) and not all(have):
            raise ValueError(f"graph {have.index(True)} has {name} and graph {have.index(False)} has none")
    explicit = any(g.is_explicit for g in graphs)
    one = Graph(
        sum(g.num_dst for g in graphs),
        sum(g.num_src for g in graphs),
        runs=None if explicit else Runs.stack([g.runs for g in graphs]),
        edges=_joined_edges(graphs) if explicit else None,
        labels=_joined_labels(graphs),
        edge_attr=None if graphs[0].edge_attr is None else torch.cat([g.edge_attr for g in graphs]),  # type: ignore[misc]
        device=graphs[0].device,
        name=f"{len(graphs)} graphs",
    )
    relations = {g.relation for g in graphs}
    if not explicit and len(relations) == 1 and isinstance(graphs[0].relation, Offset):
        one.relation = graphs[0].relation  # an offset within a graph is the same offset within the batch
    elif graphs[0].edge_type is not None:
        one._edge_type = torch.cat([g.edge_type for g in graphs])  # type: ignore[misc]
    return one


def _joined_edges(graphs: Sequence[Graph]) -> Tensor:
    src = np.cumsum([0] + [g.num_src for g in graphs])
    dst = np.cumsum([0] + [g.num_dst for g in graphs])
    first = torch.from_numpy(np.stack([src, dst], 1)).to(graphs[0].device)
    return torch.cat([g.edge_index + first[k, :, None] for k, g in enumerate(graphs)], 1)


def _joined_labels(graphs: Sequence[Graph]) -> np.ndarray | None:
    labels = [g.labels for g in graphs if g.labels is not None]
    if len(labels) < len(graphs):
        return None
    ranked = [np.unique(one, return_inverse=True)[1] for one in labels]
    first = np.cumsum([0] + [int(r.max(initial=-1)) + 1 for r in ranked])
    return np.concatenate([r + f for r, f in zip(ranked, first, strict=False)])
