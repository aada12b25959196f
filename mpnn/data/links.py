"""Links: undirected ones as directed edges, and splits of them for link prediction."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mpnn import Graph
from mpnn.graph.arguments import as_integer
from mpnn.graph.transforms import keep_edges
from mpnn.graphs import HeteroGraph, absent_edges
from mpnn.graphs.kinds import EdgeKind
from mpnn.graphs.temporal import check_times


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

    Nothing but the links themselves tells links and absent pairs apart: both have the same orientation, no pair is in
    two of these tensors or twice in one, and no absent pair is a link of any part.

    Args:
        graph: the links for training, with their attributes and types.
        train, val, test: int64 [2, L], each link once; of undirected graphs from the lower number to the higher.
        val_absent, test_absent: int64 [2, L], as many pairs that are no links of the whole graph.
        directed: whether a link and its reverse are two links.
    """

    graph: Graph
    train: Tensor
    val: Tensor
    test: Tensor
    val_absent: Tensor
    test_absent: Tensor
    directed: bool = False

    def draw_absent(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Pairs without a link in the training graph, int64 [2, count], oriented as the links, for a training step.
        Links of validation and test may be among them, as training does not know them."""
        return absent_edges(self.graph, count, generator, undirected=not self.directed)


def split_links(
    graph: Graph,
    val: float = 0.05,
    test: float = 0.1,
    *,
    directed: bool = False,
    times: Tensor | None = None,
    seed: int = 0,
) -> LinkSplit:
    """Holds out shares of the links of a graph, at random or the last ones.

    A link and its reverse are in the same part, also in a directed graph, so that training never sees the reverse of a
    link that it has to predict. Repeated edges are one link. Self-loops are no links; they stay in the training graph.

    Args:
        graph: of one set of nodes, or of two, such as users and items.
        val, test: shares of the links.
        directed: whether a link and its reverse are two links. Links between two sets of nodes always are directed.
        times: [E], the time of each edge. Training has the earliest links, the test the latest; links of one time are
            in one part, and the training graph has no edge as late as the first link of the validation. The time of a
            link is that of its first edge.
        seed: of the random split and of the absent pairs.

    Raises:
        ValueError: a part would have no link, the graph has too few pairs without a link, or times do not fit.
    """
    for name, share in (("val", val), ("test", test)):
        if isinstance(share, (bool, str)) or not hasattr(share, "__float__") or not 0 <= share <= 1:
            raise ValueError(f"{name} must be a share of the links, from 0 to 1; got {share!r}")
    generator = torch.Generator().manual_seed(as_integer("seed", seed))
    links = _links(graph, directed)
    if times is None:
        edge_time = None
        group = torch.randperm(int(links.pair.max()) + 1 if len(links.pair) else 0, generator=generator)[links.pair]
    else:
        check_times("times", times, graph.num_edges)
        edge_time = times.detach().cpu().unique(return_inverse=True)[1]
        proper = links.of_edge >= 0
        first = torch.full((links.ends.shape[1],), len(edge_time))
        group = first.scatter_reduce(0, links.of_edge[proper], edge_time[proper], "amin")
    ends = links.ends
    order = torch.randperm(len(group), generator=generator)
    order = order[group[order].argsort(stable=True)]
    first_test = _first_of_group(group[order], len(group) - int(test * len(group)))
    first_val = _first_of_group(group[order], max(first_test - int(val * len(group)), 0))
    train, val_links, test_links = order.tensor_split([first_val, first_test])
    if not (len(train) and len(val_links) and len(test_links)):
        raise ValueError(f"val={val} and test={test} leave a part of the {len(group)} links empty")
    is_train = torch.zeros(len(group), dtype=torch.bool).index_fill(0, train, True)
    keep = torch.where(links.of_edge < 0, True, is_train[links.of_edge])
    if edge_time is not None:
        keep &= edge_time < group[val_links].min()
    known = keep_edges(graph, keep)
    absent = absent_edges(
        _without_absent_pairs(graph, ends[:, train], links.directed),
        len(val_links) + len(test_links),
        generator,
        distinct=True,
        undirected=not links.directed,
    )
    val_absent, test_absent = absent.cpu().split([len(val_links), len(test_links)], 1)
    parts = (ends[:, train], ends[:, val_links], ends[:, test_links])
    return LinkSplit(known, *parts, val_absent, test_absent, links.directed)


def split_relation(
    graph: HeteroGraph,
    relation: EdgeKind,
    val: float = 0.05,
    test: float = 0.1,
    *,
    times: Tensor | None = None,
    seed: int = 0,
) -> tuple[HeteroGraph, LinkSplit]:
    """`split_links` of the links of one relation, which are directed, and all relations without the held-out links.

    Other relations that hold the same links, such as ("item", "bought by", "user") beside ("user", "buys", "item"),
    lose them, too: those between the same kinds of nodes whose pairs are exactly those of `relation`, in the same
    direction or in the opposite one.

    Args:
        graph: its other relations stay as they are.
        relation: (kind of sources, name, kind of destinations). times: [E], of the edges of this relation.

    Raises:
        KeyError: the graph has no such relation.
        ValueError: as `split_links`.
    """
    if relation not in graph:
        raise KeyError(f"there is no relation {relation!r}; the graph has {', '.join(map(repr, graph))}")
    whole = graph[relation]
    links = split_links(whole, val, test, directed=True, times=times, seed=seed)
    rest = {**graph, relation: links.graph}
    pairs, known = whole.runs, links.graph.runs
    for other, its in graph.items():
        for kinds, all_pairs, known_pairs in (
            ((relation[0], relation[2]), pairs, known),
            ((relation[2], relation[0]), pairs.transpose(), known.transpose()),
        ):
            if other != relation and (other[0], other[2]) == kinds and its.runs.same_as(all_pairs):
                src, dst = its.edge_index.cpu().numpy()
                rest[other] = keep_edges(its, torch.from_numpy(known_pairs.contains(dst, src)))
                break
    return HeteroGraph(rest, graph.num_nodes), links


class _Links(NamedTuple):
    """The links of a graph: their ends [2, L], the number of each one's pair of nodes in either direction [L], and
    the link of each edge [E], -1 for self-loops."""

    ends: Tensor
    pair: Tensor
    of_edge: Tensor
    directed: bool


def _links(graph: Graph, directed: bool) -> _Links:
    src, dst = graph.edge_index.cpu()
    square = graph.num_dst == graph.num_src
    is_link = src != dst if square else torch.ones_like(src, dtype=torch.bool)
    low, high = (torch.minimum(src, dst), torch.maximum(src, dst)) if square else (src, dst)
    directed = directed or not square
    first, second = (src, dst) if directed else (low, high)
    key, link = (second * graph.num_src + first)[is_link].unique(return_inverse=True)
    of_edge = torch.full_like(src, -1)
    of_edge[is_link] = link
    ends = torch.stack([key % graph.num_src, key // graph.num_src])
    either = ends.sort(0).values if square else ends
    pair = (either[1] * graph.num_src + either[0]).unique(return_inverse=True)[1]
    return _Links(ends, pair, of_edge, directed)


def _first_of_group(group: Tensor, index: int) -> int:
    """The index of the first element of the group that element `index` of ascending `group` belongs to."""
    return index if index >= len(group) else int(torch.searchsorted(group, group[index]))


def _without_absent_pairs(graph: Graph, train: Tensor, directed: bool) -> Graph:
    """The graph whose absent pairs may be drawn: with all links, and the reverse of those for training, which a model
    could recognize by the link that it knows."""
    edges = graph.edge_index.cpu()
    if directed and graph.num_dst == graph.num_src:
        edges = torch.cat([edges, train.flip(0)], 1)
    return Graph.from_edges(edges, graph.num_dst, graph.num_src)
