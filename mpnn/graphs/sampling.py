"""Random sampling from a graph: random walks and negative edges. `data.neighbor_batches` samples neighbors.

Samples are drawn on the CPU from a seed or a generator and returned on the graph's device.
"""

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import are_one_set, as_integer, at_least, one_set as check_one_set
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
    visited = graph.num_dst * walks * length
    what = f"{visited:,} visits of walks={walks} of length={length} from each node"
    capacity.require(48 * visited, what, "use fewer or shorter walks")
    generator = torch.Generator().manual_seed(as_integer("seed", seed))
    directions = [graph.csr] if graph.num_dst == graph.num_src else [graph.csr, graph.csc]
    steps = [(edges.ptr.cpu(), edges.col.cpu()) for edges in directions]
    start = torch.arange(graph.num_dst).repeat_interleave(walks)
    current = start
    visits = []
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


def absent_edges(
    graph: Graph,
    count: int,
    generator: torch.Generator | None = None,
    *,
    distinct: bool = False,
    undirected: bool = False,
    one_set: bool | None = None,
) -> Tensor:
    """Samples `count` pairs that are not edges, int64 [2, count], for link prediction.

    Row 0 holds the sources and row 1 the destinations. Pairs are drawn uniformly. Self-loops are excluded if sources
    and destinations are one set of nodes.

    Args:
        one_set: whether sources and destinations are the same nodes. Default: whether there are equally many of both.
        distinct: draw no pair twice. By default pairs are drawn independently, so they may repeat.
        undirected: draw pairs from the lower number to the higher, with an edge in neither direction.

    Raises:
        ValueError: if every pair is an edge, or fewer than `count` pairs are not edges and `distinct` is True.
    """
    at_least("count", count, 0)
    capacity.require(3 * 16 * count, f"a count of {count:,} pairs", "draw fewer at once")
    is_one_set = are_one_set(graph, one_set)
    present = graph.runs
    if undirected:
        check_one_set("undirected=True", graph)
        present = present | present.transpose()
    if is_one_set:
        node = np.arange(graph.num_dst)
        stop = np.full_like(node, graph.num_src) if undirected else node + 1
        present = present | Runs.of(graph.num_dst, graph.num_src, [(node, node, stop)])
    pairs = graph.num_dst * graph.num_src
    num_absent = pairs - present.num_edges
    if count and not num_absent:
        raise ValueError(f"every pair of {graph} is an edge already")
    if distinct and count > num_absent:
        raise ValueError(f"count={count} distinct pairs without an edge; {graph} has {num_absent}")
    is_scarce = num_absent * _NEARLY_FULL < pairs or (distinct and 2 * count > num_absent)
    draw = _from_complement if is_scarce else _by_rejection
    return draw(present, num_absent, count, generator, distinct).to(graph.device)


def _by_rejection(
    present: Runs, num_absent: int, count: int, generator: torch.Generator | None, distinct: bool
) -> Tensor:
    """Draws pairs of all, [2, count], until enough of them are absent."""
    pairs = present.num_dst * present.num_src
    pair = torch.zeros(0, dtype=torch.int64)
    while len(pair) < count:
        draws = min((count - len(pair)) * pairs // num_absent + 16, _MAX_DRAWS)
        drawn = torch.randint(pairs, (draws,), generator=generator)
        dst = drawn.numpy() // present.num_src
        src = drawn.numpy() % present.num_src
        pair = torch.cat([pair, drawn[~torch.from_numpy(present.contains(dst, src))]])
        if distinct:
            pair = pair[_first_occurrences(pair)]
    pair = pair[:count]
    return torch.stack([pair % present.num_src, pair // present.num_src])


def _first_occurrences(x: Tensor) -> Tensor:
    """The indices of the first occurrence of each number of x [n], ascending."""
    _, first = np.unique(x.numpy(), return_index=True)
    return torch.from_numpy(np.sort(first))


def _from_complement(
    present: Runs, num_absent: int, count: int, generator: torch.Generator | None, distinct: bool
) -> Tensor:
    """Draws `count` of the `num_absent` absent pairs by their numbers, [2, count], in O(runs)."""
    absent = present.complement()
    if distinct:
        capacity.require(8 * num_absent, f"the order of {num_absent:,} absent pairs", "draw without distinct=True")
        number = torch.randperm(num_absent, generator=generator)[:count].numpy()
    else:
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
    start = start[active]
    current = current[active]
    choices = choices[active]
    choice = (torch.rand(len(current), dtype=torch.float64, generator=generator) * choices).long()
    return start, col[ptr[current] + choice]


def _rank(rows: Tensor) -> Tensor:
    """The index of each element within its row, for ascending rows."""
    return torch.arange(len(rows)) - torch.searchsorted(rows, rows)
