"""Links: undirected ones as directed edges, and splits of them for link prediction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mpnn import Graph
from mpnn.graph.arguments import are_one_set, as_integer
from mpnn.graph.graph import keep_edges
from mpnn.graphs import HeteroGraph, absent_edges
from mpnn.graphs.compressed import check_times
from mpnn.graphs.kinds import EdgeKind


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

    Links and absent pairs do not differ in form: both have the same orientation, each link occurs once in one of
    these tensors, and no absent pair is a link of any part.

    Args:
        graph: the links for training, with their attributes and types.
        train, val, test: int64 [2, L], each link once; of undirected graphs from the lower number to the higher.
        val_absent, test_absent: int64 [2, L], as many pairs that are not links of the whole graph, of any type.
        directed: whether a link and its reverse are two links.
        one_set: whether sources and destinations are the same nodes.
        train_type, val_type, test_type: int64 [L], the type of each link of a graph with edge types, else None. An
            absent pair has the type of the held-out link with the same index.
        stayed: set by `split_relation`: the share of its edges that each other relation kept, if it lost some.
    """

    graph: Graph
    train: Tensor
    val: Tensor
    test: Tensor
    val_absent: Tensor
    test_absent: Tensor
    directed: bool = False
    train_type: Tensor | None = None
    val_type: Tensor | None = None
    test_type: Tensor | None = None
    stayed: Mapping[EdgeKind, float] = field(default_factory=dict)
    one_set: bool = True

    def types(self, part: Literal["train", "val", "test"]) -> Tensor:
        """Returns the type of each link of a part, int64 [L]: 0 without edge types."""
        types = {"train": self.train_type, "val": self.val_type, "test": self.test_type}[part]
        return torch.zeros_like(getattr(self, part)[0]) if types is None else types

    def draw_absent(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns pairs without a link in the training graph, int64 [2, count], oriented as the links, for a training
        step. Links of validation and test may be among them, as training does not know them."""
        return absent_edges(self.graph, count, generator, undirected=not self.directed, one_set=self.one_set)


def split_links(
    graph: Graph,
    val: float = 0.05,
    test: float = 0.1,
    *,
    directed: bool = False,
    one_set: bool | None = None,
    times: Tensor | None = None,
    seed: int = 0,
) -> LinkSplit:
    """Holds out shares of the links of a graph, at random or the last ones.

    A link and its reverse are in the same part, also in a directed graph, so that training never sees the reverse of a
    link that it has to predict. Repeated edges are one link. Self-loops are not links; they stay in the training graph.

    In a graph with edge types a link is a triple (source, type, destination): two nodes have a link of each of the
    types between them. All links between two nodes are in the same part, unless `times` divide them.

    Args:
        graph: of one set of nodes, or of two, such as users and items.
        val, test: shares of the links.
        directed: whether a link and its reverse are two links. Links between two sets of nodes always are directed.
        one_set: whether sources and destinations are the same nodes. Default: whether there are equally many of both,
            so pass False for two sets of one size.
        times: [E], the time of each edge. Training has the earliest links, the test the latest; links of one time are
            in one part, and the training graph has no edge as late as the first link of the validation. The time of a
            link is that of its first edge.
        seed: of the random split and of the absent pairs.

    Raises:
        ValueError: a part would have no link, the graph has too few pairs without a link, or times do not fit.
    """
    generator = torch.Generator().manual_seed(as_integer("seed", seed))
    split = divided_links(graph, val, test, generator, directed=directed, one_set=one_set, times=times)
    return with_absent_pairs(split, graph, generator)


def divided_links(
    graph: Graph,
    val: float,
    test: float,
    generator: torch.Generator,
    *,
    directed: bool = False,
    one_set: bool | None = None,
    times: Tensor | None = None,
) -> LinkSplit:
    """`split_links` without absent pairs."""
    for name, share in (("val", val), ("test", test)):
        if isinstance(share, (bool, str)) or not hasattr(share, "__float__") or not 0 <= share <= 1:
            raise ValueError(f"{name} must be a share of the links, from 0 to 1; got {share!r}")
    links = _links(graph, directed, are_one_set(graph, one_set))
    if times is None:
        edge_time = None
        group = torch.randperm(int(links.pair.max()) + 1 if len(links.pair) else 0, generator=generator)[links.pair]
    else:
        check_times("times", times, graph.num_edges)
        edge_time = times.detach().cpu().unique(return_inverse=True)[1]
        proper = links.of_edge >= 0
        first = torch.full((links.ends.shape[1],), len(edge_time))
        group = first.scatter_reduce(0, links.of_edge[proper], edge_time[proper], "amin")
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
    return _split(keep_edges(graph, keep), links, (train, val_links, test_links))


def stated_links(graph: Graph, part: Tensor, *, directed: bool = False, one_set: bool | None = None) -> LinkSplit:
    """The links of a graph in the parts that are stated for its edges, without absent pairs.

    Args:
        graph: of one set of nodes, or of two, with edge types or without.
        part: int64 [E], 0 for training, 1 for validation, 2 for test. The edges of a link are in one part.
        directed, one_set: as of `split_links`.

    Raises:
        ValueError: a part has no link.
    """
    links = _links(graph, directed, are_one_set(graph, one_set))
    proper = links.of_edge >= 0
    of_link = torch.zeros(links.ends.shape[1], dtype=torch.int64)
    of_link[links.of_edge[proper]] = part[proper]
    train, val, test = ((of_link == k).nonzero().squeeze(1) for k in range(3))
    if not (len(train) and len(val) and len(test)):
        raise ValueError(f"training, validation and test have {len(train)}, {len(val)} and {len(test)} links")
    return _split(keep_edges(graph, part == 0), links, (train, val, test))


def with_absent_pairs(split: LinkSplit, graph: Graph, generator: torch.Generator) -> LinkSplit:
    """The split with absent pairs, drawn from all pairs that are no links of the whole graph.

    Raises:
        ValueError: there are too few.
    """
    count = split.val.shape[1], split.test.shape[1]
    absent = absent_edges(
        _without_absent_pairs(graph, split),
        sum(count),
        generator,
        distinct=True,
        undirected=not split.directed,
        one_set=split.one_set,
    )
    val_absent, test_absent = absent.cpu().split(count, 1)
    return replace(split, val_absent=val_absent, test_absent=test_absent)


def with_absent_destinations(split: LinkSplit, *, grouped: bool, seed: int = 0) -> LinkSplit:
    """The split with absent pairs that keep the source and the type of the held-out link at their place: only the
    destination is another one, drawn from all that the source has no link of this type with.

    Uniform absent pairs show something else, too: in a split in time, whether a user was ever active.

    Args:
        split: of directed links, or of two sets of nodes.
        grouped: whether all links between two nodes are in one part. Then no absent pair has a link for training of
            another type, or in the other direction, because such a pair is not a link for sure; unless a source has no
            other pairs.

    Raises:
        ValueError: nearly every pair is linked.
    """
    generator = torch.Generator().manual_seed(as_integer("seed", seed))
    num_src, num_dst = split.graph.num_src, split.graph.num_dst
    pairs = torch.cat([split.train, split.val, split.test], 1)
    types = torch.cat([split.types("train"), split.types("val"), split.types("test")])
    relations = int(types.max()) + 1
    linked = _triple(pairs, types, relations, num_dst).sort().values
    either = split.train[:, :0]
    if grouped:
        either = torch.cat([split.train, split.train.flip(0)], 1) if split.one_set else split.train
    either = _triple(either, torch.zeros_like(either[0]), 1, num_dst).sort().values

    def is_absent(pair: Tensor, of_type: Tensor) -> Tensor:
        absent = ~_holds_key(linked, _triple(pair, of_type, relations, num_dst))
        return absent & (pair[0] != pair[1]) if split.one_set else absent

    def drawn(held: Tensor, of_type: Tensor) -> Tensor:
        pair = held.clone()
        missing = torch.arange(pair.shape[1])
        for attempt in range(3 * _ATTEMPTS):
            pair[1, missing] = torch.randint(num_dst, (len(missing),), generator=generator)
            if attempt >= 2 * _ATTEMPTS:  # the source is linked to nearly all
                pair[0, missing] = torch.randint(num_src, (len(missing),), generator=generator)
            absent = is_absent(pair[:, missing], of_type[missing])
            if attempt < _ATTEMPTS:
                absent &= ~_holds_key(either, _triple(pair[:, missing], torch.zeros_like(missing), 1, num_dst))
            missing = missing[~absent]
            if not len(missing):
                return pair
        raise ValueError(
            f"nearly every pair of {split.graph} is linked; there are too few absent pairs to compare with"
        )

    of_val, of_test = types[split.train.shape[1] :].split([split.val.shape[1], split.test.shape[1]])
    return replace(split, val_absent=drawn(split.val, of_val), test_absent=drawn(split.test, of_test))


_ATTEMPTS = 100


def _triple(pairs: Tensor, types: Tensor, relations: int, num_dst: int) -> Tensor:
    """A number for each source, type and destination."""
    return (pairs[0] * relations + types) * num_dst + pairs[1]


def _holds_key(keys: Tensor, key: Tensor) -> Tensor:
    """Whether ascending `keys` hold each of `key`."""
    if not len(keys):
        return torch.zeros_like(key, dtype=torch.bool)
    return keys[torch.searchsorted(keys, key).clamp(max=len(keys) - 1)] == key


def split_relation(
    graph: HeteroGraph,
    relation: EdgeKind,
    val: float = 0.05,
    test: float = 0.1,
    *,
    times: Tensor | None = None,
    seed: int = 0,
) -> tuple[HeteroGraph, LinkSplit]:
    """Splits the links of one relation, as `split_links` does directed ones, and removes the held-out links from all
    relations.

    Every other relation between the same two kinds of nodes loses the held-out pairs, in the same direction and in the
    opposite one: ("item", "bought by", "user") and ("user", "buys", "item"), also where it lacks some of the links
    or has others. It loses the absent pairs as well, so that it does not distinguish them from links.
    `LinkSplit.stayed` holds the share of its edges that each of these relations keeps.

    Args:
        graph: its other relations keep all other edges.
        relation: (kind of sources, name, kind of destinations). times: [E], of the edges of this relation.

    Raises:
        KeyError: the graph has no such relation.
        ValueError: as `split_links`.
    """
    if relation not in graph:
        raise KeyError(f"there is no relation {relation!r}; the graph has {', '.join(map(repr, graph))}")
    one_set = relation[0] == relation[2]
    links = split_links(graph[relation], val, test, directed=True, one_set=one_set, times=times, seed=seed)
    held_out = torch.cat([links.val, links.test, links.val_absent, links.test_absent], 1)
    rest = {**graph, relation: links.graph}
    stayed = {}
    for other, edges in graph.items():
        if other == relation:
            continue
        keep = ~_holds(edges, other, held_out, relation)
        if not keep.all():
            rest[other] = keep_edges(edges, keep)
            stayed[other] = keep.double().mean().item()
    return HeteroGraph(rest, graph.num_nodes, graph.times), replace(links, stayed=stayed)


def _holds(edges: Graph, kind: EdgeKind, pairs: Tensor, relation: EdgeKind) -> Tensor:
    """Which edges [E] of another relation connect one of these pairs of `relation`, in either direction."""
    src, dst = edges.edge_index.cpu()
    among = torch.zeros(len(src), dtype=torch.bool)
    if (kind[0], kind[2]) == (relation[0], relation[2]):
        among |= _are_among(torch.stack([src, dst]), pairs, edges.num_src)
    if (kind[2], kind[0]) == (relation[0], relation[2]):
        among |= _are_among(torch.stack([dst, src]), pairs, edges.num_dst)
    return among


def _are_among(edges: Tensor, pairs: Tensor, num_src: int) -> Tensor:
    """Which columns of `edges` [2, E] are columns of `pairs` [2, P]."""
    edge, pair = (ends[1] * num_src + ends[0] for ends in (edges, pairs.cpu()))
    return torch.isin(edge, pair)


def _split(known: Graph, links: "_Links", parts: tuple[Tensor, Tensor, Tensor]) -> LinkSplit:
    """The links whose numbers are in each part, without absent pairs."""
    train, val, test = parts
    ends = links.ends
    none = ends[:, :0]
    split = LinkSplit(
        known, ends[:, train], ends[:, val], ends[:, test], none, none, links.directed, one_set=links.one_set
    )
    if links.type is None:
        return split
    return replace(split, train_type=links.type[train], val_type=links.type[val], test_type=links.type[test])


class _Links(NamedTuple):
    """The links of a graph: their ends [2, L], the number of each one's pair of nodes in either direction [L], the link
    of each edge [E], -1 for self-loops, and the type of each link [L] if edges have types."""

    ends: Tensor
    pair: Tensor
    of_edge: Tensor
    directed: bool
    one_set: bool
    type: Tensor | None


def _links(graph: Graph, directed: bool, one_set: bool) -> _Links:
    src, dst = graph.edge_index.cpu()
    is_link = src != dst if one_set else torch.ones_like(src, dtype=torch.bool)
    low, high = (torch.minimum(src, dst), torch.maximum(src, dst)) if one_set else (src, dst)
    directed = directed or not one_set
    first, second = (src, dst) if directed else (low, high)
    key, link = (second * graph.num_src + first)[is_link].unique(return_inverse=True)
    link_type = None
    if (edge_type := graph.types) is not None:
        types, of_type = edge_type.cpu()[is_link].unique(return_inverse=True)
        triple, link = (link * len(types) + of_type).unique(return_inverse=True)
        key = key[triple // len(types)]
        link_type = types[triple % len(types)]
    of_edge = torch.full_like(src, -1)
    of_edge[is_link] = link
    ends = torch.stack([key % graph.num_src, key // graph.num_src])
    either = ends.sort(0).values if one_set else ends
    pair = (either[1] * graph.num_src + either[0]).unique(return_inverse=True)[1]
    return _Links(ends, pair, of_edge, directed, one_set, link_type)


def _first_of_group(group: Tensor, index: int) -> int:
    """The index of the first element of the group that element `index` of ascending `group` belongs to."""
    return index if index >= len(group) else int(torch.searchsorted(group, group[index]))


def _without_absent_pairs(graph: Graph, split: LinkSplit) -> Graph:
    """The graph whose absent pairs may be drawn: with all links, and the reverse of those for training, which a model
    could recognize by the link that it knows."""
    edges = graph.edge_index.cpu()
    if split.directed and split.one_set:
        edges = torch.cat([edges, split.train.flip(0)], 1)
    return Graph.from_edges(edges, graph.num_dst, graph.num_src)
