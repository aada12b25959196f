"""Links: undirected ones as directed edges, and a split of them for link prediction."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpnn import Graph
from mpnn.graph.arguments import one_set
from mpnn.graph.transforms import keep_edges
from mpnn.graphs import absent_edges


def both_directions(links: Iterable[tuple[int, int]]) -> Tensor:
    """Two edges for each link: int64 `[2, E]`, row 0 is src, row 1 dst, ordered by dst, then src.

    Duplicates and self-loops are dropped.
    """
    proper = {(i, j) for i, j in links if i != j}
    dst_src = sorted(proper | {(j, i) for i, j in proper})
    return torch.tensor(dst_src, dtype=torch.int64).reshape(-1, 2).T.flip(0)


@dataclass(frozen=True, eq=False)
class LinkSplit:
    """The links of a graph, divided for link prediction.

    Args:
        graph: the links for training, with their attributes and types.
        train, val, test: int64 [2, L], each link once; of undirected graphs from the lower number to the higher.
        val_absent, test_absent: int64 [2, L], as many pairs that no edge of the whole graph links.
    """

    graph: Graph
    train: Tensor
    val: Tensor
    test: Tensor
    val_absent: Tensor
    test_absent: Tensor


def split_links(
    graph: Graph, val: float = 0.05, test: float = 0.1, *, directed: bool = False, seed: int = 0
) -> LinkSplit:
    """Holds out shares of the links of a graph at random. Self-loops are no links; they stay in the training graph.

    Args:
        graph: its sources and destinations must be one set of nodes.
        directed: whether a link and its reverse are two links; else both are held out together.

    Raises:
        ValueError: the graph has two sets of nodes, or a part would have no link.
    """
    one_set("split_links", graph)
    size, edges = graph.num_dst, graph.edge_index.cpu()
    low, high = edges if directed else edges.sort(0).values
    key = high * size + low
    links = key[low != high].unique()
    generator = torch.Generator().manual_seed(seed)
    links = links[torch.randperm(len(links), generator=generator)]
    held = [int(val * len(links)), int(test * len(links))]
    if min(*held, len(links) - sum(held)) < 1:
        raise ValueError(f"val={val} and test={test} leave a part of the {len(links)} links empty")
    parts = [torch.stack([part % size, part // size]) for part in links.split([*held, len(links) - sum(held)])]
    absent = absent_edges(graph if directed else graph.undirected(), sum(held), generator).split(held, 1)
    known = keep_edges(graph, ~torch.isin(key, links[: sum(held)]))
    return LinkSplit(known, parts[2], parts[0], parts[1], *absent)
