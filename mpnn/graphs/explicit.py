"""Graphs from edges that somebody already has, and several graphs as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.edges import check_form, trainable
from mpnn.graph import Graph
from mpnn.graphs.check import at_least
from mpnn.relation import GridOffset, Offset
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

    ::

        from_edges([[0, 0, 1], [1, 2, 2]])   ...
                                             #..
                                             ##.

    Args:
        edge_index: integers [2, E], sources above destinations (PyTorch Geometric's convention). The graph copies
            them, and `edge_type` too, once: kernels trust them for as long as the graph is in use.
        num_nodes: for one set of nodes; default: as many as the edges name.
        num_src, num_dst: for two sets of nodes (bipartite), instead of `num_nodes`.
        edge_attr: one row for each edge, [E] or [E, ...]; not copied.
        edge_type: the class of each edge, integers [E].

    Raises:
        IndexError: an end of an edge is no node; the sentence names the edge.
        TypeError, ValueError: not integers, wrong shapes, both ways of giving sizes.
    """
    edge_index = _tensor("edge_index", edge_index)
    if edge_index.numel() == 0:
        edge_index = edge_index.long()  # a list without numbers in it passes for floating point
    check_form(edge_index)
    edge_index = _own(edge_index)
    if num_nodes is not None and (num_src is not None or num_dst is not None):
        raise ValueError("give num_nodes for one set of nodes, or num_src and num_dst for two, not both")
    for name, n in (("num_nodes", num_nodes), ("num_src", num_src), ("num_dst", num_dst)):
        if n is not None:
            at_least(name, n, 0)
    if num_src is None and num_dst is None:
        num_src = num_dst = _named(edge_index) if num_nodes is None else num_nodes
    return Graph.from_edges(
        edge_index,
        _named(edge_index[1]) if num_dst is None else int(num_dst),
        _named(edge_index[0]) if num_src is None else int(num_src),
        edge_attr=None if edge_attr is None else _tensor("edge_attr", edge_attr),
        edge_type=None if edge_type is None else _integers(_tensor("edge_type", edge_type)),
    )


def from_blocks(
    block_index: Tensor | Any, size: int, num_blocks: int | None = None, *, edge_type: Tensor | None = None
) -> Graph:
    """The graph of `num_blocks` blocks of `size` nodes in which all of a block hear all of another, for each pair.

    Pairs may repeat: what is there twice is heard twice, and weighs twice in a softmax.

    ::

        from_blocks([[0, 1], [1, 0]], size=2)   ..##
                                                ..##
                                                ##..
                                                ##..

    Args:
        block_index: integers [2, K], blocks of sources above blocks of destinations.
        num_blocks: default: as many as the pairs name.
        edge_type: the class of each pair's edges, integers [K].
    """
    at_least("size", size, 1)
    pairs = from_edges(block_index, num_blocks, edge_type=edge_type)
    within = torch.arange(size * size, device=pairs.device)
    src, dst = pairs.edge_index[..., None] * size + torch.stack([within % size, within // size])[:, None]
    kind = None if pairs.edge_type is None else pairs.edge_type.repeat_interleave(size * size)
    edges = torch.stack([src.flatten(), dst.flatten()])
    return Graph.from_edges(edges, pairs.num_dst * size, pairs.num_src * size, edge_type=kind)


def batch(graphs: Sequence[Graph]) -> Graph:
    """Disjoint union: the nodes of each graph follow those of the one before it; nothing passes between them.

    Structured graphs stay structured (a batch of packed sentences costs their runs) where one rule of classes, or
    none, serves the whole batch; otherwise the edges are written out, in the order given. Attributes and classes must
    be on all graphs or on none.

    ::

        batch([causal().bind(2), complete().bind(3)])   #....
                                                        ##...
                                                        ..###
                                                        ..###
                                                        ..###
    """
    if isinstance(graphs, (Graph, str)) or not isinstance(graphs, Iterable):
        raise TypeError(f"graphs must be a list of graphs; got {type(graphs).__name__}")
    graphs = list(graphs)
    if not graphs:
        raise ValueError("a batch needs at least one graph")
    for k, g in enumerate(graphs):
        if not isinstance(g, Graph):
            raise TypeError(f"graph {k} of the batch is {g!r}; a batch is made of graphs, which topology.bind(n) gives")
    if len(graphs) == 1:
        return graphs[0]
    if any(g.shift for g in graphs):
        raise ValueError("graphs with remembered sources (memory) cannot be batched; batch their features instead")
    devices = {g.device for g in graphs}
    if len(devices) > 1:
        raise ValueError(f"the graphs of a batch are on {' and '.join(sorted(map(str, devices)))}; move them to one")
    for name, have in (
        ("edge_attr", [g.edge_attr is not None for g in graphs]),
        ("edge_type", [g.has_classes for g in graphs]),
    ):
        if any(have) and not all(have):
            raise ValueError(f"graph {have.index(True)} has {name} and graph {have.index(False)} has none")
    num_dst, num_src = sum(g.num_dst for g in graphs), sum(g.num_src for g in graphs)
    device = graphs[0].device
    if any(g.is_explicit for g in graphs) or not _share_a_rule(graphs):
        attr = None if graphs[0].edge_attr is None else _joined_attributes([_given(g.edge_attr) for g in graphs])
        kind = torch.cat([_given(g.edge_type) for g in graphs]) if graphs[0].has_classes else None
        joined = Graph(num_dst, num_src, edges=_joined_edges(graphs), edge_attr=attr, edge_type=kind, device=device)
    else:
        runs, labels = Runs.stack([g.runs for g in graphs]), _joined_labels(graphs)
        joined = Graph(num_dst, num_src, runs=runs, labels=labels, relation=graphs[0].relation, device=device)
    joined.name = f"{len(graphs)} graphs"
    if any(g.places is not None for g in graphs):
        dst, src = (torch.cat(ends) for ends in zip(*(g.where() for g in graphs), strict=True))
        joined.places = (dst, src)
    return joined


def _named(ends: Tensor) -> int:
    """How many nodes edges with these ends name."""
    return int(ends.max()) + 1 if ends.numel() else 0


def _share_a_rule(graphs: Sequence[Graph]) -> bool:
    """Whether one rule of classes holds for all, and still does when their nodes are numbered from further on."""
    relation = graphs[0].relation
    if any(g.relation != relation for g in graphs):
        return False
    square = all(g.num_dst == g.num_src for g in graphs)
    if isinstance(relation, GridOffset):
        return square and all(g.num_src % relation.width == 0 for g in graphs)
    return relation is None or (square and isinstance(relation, Offset))


def _joined_attributes(attributes: Sequence[Tensor]) -> Tensor:
    for k, attr in enumerate(attributes):
        if attr.shape[1:] != attributes[0].shape[1:]:
            raise ValueError(
                f"edge_attr of graph {k} is {list(attr.shape)} and that of graph 0 {list(attributes[0].shape)}; "
                "they must agree in all but the number of edges"
            )
    return torch.cat(list(attributes))


def _given(data: Tensor | None) -> Tensor:
    assert data is not None
    return data


def _tensor(name: str, data: Tensor | Any) -> Tensor:
    # torch warns of numpy arrays that must not be written to, though nothing here does
    try:
        data = torch.as_tensor(data.copy() if isinstance(data, np.ndarray) and not data.flags.writeable else data)
        return data.resolve_neg().resolve_conj()  # numpy cannot read views that are negated or conjugated
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor, or what torch.as_tensor makes one of: {error}") from None


def _integers(classes: Tensor) -> Tensor:
    """Integers of any kind as int64; what are none stays as it is, to be refused."""
    other = classes.is_floating_point() or classes.is_complex()
    return classes if other and classes.numel() else _own(classes)


def _own(integers: Tensor) -> Tensor:
    """The same as int64 in memory that nobody else writes to."""
    return trainable(lambda: integers.to(torch.int64, copy=True, memory_format=torch.contiguous_format))


def _joined_edges(graphs: Sequence[Graph]) -> Tensor:
    edges = torch.cat([g.edge_index for g in graphs], 1)
    src, dst = (accumulate(sizes, initial=0) for sizes in ([g.num_src for g in graphs], [g.num_dst for g in graphs]))
    first = torch.tensor([list(src)[:-1], list(dst)[:-1]], device=edges.device)
    counts = torch.tensor([g.num_edges for g in graphs], device=edges.device)
    return edges + first.repeat_interleave(counts, 1, output_size=edges.shape[1])


def _joined_labels(graphs: Sequence[Graph]) -> np.ndarray | None:
    labels = [g.labels for g in graphs if g.labels is not None]
    if len(labels) < len(graphs):
        return None
    ranked = [np.unique(one, return_inverse=True)[1] for one in labels]
    first = np.cumsum([0] + [int(r.max(initial=-1)) + 1 for r in ranked])
    return np.concatenate([r + f for r, f in zip(ranked, first[:-1], strict=True)])
