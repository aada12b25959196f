"""Graphs from explicit edges or blocks; batches of graphs; and incidence graphs, in which nodes receive from their
edges."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.graph.csr import check_edge_index
from mpnn.graph.modes import outside_modes
from mpnn.graph.registry import FUNCTIONS
from mpnn.graph.relations import GridOffset, Offset
from mpnn.graph.runs import Runs, require_room
from mpnn.graphs.kinds import HeteroGraph, batch_of_kinds

AnyGraph = TypeVar("AnyGraph", bound=Graph | HeteroGraph)


def from_edges(
    edge_index: Tensor | Any,
    num_nodes: int | None = None,
    *,
    num_src: int | None = None,
    num_dst: int | None = None,
    edge_attr: Tensor | None = None,
    edge_type: Tensor | None = None,
) -> Graph:
    """Returns the graph with exactly these edges, in this order. Repeated edges are kept and no self-loops are added.

    ::

        from_edges([[0, 0, 1], [1, 2, 2]])   ...
                                             #..
                                             ##.

    Args:
        edge_index: integers [2, E], sources in row 0 and destinations in row 1 (PyTorch Geometric's convention). The
            graph copies `edge_index` and `edge_type`, because kernels do not validate them again.
        num_nodes: the number of nodes, if sources and destinations are one set. Default: the largest index plus 1.
        num_src, num_dst: the sizes of two sets of nodes (bipartite), instead of `num_nodes`.
        edge_attr: one row per edge, [E] or [E, ...]; not copied.
        edge_type: the type of each edge, integers [E].

    Inside a model that `torch.export` or `torch.onnx.export` traces, the edges are an input of the program, and E and
    the sizes may differ in each call. Pass the sizes there.

    Raises:
        IndexError: if an edge refers to a node that does not exist. The message names the edge.
        TypeError, ValueError: if the data are not integers, a shape is wrong, or both kinds of sizes are passed.
    """
    if torch.compiler.is_exporting() and isinstance(edge_index, Tensor):
        return _of_a_program(edge_index, num_nodes, num_src, num_dst, edge_attr, edge_type)
    edge_index = _tensor("edge_index", edge_index)
    if edge_index.numel() == 0:
        edge_index = edge_index.long()  # torch makes an empty list a float tensor
    check_edge_index(edge_index)
    edge_index = _own(edge_index)
    if num_nodes is not None and (num_src is not None or num_dst is not None):
        raise ValueError("pass num_nodes for one set of nodes, or num_src and num_dst for two sets, not both")
    for name, n in (("num_nodes", num_nodes), ("num_src", num_src), ("num_dst", num_dst)):
        if n is not None:
            at_least(name, n, 0)
    if num_src is None and num_dst is None:
        num_src = num_dst = _num_nodes(edge_index) if num_nodes is None else num_nodes
    return Graph.from_edges(
        edge_index,
        _num_nodes(edge_index[1]) if num_dst is None else int(num_dst),
        _num_nodes(edge_index[0]) if num_src is None else int(num_src),
        edge_attr=None if edge_attr is None else _tensor("edge_attr", edge_attr),
        edge_type=None if edge_type is None else _integers(_tensor("edge_type", edge_type)),
    )


def _of_a_program(edges: Tensor, num_nodes: Any, num_src: Any, num_dst: Any, attr: Any, edge_type: Any) -> Graph:
    """A stand-in for a graph whose edges are an input of the program that is exported."""
    num_dst, num_src = (num_nodes if n is None else n for n in (num_dst, num_src))
    if num_dst is None or num_src is None or edge_type is not None:
        raise ValueError(
            "in a program that is exported, from_edges needs num_nodes, or num_src and num_dst (such as x.shape[-2]), "
            "and takes no edge_type"
        )
    check_edge_index(edges)
    graph: Graph = FUNCTIONS["listed"](edges.long(), num_dst, num_src, attr)
    return graph


def from_blocks(
    block_index: Tensor | Any, size: int, num_blocks: int | None = None, *, edge_type: Tensor | None = None
) -> Graph:
    """Returns a graph of `num_blocks` blocks of `size` nodes. For each pair of blocks, every node of the destination
    block receives from every node of the source block.

    Pairs may repeat. Repeated edges count each time, in a softmax too. Pairs that are distinct and have no types are
    kept as runs, so their edges are never written out, and are in the order of a structured graph.

    ::

        from_blocks([[0, 1], [1, 0]], size=2)   ..##
                                                ..##
                                                ##..
                                                ##..

    Args:
        block_index: integers [2, K], source blocks in row 0 and destination blocks in row 1.
        num_blocks: default: the largest block index plus 1.
        edge_type: the type of each pair's edges, integers [K].
    """
    at_least("size", size, 1)
    pairs = from_edges(block_index, num_blocks, edge_type=edge_type)
    require_room(pairs.num_dst * size, pairs.num_src * size, (pairs.num_dst + pairs.num_edges) * size)
    if pairs.edge_type is None and pairs.runs.num_edges == pairs.num_edges:
        runs = pairs.runs.take(np.arange(pairs.num_dst * size) // size)
        nodes = Runs(runs.num_dst, pairs.num_src * size, runs.ptr, runs.start * size, runs.stop * size)
        return Graph.from_runs(nodes).to(pairs.device)
    within = torch.arange(size * size, device=pairs.device)
    src, dst = pairs.edge_index[..., None] * size + torch.stack([within % size, within // size])[:, None]
    edge_type = None if pairs.edge_type is None else pairs.edge_type.repeat_interleave(size * size)
    edges = torch.stack([src.flatten(), dst.flatten()])
    return Graph.from_edges(edges, pairs.num_dst * size, pairs.num_src * size, edge_type=edge_type)


def batch(graphs: Sequence[AnyGraph]) -> AnyGraph:
    """Returns the disjoint union: nodes are numbered graph by graph, and no edges connect different graphs.

    Of graphs of several kinds, each relation is the union of that of the graphs, and nodes are numbered graph by graph
    within their kind. A graph may lack kinds and relations of the others.

    Structured graphs stay structured if one edge type rule, or none, holds for the whole batch; a batch of packed
    sentences then costs only their runs. Otherwise the edges are materialized, graph by graph. Edge attributes and
    types must be present on all graphs or on none. `batch_sizes` of the result holds their numbers of nodes.

    ::

        batch([causal().bind(2), complete().bind(3)])   #....
                                                        ##...
                                                        ..###
                                                        ..###
                                                        ..###
    """
    if isinstance(graphs, (Graph, str)) or not isinstance(graphs, Iterable):
        raise TypeError(f"graphs must be a list of graphs; got {type(graphs).__name__}")
    members: list[Any] = list(graphs)
    if not members:
        raise ValueError("a batch needs at least one graph")
    if all(isinstance(g, HeteroGraph) for g in members):
        return cast(AnyGraph, batch_of_kinds(members, _union))
    for k, g in enumerate(members):
        if isinstance(g, HeteroGraph):
            raise TypeError(f"graph {k} of the batch is of several kinds of nodes, and others are not: {g!r}")
        if not isinstance(g, Graph):
            raise TypeError(f"graph {k} of the batch is {g!r}; a batch needs graphs, as returned by topology.bind(n)")
    return cast(AnyGraph, _union(members))


def _union(graphs: list[Graph]) -> Graph:
    if len(graphs) == 1:
        return graphs[0]
    if any(g.shift for g in graphs):
        raise ValueError("graphs with memory nodes (memory) cannot be batched; batch their features instead")
    devices = {g.device for g in graphs}
    if len(devices) > 1:
        raise ValueError(f"the graphs of a batch are on {' and '.join(sorted(map(str, devices)))}; move them to one")
    for name, present in (
        ("edge_attr", [g.edge_attr is not None for g in graphs]),
        ("edge_type", [g.has_edge_types for g in graphs]),
    ):
        if any(present) and not all(present):
            raise ValueError(f"graph {present.index(True)} has {name} and graph {present.index(False)} has none")
    num_dst, num_src = sum(g.num_dst for g in graphs), sum(g.num_src for g in graphs)
    device = graphs[0].device
    if any(g.is_explicit for g in graphs) or not _share_a_rule(graphs):
        attr = _join("edge_attr", [g.edge_attr for g in graphs if g.edge_attr is not None])
        kind = _join("edge_type", [g.types for g in graphs if g.types is not None])
        joined = Graph(num_dst, num_src, edges=_join_edges(graphs), edge_attr=attr, edge_type=kind, device=device)
        joined.periodic = any(g.periodic for g in graphs)
    else:
        runs = Runs.stack([g.runs for g in graphs])
        labels = _join_labels(graphs)
        joined = Graph(num_dst, num_src, runs=runs, labels=labels, relation=graphs[0].relation, device=device)
    joined.name = f"{len(graphs)} graphs"
    if any(g.positions is not None for g in graphs):
        dst, src = (torch.cat(ends) for ends in zip(*(g.node_positions() for g in graphs), strict=True))
        joined.positions = (dst, src)
    if all(g.num_dst == g.num_src for g in graphs):
        joined.batch_sizes = tuple(n for g in graphs for n in g.batch_sizes or (g.num_dst,))
    return joined


def edges_into(graph: Graph) -> Graph:
    """Each node receives from its incoming edges. Sources are the edges of `graph`, in the order of `edge_index`.

    ::

        edges_into(from_edges([[0, 0, 1], [1, 2, 2]]))   ...
                                                         #..
                                                         .##
    """
    dst = graph.edge_index[1]
    edges = torch.stack([torch.arange(graph.num_edges, device=graph.device), dst])
    return Graph.from_edges(edges, graph.num_dst, graph.num_edges, name="edges into nodes")


def _num_nodes(ends: Tensor) -> int:
    """The largest node index plus 1."""
    return int(ends.max()) + 1 if ends.numel() else 0


def _share_a_rule(graphs: Sequence[Graph]) -> bool:
    """Whether all graphs have the same edge type rule, and it still holds after their nodes are renumbered."""
    relation = graphs[0].relation
    if any(g.relation != relation for g in graphs):
        return False
    square = all(g.num_dst == g.num_src for g in graphs)
    if type(relation) is GridOffset:
        return square and all(g.num_src % relation.width == 0 for g in graphs)
    return relation is None or (square and type(relation) is Offset)


def _join(name: str, data: Sequence[Tensor]) -> Tensor | None:
    for k, one in enumerate(data):
        if one.shape[1:] != data[0].shape[1:]:
            raise ValueError(
                f"{name} of graph {k} is {list(one.shape)} and that of graph 0 {list(data[0].shape)}; "
                "all dimensions but the first must be equal"
            )
    return torch.cat(list(data)) if data else None


def _tensor(name: str, data: Tensor | Any) -> Tensor:
    if type(data) is Tensor and not (data.is_neg() or data.is_conj()):
        return data
    # copies read-only numpy arrays, because torch warns about them
    try:
        data = torch.as_tensor(data.copy() if isinstance(data, np.ndarray) and not data.flags.writeable else data)
        return data.resolve_neg().resolve_conj()  # numpy cannot read views that are negated or conjugated
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor, or data that torch.as_tensor accepts: {error}") from None


def _integers(edge_type: Tensor) -> Tensor:
    """Converts integers to int64. Other dtypes are returned unchanged and rejected by the validation."""
    not_integers = edge_type.is_floating_point() or edge_type.is_complex()
    return edge_type if not_integers and edge_type.numel() else _own(edge_type)


def _own(integers: Tensor) -> Tensor:
    """Copies integers to a contiguous int64 tensor."""

    def copy() -> Tensor:
        if integers.dtype == torch.int64:
            return integers.clone(memory_format=torch.contiguous_format)
        return integers.to(torch.int64, memory_format=torch.contiguous_format)

    return outside_modes(copy)


def _join_edges(graphs: Sequence[Graph]) -> Tensor:
    edges = torch.cat([g.stored_edges for g in graphs], 1)
    src, dst = (accumulate(sizes, initial=0) for sizes in ([g.num_src for g in graphs], [g.num_dst for g in graphs]))
    first = torch.tensor([list(src)[:-1], list(dst)[:-1]], device=edges.device)
    counts = torch.tensor([g.num_edges for g in graphs], device=edges.device)
    return edges + first.repeat_interleave(counts, 1, output_size=edges.shape[1])


def _join_labels(graphs: Sequence[Graph]) -> np.ndarray | None:
    labels = [g.labels for g in graphs if g.labels is not None]
    if len(labels) < len(graphs):
        return None
    ranked = [np.unique(one, return_inverse=True)[1] for one in labels]
    first = np.cumsum([0] + [int(r.max(initial=-1)) + 1 for r in ranked])
    return np.concatenate([r + f for r, f in zip(ranked, first[:-1], strict=True)])
