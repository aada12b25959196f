"""Random sampling from a graph: random walks and negative edges. `data.neighbor_batches` samples neighbors.

Samples are drawn on the CPU from a seed or a generator and returned on the graph's device.
"""

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import as_integer, at_least
from mpnn.graph.runs import Runs

_MAX_DRAWS = 1 << 22  # maximum number of pairs drawn at once
_NEARLY_FULL = 16  # expected draws per absent pair above which pairs are drawn from the complement


def random_walk_neighbors(graph: Graph, k: int, walks: int = 100, length: int = 3, seed: int = 0) -> Graph:
    """i receives from the k nodes that random walks from i visit most, with the number of visits as `edge_attr`
    (PinSage, Ying et al. 2018, section 3.2). Ties go to the lower index. Self-loops and unvisited nodes are excluded.

    A step goes from a node to one of its in-neighbors, chosen uniformly. If destinations and sources are two sets,
    such as items and users, a step goes from a destination to a source and then to a destination of this source, so
    that the result connects destinations. A walk ends at a node without in-neighbors.

    ::

        random_walk_neighbors(from_edges([[1, 2, 3], [0, 1, 2]]), k=2, length=2)   .##.
                                                                                   ..##
                                                                                   ...#
                                                                                   ....

    Args:
        walks: the number of walks from each node.
        length: the number of steps of a walk.
    """
    for name, n in (("k", k), ("walks", walks), ("length", length)):
        at_least(name, n, 1)
    generator = torch.Generator().manual_seed(as_integer("seed", seed))
    directions = [graph.csr] if graph.num_dst == graph.num_src else [graph.csr, graph.csc]
    steps = [(edges.ptr.cpu(), edges.col.cpu()) for edges in directions]
    start = torch.arange(graph.num_dst).repeat_interleave(walks)
    current, visits = start, []
    for _ in range(length):
        for ptr, col in steps:
            start, current = _step(start, current, ptr, col, generator)
        visits.append(torch.stack([start, current])[:, start != current])
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


def absent_edges(graph: Graph, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Negative sampling for link prediction: `count` pairs that are not edges, int64 [2, count].

    Row 0 holds the sources and row 1 the destinations. Pairs are drawn independently and uniformly, so they may
    repeat. Self-loops are excluded if sources and destinations are one set of nodes.

    Raises:
        ValueError: if every pair is an edge.
    """
    at_least("count", count, 0)
    square = graph.num_dst == graph.num_src
    loops = int(graph.runs.contains(*2 * (np.arange(graph.num_dst),)).sum()) if square else 0
    pairs = graph.num_dst * graph.num_src
    num_absent = pairs - graph.runs.num_edges - (graph.num_dst - loops if square else 0)
    if count and not num_absent:
        raise ValueError(f"every pair of {graph} is an edge already")
    if num_absent * _NEARLY_FULL < pairs:
        return _sample_complement(graph, num_absent, count, generator).to(graph.device)
    samples: list[Tensor] = []
    missing = count
    while missing:
        draws = min(missing * pairs // num_absent + 16, _MAX_DRAWS)
        pair = torch.randint(pairs, (draws,), generator=generator)
        src, dst = pair % graph.num_src, pair // graph.num_src
        absent = ~torch.from_numpy(graph.runs.contains(dst.numpy(), src.numpy()))
        if square:
            absent &= src != dst
        samples.append(torch.stack([src, dst])[:, absent][:, :missing])
        missing -= samples[-1].shape[1]
    empty = torch.zeros(2, 0, dtype=torch.int64)
    return torch.cat([empty, *samples], 1).to(graph.device)


def _sample_complement(graph: Graph, num_absent: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Draws `count` of the `num_absent` absent pairs from the complement of the graph, [2, count], in O(runs)."""
    absent = graph.runs.complement()
    if graph.num_dst == graph.num_src:
        node = np.arange(graph.num_dst)
        absent = absent - Runs.of(graph.num_dst, graph.num_src, [(node, node, node + 1)])
    number = torch.randint(num_absent, (count,), generator=generator).numpy()
    stops = np.cumsum(absent.stop - absent.start)
    run = np.searchsorted(stops, number, side="right")
    src = absent.stop[run] - (stops[run] - number)
    return torch.from_numpy(np.stack([src, absent.row[run]]))


def _step(
    start: Tensor, current: Tensor, ptr: Tensor, col: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One step from node i to a node in `col[ptr[i]:ptr[i + 1]]`, for the walks that can continue. Returns the start
    nodes and the current nodes of these walks."""
    choices = ptr[current + 1] - ptr[current]
    active = choices > 0
    start, current, choices = start[active], current[active], choices[active]
    choice = (torch.rand(len(current), dtype=torch.float64, generator=generator) * choices).long()
    return start, col[ptr[current] + choice]


def _rank(rows: Tensor) -> Tensor:
    """The index of each element within its row, for ascending rows."""
    return torch.arange(len(rows)) - torch.searchsorted(rows, rows)
