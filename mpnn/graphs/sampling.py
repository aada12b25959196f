"""Graphs drawn at random from a graph: whom short walks reach, some of whom a node hears, links that are not there.

All are drawn on the CPU, from a seed or a generator, and come out on the graph's device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graphs.check import at_least, whole
from mpnn.runs import Runs

_MOST = 1 << 22  # pairs that are drawn at once
_NEARLY_FULL = 16  # draws for each pair that is no edge, beyond which these pairs are rather found in the complement


def random_walk_neighbors(graph: Graph, k: int, walks: int = 100, length: int = 3, seed: int = 0) -> Graph:
    """i hears the k nodes that walks from i visit most, with the number of visits as `edge_attr` (PinSage, Ying et al.
    2018, section 3.2). Ties go to the lower index; i itself is not heard, nor a node that no walk visits.

    A step leads from a node to one that it hears, each alike likely. Where destinations and sources are two sets, as
    items that hear their users, a step leads from a destination to a source and on to a destination that hears it, so
    that destinations hear one another. A walk ends where nobody is heard.

    ::

        random_walk_neighbors(from_edges([[1, 2, 3], [0, 1, 2]]), k=2, length=2)   .##.
                                                                                   ..##
                                                                                   ...#
                                                                                   ....

    Args:
        walks: from each node. length: their steps.
    """
    for name, n in (("k", k), ("walks", walks), ("length", length)):
        at_least(name, n, 1)
    generator = torch.Generator().manual_seed(whole("seed", seed))
    turns = [graph.csr] if graph.num_dst == graph.num_src else [graph.csr, graph.csc]
    steps = [(turn.ptr.cpu(), turn.col.cpu()) for turn in turns]
    begun = torch.arange(graph.num_dst).repeat_interleave(walks)
    here, visits = begun, []
    for _ in range(length):
        for ptr, col in steps:
            begun, here = _walked(begun, here, ptr, col, generator)
        visits.append(torch.stack([begun, here])[:, begun != here])
    (dst, src), count = torch.unique(torch.cat(visits, 1), dim=1, return_counts=True)
    order = torch.from_numpy(np.lexsort((src, -count, dst)))
    order = order[_rank(dst[order]) < k]
    neighbors = Graph.from_edges(
        torch.stack([src, dst])[:, order],
        graph.num_dst,
        graph.num_dst,
        edge_attr=count[order].float(),
        name=f"random_walk_neighbors({k})",
    )
    return neighbors.to(graph.device)


def sampled(
    graph: Graph, fanout: int, nodes: Tensor | None = None, *, generator: torch.Generator | None = None
) -> Graph:
    """Each destination hears at most `fanout` of those it heard, drawn without replacement (GraphSAGE, Hamilton et al.
    2017, section 3.1); edges come row by row, with their attributes.

    ::

        sampled(from_edges([[0, 1, 0, 2], [1, 0, 2, 1]]), fanout=2, nodes=torch.tensor([2, 1, 2]))   #..
                                                                                                     #.#
                                                                                                     #..

    With `nodes`, int64 [n], these alone are destinations, in this order. What a batch of nodes needs for one layer:
    `index, block = sampled(graph, 10, nodes).heard()`, then `layer(x[nodes], block, source=x[index])`; for the layer
    before, the batch is `index`.
    """
    at_least("fanout", fanout, 1)
    if nodes is None:
        nodes = torch.arange(graph.num_dst)
    elif nodes.dim() != 1 or not _are_nodes(nodes, graph.num_dst):
        raise ValueError(f"nodes must be integers [n] from 0 to {graph.num_dst - 1}; got {nodes}")
    nodes, csr = nodes.cpu(), graph.csr
    first, count = csr.ptr.cpu()[nodes], csr.ptr.diff().cpu()[nodes]
    dst = torch.arange(len(nodes)).repeat_interleave(count)
    at = torch.arange(len(dst)) - (count.cumsum(0) - count)[dst] + first[dst]
    shuffled = torch.from_numpy(np.lexsort((torch.rand(len(dst), generator=generator), dst)))
    kept = torch.zeros(len(dst), dtype=torch.bool)
    kept[shuffled] = _rank(dst) < fanout
    dst, at = dst[kept], at[kept].to(graph.device)
    edge = at if csr.edge_id is None else csr.edge_id[at]
    data = {
        name: None if given is None else given[edge]
        for name, given in (("edge_attr", graph.edge_attr), ("edge_type", graph.edge_type))
    }
    edges = torch.stack([csr.col[at], dst.to(graph.device)])
    return Graph.from_edges(edges, len(nodes), graph.num_src, **data, name=f"sampled({fanout})")


def absent_edges(graph: Graph, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Pairs that are no edges, int64 [2, count], sources above destinations, each drawn alike likely and by itself;
    where there is one set of nodes, a node and itself is no pair. For learning which links there are.

    Raises:
        ValueError: every pair is an edge.
    """
    at_least("count", count, 0)
    square = graph.num_dst == graph.num_src
    own = int(graph.runs.holds(*2 * (np.arange(graph.num_dst),)).sum()) if square else 0
    pairs = graph.num_dst * graph.num_src
    left = pairs - graph.runs.num_edges - (graph.num_dst - own if square else 0)
    if count and not left:
        raise ValueError(f"every pair of {graph} is an edge already")
    if left * _NEARLY_FULL < pairs:
        return _chosen_absent(graph, left, count, generator).to(graph.device)
    found: list[Tensor] = []
    missing = count
    while missing:
        draws = min(missing * pairs // left + 16, _MOST)
        pair = torch.randint(pairs, (draws,), generator=generator)
        src, dst = pair % graph.num_src, pair // graph.num_src
        free = ~torch.from_numpy(graph.runs.holds(dst.numpy(), src.numpy()))
        if square:
            free &= src != dst
        found.append(torch.stack([src, dst])[:, free][:, :missing])
        missing -= found[-1].shape[1]
    return torch.cat(found, 1).to(graph.device) if found else torch.zeros(2, 0, dtype=torch.int64, device=graph.device)


def _chosen_absent(graph: Graph, left: int, count: int, generator: torch.Generator | None) -> Tensor:
    """`count` of the `left` pairs of a nearly full graph that are no edges, [2, count], by their number in the rows of
    its complement: O(runs), however few there are."""
    absent = graph.runs.complement()
    if graph.num_dst == graph.num_src:
        node = np.arange(graph.num_dst)
        absent = absent - Runs.of(graph.num_dst, graph.num_src, [(node, node, node + 1)])
    number = torch.randint(left, (count,), generator=generator).numpy()
    stops = np.cumsum(absent.stop - absent.start)
    run = np.searchsorted(stops, number, side="right")
    src = absent.stop[run] - (stops[run] - number)
    return torch.from_numpy(np.stack([src, absent.row[run]]))


def _walked(begun: Tensor, here: Tensor, ptr: Tensor, col: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One step, to `col[ptr[i]:ptr[i + 1]]` from i, of the walks that can go on: where they began, and where they are
    now."""
    choices = ptr[here + 1] - ptr[here]
    going = choices > 0
    begun, here, choices = begun[going], here[going], choices[going]
    chosen = (torch.rand(len(here), dtype=torch.float64, generator=generator) * choices).long()
    return begun, col[ptr[here] + chosen]


def _are_nodes(x: Tensor, n: int) -> bool:
    whole_numbers = not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    return whole_numbers and not bool(((x < 0) | (x >= n)).any())


def _rank(rows: Tensor) -> Tensor:
    """How many of the same row stand before each, for ascending rows."""
    return torch.arange(len(rows)) - torch.searchsorted(rows, rows)
